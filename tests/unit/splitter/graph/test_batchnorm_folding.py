"""Fast regions: folded batch norms, and images with their channels last."""

from __future__ import annotations

import gc
import linecache
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torchvision import models

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.batchnorm_folding import fold
from hapi_splitter.graph.lowering import BATCH_NORM, META_CALL
from hapi_splitter.graph.program import INPUT, Argument, Call, Ref
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import (
    digest_of,
    package_bytes,
    write_package,
)
from networks import small_network, small_transform
from reference_models import (
    REFERENCE_MODELS,
    BranchedNet,
    ReferenceModel,
    randomise_statistics,
)
from regions import region_of

CONV = "aten.conv2d.default"
CPU = torch.device("cpu")


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)


def convolution(
    image: int, weight: int, bias: int | None = None, groups: int = 1
) -> Call:
    args: tuple[Argument, ...] = (
        Ref(image),
        Ref(weight),
        None if bias is None else Ref(bias),
        (1, 1),
        (1, 1),
        (1, 1),
        groups,
    )
    return Call(CONV, args)


def norm(image: int, scale: int | None, shift: int | None, mean: int) -> Call:
    """Its variance is the weight after the mean."""
    pair = (scale and Ref(scale), shift and Ref(shift))
    statistics = (Ref(mean), Ref(mean + 1))
    return Call(BATCH_NORM, (Ref(image), *pair, *statistics, 0.1, 1e-5))


def statistics(channels: int) -> list[torch.Tensor]:
    """Scale, shift, mean, variance."""
    signed = [torch.randn(channels) for _ in range(3)]
    return [*signed, torch.rand(channels) + 0.1]


