"""Fast regions: folded batch norms and channels-last images."""

import gc
import linecache
import weakref
from functools import partial

import pytest
import torch
from torch import fx, nn

from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.batchnorm_folding import fold
from hapi_splitter.graph.lowering import BATCH_NORM, META_CALL
from hapi_splitter.graph.program import INPUT, Call, Ref
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
    randomise_statistics,
)
from regions import region_of

CONV = "aten.conv2d.default"
CPU = torch.device("cpu")


def assert_close(actual, expected):
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=atol)


def convolution(image, weight, bias=None, groups=1):
    bias = bias and Ref(bias)
    sides = ((1, 1), (1, 1), (1, 1))
    return Call(CONV, (Ref(image), Ref(weight), bias, *sides, groups))


def norm(image, scale, shift, mean, variance=4):
    affine = (scale and Ref(scale), shift and Ref(shift))
    statistics = (Ref(mean), Ref(variance))
    return Call(BATCH_NORM, (Ref(image), *affine, *statistics, 0.1, 1e-5))


def statistics(channels):
    """Returns scale, shift, mean and variance."""
    signed = [torch.randn(channels) for _ in range(3)]
    return [*signed, torch.rand(channels) + 0.1]


def numbered(tensors):
    return dict(enumerate(tensors, 1))


def ops_of(module):
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    return [str(call.target) for call in calls]


def assert_equal_regions(fast, frozen, samples):
    with torch.inference_mode():
        assert_close(fast.suffix(0)(samples), frozen.suffix(0)(samples))


def small_region():
    network = small_network().eval()
    randomise_statistics(network)
    return split(network, "body", transform=small_transform()).frozen


def branched_region():
    model = BranchedNet().eval()
    randomise_statistics(model)
    return split(model, "mix", sample_shape=(3, 16, 16)).frozen


def reference_region(name):
    reference = REFERENCE_MODELS[name]
    shape = reference.sample_shape
    return split(
        reference.build(), reference.freeze, sample_shape=shape
    ).frozen


@pytest.fixture(scope="module")
def mobile():
    """A region with convolutions at cuts and in branches without cuts."""
    return reference_region("mobilenet_v3_small")


# Weights 1 to 4: scale, shift, mean and variance of 6 channels; 5 and 6:
# weight and bias of the convolution.
@pytest.mark.parametrize(
    ("bias", "scale", "shift", "groups"),
    [(6, 1, 2, 1), (None, 1, 2, 1), (6, None, None, 1), (None, 1, 2, 3)],
)
def test_folded_convolution_equals_the_batch_norm(bias, scale, shift, groups):
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
    assert_equal_regions(fast, frozen, torch.randn(4, 3, 9, 7))
    assert ops_of(fast.suffix(0)) == [CONV, "aten.relu_.default"]


def test_one_dimensional_convolution_is_folded():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(10, 2)
    ).eval()
    model[1].running_mean.uniform_(-1, 1)
    frozen = split(model, "2", sample_shape=(4, 12)).frozen
    fast = frozen.to(CPU, fast=True)
    assert_equal_regions(fast, frozen, torch.randn(3, 4, 12))
    assert not any("batch_norm" in op for op in ops_of(fast.suffix(0)))


FIRST, LAST = convolution(INPUT, 5, 6), norm(8, 1, 2, 3)
KEPT = {
    "read twice": [
        *(FIRST, norm(7, 1, 2, 3)),
        Call("aten.add.Tensor", (Ref(7), Ref(8), 1)),
    ],
    "computed mean": [
        *(FIRST, Call("aten.neg.default", (Ref(3),))),
        norm(7, 1, 2, 8),
    ],
    "computed weight": [
        Call("aten.neg.default", (Ref(5),)),
        *(convolution(INPUT, 7, 6), LAST),
    ],
    "of something else": [FIRST, Call("aten.relu.default", (Ref(7),)), LAST],
}


@pytest.mark.parametrize("calls", KEPT.values(), ids=KEPT)
def test_batch_norm_that_cannot_be_folded_is_kept(calls):
    torch.manual_seed(0)
    kernel = torch.randn(6, 3, 3, 3)
    weights = numbered([*statistics(6), kernel, torch.randn(6)])
    frozen = region_of((3, 8, 8), calls, weights)
    assert not fold(frozen.program, frozen.weights).convolutions
    fast = frozen.to(CPU, fast=True)
    assert_equal_regions(fast, frozen, torch.randn(2, 3, 8, 8))


def shared_convolutions(count, norms):
    """Convolutions in a chain with one weight, and batch norms after them.

    Args:
        count: number of convolutions.
        norms: number of different batch norms.
    """
    torch.manual_seed(0)
    tensors = [each for _ in range(norms) for each in statistics(3)]
    weights = numbered([*tensors, torch.randn(3, 3, 3, 3) / 5])
    first = len(weights) + 1
    calls, image = [], INPUT
    for number in range(count):
        place = 4 * (number % norms) + 1
        calls += [
            convolution(image, len(weights)),
            norm(first + 2 * number, *range(place, place + 4)),
        ]
        image = first + 2 * number + 1
    return region_of((3, 8, 8), calls, weights)


@pytest.mark.parametrize(
    ("count", "norms", "num_folded"),
    [(2, 2, 0), (2, 1, 2), (40, 40, 0), (40, 1, 2), (40, 39, 0)],
)
def test_shared_convolution_weight_is_folded_once_or_not_at_all(
    count, norms, num_folded
):
    frozen = shared_convolutions(count, norms)
    fast = frozen.to(CPU, fast=True)
    assert len(fold(frozen.program, frozen.weights).weights) == num_folded
    assert fast.parameter_bytes <= 2 * frozen.parameter_bytes
    images = torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        for cut in frozen.cuts[:4]:
            crossing = fast.prefix(cut.index)(images)
            assert_close(crossing, frozen.prefix(cut.index)(images))
            features = fast.suffix(cut.index)(crossing)
            assert_close(features, frozen.suffix(0)(images))


