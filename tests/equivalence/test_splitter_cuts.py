"""Server part + client part == whole module, at every cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hapi_splitter.package import load_package, package_bytes
from hapi_splitter.trace import split
from reference_models import REFERENCE_MODELS, BranchedNet

SAMPLES = 3


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_equivalent(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The bound that docs and clients rely on."""
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_prefix_then_suffix_then_tail_equals_model_at_every_cut(
    name: str,
) -> None:
    reference = REFERENCE_MODELS[name]
    model = reference.build()
    parts = split(model, reference.freeze, sample_shape=reference.sample_shape)
    assert parts.frozen.cuts[-1].shape == reference.features
    loaded = load_package(bytearray(package_bytes(parts.frozen)))
    samples = torch.randn(SAMPLES, *reference.sample_shape)
    with torch.inference_mode():
        expected = model(samples)
        for cut in loaded.cuts:
            with threads(1):
                prefix = loaded.prefix(cut.index)
                # Two batches there, one here.
                crossing = torch.cat(
                    [prefix(samples[:2]), prefix(samples[2:])]
                )
            assert tuple(crossing.shape[1:]) == cut.shape
            assert crossing[0].nbytes == cut.bytes_per_sample
            with threads(2):
                features = parts.frozen.suffix(cut.index)(crossing)
                assert_equivalent(parts.tail(features), expected)


@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_loaded_package_equals_exported_region_bit_for_bit(name: str) -> None:
    reference = REFERENCE_MODELS[name]
    model = reference.build()
    frozen = split(
        model, reference.freeze, sample_shape=reference.sample_shape
    ).frozen
    data = package_bytes(frozen)
    loaded = load_package(data)
    samples = torch.randn(SAMPLES, *reference.sample_shape)
    with torch.inference_mode():
        expected = frozen.suffix(0)(samples)
        assert torch.equal(loaded.suffix(0)(samples), expected)
    assert loaded.digest == frozen.digest
    assert loaded.cuts == frozen.cuts
    assert package_bytes(loaded) == data


def test_user_module_with_branches_is_equivalent_at_every_cut() -> None:
    torch.manual_seed(0)
    model = BranchedNet().eval()
    parts = split(model, "mix", sample_shape=(3, 16, 16))
    samples = torch.randn(4, 3, 16, 16)
    with torch.inference_mode():
        expected = model(samples)
        assert parts.frozen.num_cuts > 3
        for cut in parts.frozen.cuts:
            crossing = parts.frozen.prefix(cut.index)(samples)
            features = parts.frozen.suffix(cut.index)(crossing)
            assert_equivalent(parts.tail(features), expected)


def test_cut_zero_and_the_last_cut_are_the_ends_of_the_region() -> None:
    frozen = split(BranchedNet(), "mix", sample_shape=(3, 16, 16)).frozen
    samples = torch.randn(2, 3, 16, 16)
    features = frozen.prefix(frozen.num_cuts)(samples)
    assert torch.equal(frozen.prefix(0)(samples), samples)
    assert torch.equal(frozen.suffix(0)(samples), features)
    assert torch.equal(frozen.suffix(frozen.num_cuts)(features), features)


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "densenet121"])
def test_prefix_and_suffix_leave_their_input_alone(name: str) -> None:
    reference = REFERENCE_MODELS[name]
    frozen = split(
        reference.build(),
        reference.freeze,
        sample_shape=reference.sample_shape,
    ).frozen
    samples = torch.randn(1, *reference.sample_shape)
    kept = samples.clone()
    weights = {i: w.clone() for i, w in frozen.weights.items()}
    with torch.inference_mode():
        for cut in frozen.cuts:
            crossing = frozen.prefix(cut.index)(samples).clone()
            before = crossing.clone()
            frozen.suffix(cut.index)(crossing)
            assert torch.equal(crossing, before), cut
    assert torch.equal(samples, kept)
    for node, weight in frozen.weights.items():
        assert torch.equal(weight, weights[node])
