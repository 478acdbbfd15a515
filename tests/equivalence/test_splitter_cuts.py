"""Equivalence of a model with its prefix, suffix and tail at every cut."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.split_model import SplitModel, split
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import digest_of, package_bytes
from reference_models import REFERENCE_MODELS, BranchedNet, ReferenceModel

SAMPLES = 3


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_equivalent(actual, expected):
    """Asserts the documented error bound."""
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=atol)


@dataclass(frozen=True)
class Subject:
    """A reference model, its parts, and its reloaded package."""

    reference: ReferenceModel
    model: nn.Module
    parts: SplitModel
    data: bytes
    loaded: FrozenGraph

    def samples(self):
        return torch.randn(SAMPLES, *self.reference.sample_shape)


@pytest.fixture(scope="module", params=REFERENCE_MODELS)
def subject(request):
    reference = REFERENCE_MODELS[request.param]
    model = reference.build()
    parts = split(model, reference.freeze, sample_shape=reference.sample_shape)
    data = package_bytes(parts.frozen)
    return Subject(reference, model, parts, data, load_package(data))


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
def test_prefix_suffix_and_tail_equal_the_model_at_every_cut(subject, fast):
    parts, loaded, local = subject.parts, subject.loaded, subject.parts.frozen
    if fast:
        loaded, local = (r.to("cpu", fast=True) for r in (loaded, local))
    assert loaded.cuts[-1].shape == subject.reference.features
    samples = subject.samples()
    with torch.inference_mode():
        expected = subject.model(samples)
        # Both tiers compute with fast regions.
        for cut in loaded.cuts[:: 1 if fast else 3]:
            with threads(1):
                prefix = loaded.prefix(cut.index)
                # The prefix runs two batches, the suffix one.
                crossing = torch.cat(
                    [prefix(samples[:2]), prefix(samples[2:])]
                )
            assert tuple(crossing.shape[1:]) == cut.shape
            assert crossing[0].nbytes == cut.bytes_per_sample
            # Threads that share a core wait for one another.
            with threads(1 if cut.index % 4 else 2):
                features = local.suffix(cut.index)(crossing)
                assert_equivalent(parts.tail(features), expected)


def test_loaded_package_equals_exported_region_bit_for_bit(subject):
    frozen, loaded = subject.parts.frozen, subject.loaded
    samples = subject.samples()
    # Fast regions, as on both tiers: in-place weights of a package have
    # another alignment, which changes last bits.
    exported, read = (
        region.to("cpu", fast=True) for region in (frozen, loaded)
    )
    with torch.inference_mode():
        expected = exported.suffix(0)(samples)
        assert torch.equal(read.suffix(0)(samples), expected)
    assert loaded.program == frozen.program
    for node, weight in frozen.weights.items():
        assert torch.equal(loaded.weights[node], weight)
    assert loaded.digest == frozen.digest
    assert loaded.cuts == frozen.cuts
    assert package_bytes(loaded) == subject.data


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
def test_prefix_and_suffix_do_not_modify_input_or_weights(subject, fast):
    frozen = subject.loaded
    if fast:
        frozen = frozen.to("cpu", fast=True)
    samples = subject.samples()[:1]
    original = samples.clone()
    weights = {n: b.clone() for n, b in frozen.suffix(0).named_buffers()}
    with torch.inference_mode():
        for cut in frozen.cuts[::3]:
            crossing = frozen.prefix(cut.index)(samples).clone()
            before = crossing.clone()
            frozen.suffix(cut.index)(crossing)
            assert torch.equal(crossing, before), cut
    assert torch.equal(samples, original)
    for name, buffer in frozen.suffix(0).named_buffers():
        assert torch.equal(buffer, weights[name]), name
    assert digest_of(subject.loaded) == subject.loaded.digest


def test_user_module_with_branches_is_equivalent_at_every_cut():
    torch.manual_seed(0)
    model = BranchedNet().eval()
    parts = split(model, "mix", sample_shape=(3, 16, 16))
    samples = torch.randn(4, 3, 16, 16)
    last = parts.frozen.num_cuts
    assert last > 3
    with torch.inference_mode():
        expected = model(samples)
        for frozen in (parts.frozen, parts.frozen.to("cpu", fast=True)):
            for cut in frozen.cuts:
                crossing = frozen.prefix(cut.index)(samples)
                features = frozen.suffix(cut.index)(crossing)
                assert_equivalent(parts.tail(features.contiguous()), expected)
            # Cut 0 and the last one are the ends of the region.
            features = frozen.prefix(last)(samples)
            assert torch.equal(frozen.prefix(0)(samples), samples)
            assert torch.equal(frozen.suffix(0)(samples), features)
            assert torch.equal(frozen.suffix(last)(features), features)