def numbered(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    return dict(enumerate(tensors, 1))


def ops_of(module: fx.GraphModule) -> list[str]:
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    return [str(call.target) for call in calls]


def small_region() -> FrozenGraph:
    network = small_network().eval()
    randomise_statistics(network)
    return split(network, "body", transform=small_transform()).frozen


def branched_region() -> FrozenGraph:
    model = BranchedNet().eval()
    randomise_statistics(model)
    return split(model, "mix", sample_shape=(3, 16, 16)).frozen


@pytest.fixture(scope="module")
def mobile() -> FrozenGraph:
    """With convolutions at cuts, and in branches where there are none."""
    return frozen_part(REFERENCE_MODELS["mobilenet_v3_small"])


def frozen_part(reference: ReferenceModel) -> FrozenGraph:
    return split(
        reference.build(),
        reference.freeze,
        sample_shape=reference.sample_shape,
    ).frozen


# Weights 1 to 4 are scale, shift, mean and variance of 6 channels, 5 is the
# convolution's weight, 6 its bias.
@pytest.mark.parametrize(
    ("bias", "scale", "shift", "groups"),
    [(6, 1, 2, 1), (None, 1, 2, 1), (6, None, None, 1), (None, 1, 2, 3)],
)
def test_folded_convolution_yields_the_tensor_of_the_batch_norm(
    bias: int | None, scale: int | None, shift: int | None, groups: int
) -> None:
    torch.manual_seed(0)
    kernel = torch.randn(6, 3 // groups, 3, 3)
    weights = numbered([*statistics(6), kernel, torch.randn(6)])
    calls = [
        convolution(INPUT, 5, bias, groups),
        norm(7, scale, shift, 3),
        Call("aten.relu.default", (Ref(8),)),
    ]
    frozen = region_of((3, 9, 7), calls, weights)
    fast = frozen.to(CPU, fast=True)
    images = torch.randn(4, 3, 9, 7)
    with torch.inference_mode():
        found = fast.suffix(0)(images)
        assert_near(found, frozen.suffix(0)(images))
    assert ops_of(fast.suffix(0)) == [
        "aten.conv2d.default",
        "aten.relu_.default",
    ]


def test_one_dimensional_convolution_is_folded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(10, 2)
    ).eval()
    model[1].running_mean.uniform_(-1, 1)
    frozen = split(model, "2", sample_shape=(4, 12)).frozen
    fast = frozen.to(CPU, fast=True)
    samples = torch.randn(3, 4, 12)
    with torch.inference_mode():
        assert_near(fast.suffix(0)(samples), frozen.suffix(0)(samples))
    assert not any("batch_norm" in op for op in ops_of(fast.suffix(0)))


def read_twice() -> list[Call]:
    calls = [convolution(INPUT, 5, 6), norm(7, 1, 2, 3)]
    return [*calls, Call("aten.add.Tensor", (Ref(7), Ref(8), 1))]


def computed_mean() -> list[Call]:
    calls = [convolution(INPUT, 5, 6), Call("aten.neg.default", (Ref(3),))]
    batch_norm = norm(7, 1, 2, 3)
    image, scale, shift, _mean, *rest = batch_norm.args
    return [*calls, Call(BATCH_NORM, (image, scale, shift, Ref(8), *rest))]


def computed_weight() -> list[Call]:
    calls = [Call("aten.neg.default", (Ref(5),)), convolution(INPUT, 7, 6)]
    return [*calls, norm(8, 1, 2, 3)]


def norm_of_something_else() -> list[Call]:
    calls = [convolution(INPUT, 5, 6), Call("aten.relu.default", (Ref(7),))]
    return [*calls, norm(8, 1, 2, 3)]


@pytest.mark.parametrize(
    "build",
    [read_twice, computed_mean, computed_weight, norm_of_something_else],
)
def test_batch_norm_stays_where_it_cannot_be_folded(
    build: Callable[[], list[Call]],
) -> None:
    torch.manual_seed(0)
    kernel = torch.randn(6, 3, 3, 3)
    weights = numbered([*statistics(6), kernel, torch.randn(6)])
    frozen = region_of((3, 8, 8), build(), weights)
    assert not fold(frozen.program, frozen.weights).convolutions
    fast = frozen.to(CPU, fast=True)
    images = torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        assert_near(fast.suffix(0)(images), frozen.suffix(0)(images))


def test_shared_convolution_weight_is_folded_for_each_batch_norm() -> None:
    torch.manual_seed(0)
    first, second = statistics(3), statistics(3)
    kernel = torch.randn(3, 3, 3, 3)
    weights = numbered([*first, *second, kernel])
    calls = [
        convolution(INPUT, 9),
        norm(10, 1, 2, 3),
        convolution(11, 9),
        norm(12, 5, 6, 7),
    ]
    frozen = region_of((3, 8, 8), calls, weights)
    fast = frozen.to(CPU, fast=True)
    images = torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        for cut in frozen.cuts:
            crossing = fast.prefix(cut.index)(images)
            assert_near(crossing, frozen.prefix(cut.index)(images))
            found = fast.suffix(cut.index)(crossing)
            assert_near(found, frozen.suffix(0)(images))


def test_cuts_and_ids_are_those_of_the_region() -> None:
    frozen = small_region()
    fast = frozen.to(CPU, fast=True)
    assert fast.is_fast
    assert not frozen.is_fast
    assert fast.cuts == frozen.cuts
    assert fast.program == frozen.program
    assert fast.digest == frozen.digest

    def yielded(region: FrozenGraph) -> list[int]:
        nodes = region.suffix(0).graph.nodes
        return [n.meta[META_CALL] for n in nodes if META_CALL in n.meta]

    first = frozen.cuts[0].node
    assert yielded(fast) == [n for n in yielded(frozen) if n != first]


def test_cut_between_convolution_and_batch_norm_has_their_own_calls() -> None:
    frozen = small_region()
    fast = frozen.to(CPU, fast=True)
    assert [cut.op for cut in frozen.cuts[:2]] == [CONV, BATCH_NORM]
    assert ops_of(fast.prefix(1)) == ops_of(frozen.prefix(1))
    assert ops_of(fast.suffix(1)) == ops_of(frozen.suffix(1))
    assert ops_of(fast.prefix(2)) == ["aten.conv2d.default"]
    assert ops_of(fast.prefix(2, {frozen.cuts[0].node})) == [
        "aten.conv2d.default",
        "aten.batch_norm.default",
    ]
    convolved, normalised, *_ = [cut.node for cut in frozen.cuts]
    assert fast.fused_into(convolved) == normalised
    assert fast.fused_into(normalised) == normalised
    assert frozen.fused_into(convolved) == convolved


def test_modules_of_a_fast_region_share_their_weights(
    mobile: FrozenGraph,
) -> None:
    fast = mobile.to(CPU, fast=True)

    def places(module: fx.GraphModule) -> set[int]:
        return {b.data_ptr() for b in module.buffers() if b.numel()}

    whole = places(fast.prefix(fast.num_cuts))
    assert places(fast.prefix(fast.num_cuts - 1)) <= whole
    assert places(fast.suffix(fast.num_cuts // 2)) < whole


@pytest.mark.parametrize("build", [small_region, branched_region])
def test_parameter_bytes_are_those_that_are_held(
    build: Callable[[], FrozenGraph],
) -> None:
    frozen = build()
    fast = frozen.to(CPU, fast=True)
    held: dict[int, int] = {}
    for cut in range(fast.num_cuts + 1):
        for module in (fast.prefix(cut), fast.suffix(cut)):
            for buffer in module.buffers():
                storage = buffer.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    assert sum(held.values()) == fast.parameter_bytes
    theirs = {w.data_ptr() for w in frozen.weights.values() if w.numel()}
    assert not theirs & held.keys()


def test_unfolded_weights_are_kept_for_cuts_only(mobile: FrozenGraph) -> None:
    fast = mobile.to(CPU, fast=True)
    nodes = {cut.node for cut in mobile.cuts}
    convolutions = fold(mobile.program, mobile.weights).convolutions
    between = [node in nodes for node in convolutions]
    assert any(between)
    assert not all(between)
    for node in convolutions:
        weight = mobile.program.call(node).refs()[1]
        assert (weight in fast.weights) == (node in nodes)


def test_fast_region_stays_fast_when_it_is_moved() -> None:
    fast = small_region().to(CPU, fast=True)
    images = torch.randn(2, *fast.input_shape)
    moved = fast.to("cpu")
    assert moved.is_fast
    assert moved.parameter_bytes == fast.parameter_bytes
    with torch.inference_mode():
        found = moved.suffix(0)(images)
        assert torch.equal(found, fast.suffix(0)(images))


def test_package_is_not_written_from_a_fast_region(tmp_path: Path) -> None:
    frozen = small_region()
    before = package_bytes(frozen)
    fast = frozen.to(CPU, fast=True)
    for write in (package_bytes, digest_of):
        with pytest.raises(ValueError, match="made from"):
            write(fast)
    with pytest.raises(ValueError, match="made from"):
        write_package(fast, tmp_path / "model.hapi")
    assert package_bytes(frozen) == before


def test_package_may_go_when_its_region_is_fast() -> None:
    data = bytearray(package_bytes(small_region()))
    fast = load_package(data).to(CPU, fast=True)
    images = torch.randn(1, *fast.input_shape)
    with torch.inference_mode():
        expected = fast.suffix(0)(images).clone()
        data[:] = bytes(len(data))
        assert torch.equal(fast.suffix(0)(images), expected)


def test_weights_and_source_go_with_the_last_use_of_a_module() -> None:
    module = small_region().to(CPU, fast=True).prefix(1)
    source = type(module).forward.__code__.co_filename
    assert linecache.getlines(source)
    held = [weakref.ref(each) for each in (module, *module.buffers())]
    gc.disable()
    try:
        del module
        assert [each() for each in held] == [None] * len(held)
        assert linecache.getlines(source) == []
    finally:
        gc.enable()


class _Layouts(fx.Interpreter):
    """Which tensors of four dimensions have their channels last."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.last: dict[int, bool] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        call = n.meta.get(META_CALL)
        if call is not None and result.ndim == 4:
            self.last[call] = result.is_contiguous(
                memory_format=torch.channels_last
            )
        return result


def _transformer(weights: None) -> nn.Module:
    """As vit_b_16, with one narrow block."""
    return models.VisionTransformer(
        image_size=48,
        patch_size=16,
        num_layers=1,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
    )


def _said_and_there(frozen: FrozenGraph) -> tuple[set[int], dict[int, bool]]:
    """Calls whose images are said to have their channels last, and of all
    calls whether they really have."""
    fast = frozen.to(CPU, fast=True)
    walk = _Layouts(fast.suffix(0))
    with torch.inference_mode():
        walk.run(torch.randn(2, *frozen.input_shape))
    assert not frozen.channels_last
    return fast.channels_last & walk.last.keys(), walk.last


def test_images_keep_their_channels_last(mobile: FrozenGraph) -> None:
    resnet = frozen_part(REFERENCE_MODELS["resnet18"])
    for frozen in (mobile, resnet):
        said, there = _said_and_there(frozen)
        assert there
        assert said == there.keys()
        assert all(there.values())


def test_images_are_said_to_have_channels_last_only_where_they_have() -> None:
    frozen = frozen_part(ReferenceModel(_transformer, "encoder", 48, (32,)))
    said, there = _said_and_there(frozen)
    assert said
    assert said <= {call for call, last in there.items() if last}


def test_order_is_not_said_to_be_kept_where_it_is_lost() -> None:
    weights = numbered([torch.randn(6, 3, 3, 3), torch.randn(1, 6, 8, 1)])
    calls = [
        convolution(INPUT, 1),
        Call("aten.mul.Tensor", (Ref(2), Ref(3))),
        Call("aten.contiguous.default", (Ref(3),)),
        Call("aten.relu.default", (Ref(5),)),
    ]
    fast = region_of((3, 8, 8), calls, weights).to(CPU, fast=True)
    assert fast.channels_last == {1, 3}


def test_user_module_is_folded_in_its_branches() -> None:
    frozen = branched_region()
    fast = frozen.to(CPU, fast=True)
    assert not any("batch_norm" in op for op in ops_of(fast.suffix(0)))
    assert fast.parameter_bytes < frozen.parameter_bytes
