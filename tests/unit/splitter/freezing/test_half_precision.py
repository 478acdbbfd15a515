"""Models of 16 bits, and autocast, compute the same on both tiers."""

import pytest
import torch
from torch import nn

from allocations import allocated_peak
from hapi_client import split_model
from hapi_protocol.errors import ClientError, PackageError
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.operators import DTYPES
from hapi_splitter.graph.program import INPUT, Call, Ref
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.named_arrays import NamedArrays
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.subprocess_validation import validate_package
from hapi_splitter.package.writer import package_bytes
from hapi_splitter.profiling.memory_model import memory_requirement
from regions import region_of

SHAPE = (3, 32, 32)
TOLERANCES = {"bfloat16": 2**-5, "float16": 2**-8}
"""Documented tolerances, relative to the largest value."""


def convolutions(dtype=torch.float32):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.GroupNorm(4, 16),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    ).to(dtype)


def transformer(dtype=torch.float32):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    return ViTForImageClassification(config).to(dtype)


class Island(nn.Module):
    """Normalises in float32 between layers in bfloat16."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3).bfloat16()
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3).bfloat16()
        self.head = nn.Linear(8, 5).bfloat16()

    def forward(self, images):
        x = self.norm(self.first(images).float()).bfloat16()
        return self.head(self.second(x).relu().mean((2, 3)))


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = convolutions()
        self.head = nn.Linear(5, 4)

    def forward(self, images):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.body(images)
            with torch.autocast("cpu", enabled=False):
                x = x.float().exp()
            return self.head(x)


def prepared(model):
    accelerate = pytest.importorskip("accelerate")
    # Another test may have set the process's precision.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    return accelerator.prepare(model)


B, H, F = torch.bfloat16, torch.float16, torch.float32
MODELS = {
    "vit-bfloat16": (lambda: transformer(B), "vit", B, {B}),
    "vit-float16": (lambda: transformer(H), "vit.layers.0", H, {H}),
    "cnn-bfloat16": (lambda: convolutions(B), "6", B, {B}),
    "cnn-float16": (lambda: convolutions(H), "8", H, {H}),
    "island": (Island, "second", B, {B, F}),
    "autocast": (Autocast, "body", F, {B}),
    "accelerate": (lambda: prepared(convolutions()), "6", F, {B}),
    "accelerate-vit": (lambda: prepared(transformer()), "vit", F, {B, F}),
}


@pytest.mark.parametrize("name", MODELS)
def test_prefix_suffix_and_tail_equal_the_model(name):
    make, freeze, dtype, dtypes = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    parts = split(model, freeze, sample_shape=SHAPE)
    parts.tail.eval()
    package = package_bytes(parts.frozen)
    assert rb"\"format\":5," in package
    region = load_package(package).to("cpu", fast=True)
    assert {DTYPES[cut.dtype] for cut in region.cuts} == dtypes
    images = torch.randn(5, *SHAPE)
    # The user of a model of 16 bits converts the images.
    expected = logits(model(images.to(dtype)))
    tolerance = TOLERANCES["float16" if dtype == H else "bfloat16"]
    for cut in (0, 1, region.num_cuts // 2, region.num_cuts):
        features = region.prefix(cut)(images)
        if cut:
            assert features.dtype == DTYPES[region.cuts[cut - 1].dtype]
        actual = logits(parts.tail(region.suffix(cut)(features)))
        torch.testing.assert_close(
            actual,
            expected,
            rtol=0,
            atol=tolerance * expected.abs().max().item(),
        )


def logits(result):
    return getattr(result, "logits", result)


class Pair(nn.Module):
    """Takes two arrays by name."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(3, 4)

    def forward(self, a, b):
        return torch.tanh(self.left(a)) * self.right(b)


def test_arrays_are_converted_for_a_model_of_16_bits():
    arrays = NamedArrays.of(a=ArrayTransform((6,)), b=ArrayTransform((3,)))
    model = Pair().bfloat16()
    parts = split(model, "left", transform=arrays)
    samples = torch.randn(2, 9)
    # Both are sent, as float32: the second is read behind the first.
    actual = parts.tail(parts.frozen.suffix(0)(samples))
    expected = model(*samples.bfloat16().split((6, 3), 1))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2**-5)


def test_two_modules_are_converted_for_as_one_model():
    layers = convolutions(H).eval()
    parts = split((layers[:4], layers[4:]), sample_shape=SHAPE)
    images = torch.randn(2, *SHAPE)
    actual = parts.tail(parts.frozen.suffix(0)(images))
    expected = layers(images.half())
    torch.testing.assert_close(actual, expected, rtol=0, atol=2**-8)


@pytest.mark.parametrize("dtype", [B, H])
def test_a_worker_measures_the_memory_of_convolutions(dtype):
    region = split(convolutions(dtype), "8", sample_shape=SHAPE).frozen
    validation = validate_package(package_bytes(region))
    fast = region.to("cpu", fast=True)
    fast.measured_memory = validation.memory
    assert validation.memory
    for batch in (4, 40):
        images = torch.randn(batch, *SHAPE)
        needed = memory_requirement(fast, fast.num_cuts).peak_bytes(batch)
        peak = allocated_peak(fast.prefix(fast.num_cuts), images)
        assert peak + fast.parameter_bytes <= needed


def test_operator_without_a_kernel_is_refused_by_name():
    sizes = ((2, 2, 2), (2, 2, 2), (0, 0, 0), False, True, None)
    calls = [
        Call("aten._to_copy.default", (Ref(INPUT), H)),
        Call("aten.avg_pool3d.default", (Ref(1), *sizes)),
    ]
    package = package_bytes(region_of((1, 4, 4, 4), calls))
    with pytest.raises(PackageError, match="not implemented for 'Half'"):
        validate_package(package)


def test_products_of_two_dtypes_are_refused():
    calls = [
        Call("aten._to_copy.default", (Ref(INPUT), H)),
        Call("aten.matmul.default", (Ref(INPUT), Ref(1))),
    ]
    with pytest.raises(PackageError, match="call 2"):
        region_of((4, 4), calls)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_precision_is_that_of_autocast_around_the_whole_model(precision):
    torch.manual_seed(0)
    model = convolutions().eval()
    images = torch.randn(5, *SHAPE)
    dtype = getattr(torch, precision)
    with torch.autocast("cpu", dtype, enabled=dtype != F):
        expected = model(images)
    # Also against the autocast in which it is split.
    with torch.autocast("cpu", B):
        frozen, tail = split_model(
            model, "6", transform=ArrayTransform(SHAPE), precision=precision
        )
    features = frozen.run_suffix(0, images, 5)
    assert features.dtype == dtype
    assert frozen.facts["precision"] == ("None" if dtype == F else precision)
    assert frozen.cut_dtype(frozen.num_cuts) == dtype
    # A tail without autocast computes in its own dtype.
    assert tail(features).dtype == F
    with torch.autocast("cpu", dtype, enabled=dtype != F):
        torch.testing.assert_close(
            tail(features),
            expected,
            rtol=0,
            atol=2**-5 * expected.abs().max().item(),
        )


def test_tail_of_16_bits_takes_features_of_its_own_precision():
    model = convolutions(B).eval()
    frozen, tail = split_model(
        model, "6", transform=ArrayTransform(SHAPE), precision="bfloat16"
    )
    features = frozen.run_suffix(0, torch.randn(5, *SHAPE), 5)
    assert tail(features).dtype == B


def test_unknown_precision_is_refused():
    with pytest.raises(ClientError, match="precision is 'fp8'; give one of"):
        split_model(convolutions(), "6", precision="fp8")
