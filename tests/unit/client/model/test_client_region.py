"""Frozen region on the client."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
import torchvision
from torch import nn
from torchvision.transforms._presets import ImageClassification

from hapi_client import NamedArrays, PlanConfig, split_model
from hapi_client.model.client_region import (
    MMAP_THRESHOLD_BYTES,
    SMALL_BATCH_CPU,
)
from hapi_client.model.frozen_region import FrozenRegion
from hapi_protocol.errors import ClientError
from hapi_protocol.transforms import Training
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.reference_image import reference_image
from hapi_splitter.profiling.profiler import LARGEST_BATCH
from networks import small_network
from reference_models import randomise_statistics

CPU = torch.device("cpu")
SMALL = ImageTransform(resize_size=36, crop_size=32)


class Flat(nn.Module):
    """A tail that needs contiguous features."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(6 * 30 * 30, 3)

    def forward(self, features):
        return self.scores(features.view(features.size(0), 6 * 30 * 30))


def frozen_part():
    torch.manual_seed(0)
    frozen = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Hardswish()
    )
    randomise_statistics(frozen)
    return frozen.eval()


def region_of(transform=SMALL, device=CPU, **options):
    model = (frozen_part(), Flat())
    return FrozenRegion(model, None, transform, device, **options)


class Odd(Flat):
    """A tail whose output is no vector, or that fails."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, features):
        return self.outputs(super().forward(features))


@pytest.mark.parametrize(
    ("outputs", "count"),
    [
        (nn.Dropout(), 3),
        (lambda scores: scores[:, 0], None),
        (lambda scores: {"logits": scores}, None),
        (lambda scores: scores[1], None),  # fails for one sample
    ],
)
def test_outputs_of_a_tail_are_counted_without_a_trace(outputs, count):
    tail = Odd(outputs).train()
    region = FrozenRegion((frozen_part(), tail), None, SMALL, CPU)
    before = torch.get_rng_state()
    assert region.num_outputs == count
    assert tail.training
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("frozen", ["head", "body and head", "none"])
def test_split_that_leaves_nothing_to_train_is_a_warning(frozen, caplog):
    network = small_network()
    network.requires_grad_(frozen != "body and head")
    name = "head" if frozen == "head" else "body"
    _, tail = split_model(network, name, transform=SMALL, split_directory="")
    trained = [weight for weight in tail.parameters() if weight.requires_grad]
    assert bool(trained) == (frozen == "none")
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    assert len(warnings) == (frozen != "none")
    assert all(f"{name!r} leaves nothing to train" in w for w in warnings)


def test_suffix_of_every_cut_gives_contiguous_features():
    region = region_of(forward_samples=2)
    images = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        expected = frozen_part()(images)
        for cut in range(region.num_cuts + 1):
            at_cut = region.device_graph.prefix(cut)(images).contiguous()
            features = region.run_suffix(cut, at_cut, 2)
            features = features.view(3, *expected.shape[1:])
            assert features.is_contiguous()
            torch.testing.assert_close(
                features, expected, rtol=1e-4, atol=1e-5
            )
            tail = region.tail(region.run_suffix(cut, at_cut, 2))
            assert tail.shape == (3, 3)


def test_features_of_one_pixel_have_the_usual_strides():
    """Those of ConvNeXt could not be cached: they were not viewed as bytes."""
    frozen = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1))
    region = FrozenRegion((frozen, nn.Flatten()), None, SMALL, CPU)
    features = region.run_suffix(0, torch.randn(8, 3, 32, 32), 8)
    assert features.stride() == (6, 1, 1, 1)
    assert features.view(torch.uint8).shape == (8, 6, 1, 4)


def test_sample_has_the_same_bits_in_each_slice_of_its_span():
    """torch chooses kernels by the number of samples."""
    model = torchvision.models.mobilenet_v3_small().eval()
    region = FrozenRegion(model, "avgpool", None, torch.device("cpu"))
    images = torch.randn(64, 3, 64, 64)
    size = region.batch_samples(64)
    assert [region.batch_samples(n) for n in (64, 40, 16, 3)] == [
        16,
        14,
        16,
        3,
    ]
    with torch.inference_mode():
        whole = region.run_suffix(0, images, size)
        for count in (1, 3, 5, 8, 13, 24):
            part = region.run_suffix(0, images[7 : 7 + count], size)
            assert torch.equal(part, whole[7 : 7 + count])
        short = region.run_suffix(0, images[:5], 5)
    assert not torch.equal(short, whole[:5])


@pytest.mark.parametrize(
    ("given", "expected"), [(3, 3), (None, LARGEST_BATCH["cpu"])]
)
def test_loader_workers_get_a_region_on_the_cpu(given, expected):
    meta = torch.device("meta")
    region = region_of(device=meta, forward_samples=given)
    assert region.forward_samples == (given or LARGEST_BATCH["cuda"])
    for copy in (
        region.on_cpu(),
        pickle.loads(pickle.dumps(region)),
        pickle.loads(pickle.dumps(region.on_cpu())),
    ):
        assert copy.device == CPU
        assert copy.forward_samples == expected
    limited = region.with_limits(99, 5)
    assert limited.on_cpu().forward_samples == 5
    assert (region.on_cpu().forward_samples, limited.max_pixels) == (
        expected,
        99,
    )
    assert region.max_pixels > 99


def test_forward_batch_is_small_if_its_tensors_would_be_mapped():
    largest = MMAP_THRESHOLD_BYTES // 16 // (4 * 32 * 32)
    for channels, expected in (
        (largest, LARGEST_BATCH["cpu"]),
        (largest + 1, SMALL_BATCH_CPU),
    ):
        body = nn.Sequential(nn.Conv2d(3, channels, 1), nn.AvgPool2d(32))
        region = FrozenRegion((body.eval(), nn.Linear(1, 1)), None, SMALL, CPU)
        assert region.forward_samples == expected


def test_region_is_optimised_for_the_device_but_not_in_its_package():
    region = region_of()
    assert region.device_graph.is_fast
    ops = [str(n.target) for n in region.device_graph.suffix(0).graph.nodes]
    assert not any("batch_norm" in op for op in ops)
    assert region.parameter_bytes == 4 * (3 * 6 * 9 + 6 + 4 * 6)


def test_augmentation_of_the_job_overrides_that_of_the_transform():
    image = reference_image()
    own = Augmentation(scale=(0.2, 0.3))
    with_own = ImageTransform(36, 32, augmentation=own)
    training = Training(1, 2)
    preset = ImageClassification(crop_size=32, resize_size=36)
    digests = set()
    for transform, augment, augmentation in (
        (SMALL, None, None),
        (with_own, None, own),
        (preset, Augmentation(), Augmentation()),
        (with_own, Augmentation(), Augmentation()),
    ):
        region = region_of(transform, augment=augment)
        assert region.transform.augmentation == augmentation
        assert torch.equal(region.decode(image), SMALL(decode_image(image)))
        digests.add(region._graph.digest)
        if augmentation is not None:
            sample = region.decode(image, "k", training)
            expected = replace(SMALL, augmentation=augmentation).sample(
                decode_image(image), "k", training
            )
            assert torch.equal(sample, expected)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("transform", "augment", "message"),
    [
        (None, {"scale": (0, 1)}, "give an Augmentation"),
        (ImageTransform(2304, 2304), Augmentation(), "1 to 2048 pixels"),
        (ArrayTransform((3, 32, 32)), Augmentation(), "augment is given for"),
        (ArrayTransform((3, 32, 32)), {"scale": 1}, "give an Augmentation"),
    ],
)
def test_invalid_augmentation_is_named(transform, augment, message):
    with pytest.raises(ClientError, match=message) as caught:
        region_of(transform, augment=augment)
    assert caught.value.code == "bad_configuration"


def facts_of(model=None, freeze="body", transform=SMALL, **options):
    model = small_network() if model is None else model
    return FrozenRegion(model, freeze, transform, CPU, **options).facts


def test_facts_depend_on_the_frozen_part_only():
    facts = facts_of()
    model = small_network()
    with torch.no_grad():
        model.head.weight.add_(1)
    assert facts_of(model) == facts
    assert facts_of(torch.compile(small_network())) == facts
    assert json.loads(json.dumps(facts)) == facts

    with torch.no_grad():
        model.body[1].running_var[3] *= 1.001
    others = {
        "weights": facts_of(model),
        "freeze": facts_of(freeze="pool"),
        "transform": facts_of(transform=replace(SMALL, antialias=False)),
        "augmentation": facts_of(augment=Augmentation()),
    }
    for name, other in others.items():
        assert {n for n in facts if facts[n] != other[n]} == {name}
    with torch.no_grad():
        frozen = frozen_part()
        pair = facts_of((frozen, Flat()), None)
        assert facts_of((frozen, Flat()), None) == pair
        frozen[0].bias[0] += 1
        assert facts_of((frozen, Flat()), None)["weights"] != pair["weights"]


def test_facts_do_not_depend_on_the_release_of_torch(monkeypatch):
    """The digest of the package does: it contains the versions."""
    before = FrozenRegion(small_network(), "body", SMALL, CPU)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.1")
    after = FrozenRegion(small_network(), "body", SMALL, CPU)
    assert after._graph.digest != before._graph.digest
    assert after.facts == before.facts


class Buffers(nn.Module):
    """A module with buffers of unusual dtypes and shapes."""

    def __init__(self, last):
        super().__init__()
        self.register_buffer("number", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("short", torch.tensor([[1, last]]).bfloat16().T)

    def forward(self, images):
        return images + 1


def test_facts_cover_weights_of_every_dtype_and_shape():
    tail = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2))
    digests = {
        facts_of((Buffers(last).eval(), tail), None)["weights"]
        for last in (1.0, 2.0, 2.0)
    }
    assert len(digests) == 2


class Masked(nn.Module):
    """A model whose head reads integers of its input again."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, values, mask):
        return self.head(self.body(values) * mask)


def test_integers_are_not_sent_in_a_lossy_encoding():
    arrays = NamedArrays.of(
        values=ArrayTransform((6,)), mask=ArrayTransform((6,), "int64")
    )
    region, _ = split_model(Masked(), "body", transform=arrays)
    region.check_encodings(PlanConfig().encodings)
    lossy = PlanConfig(min_precision="half")
    with pytest.raises(ClientError, match="'float16' would change integers"):
        region.check_encodings(lossy.encodings)
    values = ArrayTransform((6,))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    split_model(model, "0", transform=values)[0].check_encodings(
        lossy.encodings
    )