def test_fast_region_has_the_same_cuts_and_ids_and_stays_fast():
    frozen = small_region()
    fast = frozen.to(CPU, fast=True)
    assert fast.is_fast
    assert not frozen.is_fast
    assert fast.cuts == frozen.cuts
    assert fast.program == frozen.program
    assert fast.digest == frozen.digest

    def yielded(region):
        nodes = region.suffix(0).graph.nodes
        return [n.meta[META_CALL] for n in nodes if META_CALL in n.meta]

    first = frozen.cuts[0].node
    assert yielded(fast) == [n for n in yielded(frozen) if n != first]

    moved = fast.to("cpu")
    assert moved.is_fast
    assert moved.parameter_bytes == fast.parameter_bytes
    images = torch.randn(2, *fast.input_shape)
    with torch.inference_mode():
        assert torch.equal(moved.suffix(0)(images), fast.suffix(0)(images))


def test_cut_before_a_batch_norm_is_not_folded():
    frozen = small_region()
    fast = frozen.to(CPU, fast=True)
    assert [cut.op for cut in frozen.cuts[:2]] == [CONV, BATCH_NORM]
    assert ops_of(fast.prefix(1)) == ops_of(frozen.prefix(1))
    assert ops_of(fast.suffix(1)) == ops_of(frozen.suffix(1))
    convolved, normalised, *_ = [cut.node for cut in frozen.cuts]
    assert ops_of(fast.prefix(2)) == [CONV]
    both = [CONV, "aten.batch_norm.default"]
    assert ops_of(fast.prefix(2, {convolved})) == both
    assert fast.fused_into(convolved) == normalised
    assert fast.fused_into(normalised) == normalised
    assert frozen.fused_into(convolved) == convolved


def test_modules_of_a_fast_region_share_their_weights(mobile):
    fast = mobile.to(CPU, fast=True)

    def addresses(module):
        return {b.data_ptr() for b in module.buffers() if b.numel()}

    whole = addresses(fast.prefix(fast.num_cuts))
    assert addresses(fast.prefix(fast.num_cuts - 1)) <= whole
    assert addresses(fast.suffix(fast.num_cuts // 2)) < whole
    # Weights that are not folded are kept for cuts only.
    nodes = {cut.node for cut in mobile.cuts}
    convolutions = fold(mobile.program, mobile.weights).convolutions
    assert {node in nodes for node in convolutions} == {True, False}
    for node in convolutions:
        weight = mobile.program.call(node).refs()[1]
        assert (weight in fast.weights) == (node in nodes)


@pytest.mark.parametrize("build", [small_region, branched_region])
def test_parameter_bytes_equal_the_allocated_storage(build):
    frozen = build()
    fast = frozen.to(CPU, fast=True)
    if build is branched_region:
        assert not any("batch_norm" in op for op in ops_of(fast.suffix(0)))
        assert fast.parameter_bytes < frozen.parameter_bytes
    allocated = {}
    for cut in range(fast.num_cuts + 1):
        for module in (fast.prefix(cut), fast.suffix(cut)):
            for buffer in module.buffers():
                storage = buffer.untyped_storage()
                allocated[storage.data_ptr()] = storage.nbytes()
    assert sum(allocated.values()) == fast.parameter_bytes
    original = {w.data_ptr() for w in frozen.weights.values() if w.numel()}
    assert not original & allocated.keys()


def test_fast_region_cannot_be_written_as_a_package(tmp_path):
    frozen = small_region()
    before = package_bytes(frozen)
    fast = frozen.to(CPU, fast=True)
    to_file = partial(write_package, path=tmp_path / "model.hapi")
    for write in (package_bytes, digest_of, to_file):
        with pytest.raises(ValueError, match="made from"):
            write(fast)
    assert package_bytes(frozen) == before


def test_fast_region_does_not_use_the_packages_memory():
    data = bytearray(package_bytes(small_region()))
    fast = load_package(data).to(CPU, fast=True)
    images = torch.randn(1, *fast.input_shape)
    with torch.inference_mode():
        expected = fast.suffix(0)(images).clone()
        data[:] = bytes(len(data))
        assert torch.equal(fast.suffix(0)(images), expected)


def test_module_is_freed_with_its_weights_and_source():
    module = small_region().to(CPU, fast=True).prefix(1)
    source = type(module).forward.__code__.co_filename
    assert linecache.getlines(source)
    references = [weakref.ref(each) for each in (module, *module.buffers())]
    gc.disable()
    try:
        del module
        assert not any(each() for each in references)
        assert linecache.getlines(source) == []
    finally:
        gc.enable()


class MemoryFormats(fx.Interpreter):
    """Records which four-dimensional tensors are channels-last."""

    def __init__(self, module):
        super().__init__(module)
        self.is_last: dict[int, bool] = {}

    def run_node(self, n):
        result = super().run_node(n)
        call = n.meta.get(META_CALL)
        if call is not None and result.ndim == 4:
            self.is_last[call] = result.is_contiguous(
                memory_format=torch.channels_last
            )
        return result


def test_convolutional_networks_are_channels_last(mobile):
    for frozen in (mobile, reference_region("resnet18")):
        formats = MemoryFormats(frozen.to(CPU, fast=True).suffix(0))
        with torch.inference_mode():
            formats.run(torch.randn(2, *frozen.input_shape))
        assert formats.is_last
        assert all(formats.is_last.values())
