"""What of the frozen region the client computes itself."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchvision.transforms._presets import ImageClassification

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
from hapi_splitter.inputs.sample_format import InputTransform
from hapi_splitter.profiling.profiler import LARGEST_BATCH
from networks import small_network
from reference_models import randomise_statistics

CPU = torch.device("cpu")
SMALL = ImageTransform(resize_size=36, crop_size=32)


class Flat(nn.Module):
    """A tail that takes its features for one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6 * 30 * 30, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.scores(features.view(features.size(0), 6 * 30 * 30))


def frozen_part() -> nn.Module:
    torch.manual_seed(0)
    frozen = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Hardswish()
    )
    randomise_statistics(frozen)
    return frozen.eval()


def test_features_of_every_cut_are_finished_in_one_piece() -> None:
    frozen = frozen_part()
    region = FrozenRegion(
        (frozen, Flat()), None, SMALL, CPU, forward_samples=2
    )
    images = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        expected = frozen(images)
        for cut in range(region.num_cuts + 1):
            crossing = region.device_graph.prefix(cut)(images).contiguous()
            found = region.run_suffix(cut, crossing)
            found = found.view(3, *expected.shape[1:])
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            assert region.tail(region.run_suffix(cut, crossing)).shape == (
                3,
                3,
            )


@pytest.mark.parametrize(
    ("asked", "found"), [(3, 3), (None, LARGEST_BATCH["cpu"])]
)
def test_workers_of_a_loader_compute_with_the_samples_that_were_asked_for(
    asked: int | None, found: int
) -> None:
    """Those of a device would be too many for the CPU."""
    meta = torch.device("meta")
    region = FrozenRegion((frozen_part(), Flat()), None, SMALL, meta, asked)
    assert region.forward_samples == (asked or LARGEST_BATCH["cuda"])
    for there in (
        region.on_cpu(),
        pickle.loads(pickle.dumps(region)),
        pickle.loads(pickle.dumps(region.on_cpu())),
    ):
        assert there.device == CPU
        assert there.forward_samples == found


@pytest.mark.parametrize(
    ("channels", "found"),
    [
        (MMAP_THRESHOLD_BYTES // 16 // (4 * 32 * 32), LARGEST_BATCH["cpu"]),
        (MMAP_THRESHOLD_BYTES // 16 // (4 * 32 * 32) + 1, SMALL_BATCH_CPU),
    ],
)
def test_forwards_have_few_samples_where_many_have_tensors_that_are_mapped(
    channels: int, found: int
) -> None:
    body = nn.Sequential(nn.Conv2d(3, channels, 1), nn.AvgPool2d(32))
    region = FrozenRegion((body.eval(), nn.Linear(1, 1)), None, SMALL, CPU)
    assert region.forward_samples == found


def test_region_is_computed_fast_and_stored_as_it_was_split() -> None:
    region = FrozenRegion((frozen_part(), Flat()), None, SMALL, CPU)
    assert region.device_graph.is_fast
    ops = [str(n.target) for n in region.device_graph.suffix(0).graph.nodes]
    assert not any("batch_norm" in op for op in ops)
    assert region.parameter_bytes == 4 * (3 * 6 * 9 + 6 + 4 * 6)


def test_augmentation_is_the_jobs_or_else_the_transforms() -> None:
    model, image = (frozen_part(), Flat()), reference_image()
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
        region = FrozenRegion(model, None, transform, CPU, None, augment)
        assert region.transform.augmentation == augmentation
        assert torch.equal(region.decode(image), SMALL(decode_image(image)))
        digests.add(region._graph.digest)
        if augmentation is not None:
            found = region.decode(image, "k", training)
            expected = replace(SMALL, augmentation=augmentation).sample(
                decode_image(image), "k", training
            )
            assert torch.equal(found, expected)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("transform", "augment", "said"),
    [
        (None, {"scale": (0, 1)}, "give an Augmentation"),
        (ImageTransform(2304, 2304), Augmentation(), "1 to 2048 pixels"),
        (ArrayTransform((3, 32, 32)), Augmentation(), "augment is given for"),
        (ArrayTransform((3, 32, 32)), {"scale": 1}, "give an Augmentation"),
    ],
)
def test_augmentation_that_cannot_be_is_named(
    transform: InputTransform | None, augment: Augmentation, said: str
) -> None:
    with pytest.raises(ClientError, match=said) as caught:
        FrozenRegion(
            (frozen_part(), Flat()), None, transform, CPU, None, augment
        )
    assert caught.value.code == "bad_configuration"


def facts_of(model=None, freeze="body", transform=SMALL, **options):
    model = small_network() if model is None else model
    return FrozenRegion(model, freeze, transform, CPU, **options).facts


def test_facts_of_features_are_those_of_what_is_frozen() -> None:
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


def test_facts_of_features_are_the_same_with_another_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package's digest is not: it has the versions that wrote it."""
    here = FrozenRegion(small_network(), "body", SMALL, CPU)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.1")
    there = FrozenRegion(small_network(), "body", SMALL, CPU)
    assert there._graph.digest != here._graph.digest
    assert there.facts == here.facts


class Sorts(nn.Module):
    """Buffers of every sort that may stand beside weights."""

    def __init__(self, last: float) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("short", torch.tensor([[1, last]]).bfloat16().T)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + 1


def test_facts_know_weights_of_every_dtype_and_shape() -> None:
    digests = {
        facts_of((Sorts(last).eval(), Flatten()), None)["weights"]
        for last in (1.0, 2.0, 2.0)
    }
    assert len(digests) == 2


class Flatten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(3 * 32 * 32, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.scores(features.flatten(1))
