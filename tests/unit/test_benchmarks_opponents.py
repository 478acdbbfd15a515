"""Opponents of the benchmarks: their networks, windows, tars and settings."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks.opponents import convert, tars, window
from benchmarks.opponents.networks import build, split
from benchmarks.opponents.serve import OPPONENTS
from benchmarks.opponents.training import Decoder, Task, Trainer
from benchmarks.opponents.tuning import choose, first_enough, label
from PIL import Image
from torchvision.transforms._presets import ImageClassification

from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from photos import jpegs, shard, tar_of

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
LIBRARIES = {
    "convert": "swiftclient",
    "mosaic": "streaming",
    "s3_connector": "s3torchconnector",
    "web_dataset": "webdataset",
}
MODULES = sorted(
    path.stem for path in (ROOT / "benchmarks" / "opponents").glob("*.py")
)
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
found = [name for name in sys.modules if name.startswith("hapi_")]
sys.exit(" ".join(found) or 0)
"""


def test_opponents_import_nothing_of_ours() -> None:
    names = [
        f"benchmarks.opponents.{module}"
        for module in MODULES
        if installed(LIBRARIES.get(module, "torch"))
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *names],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr


def installed(library: str) -> bool:
    return find_spec(library) is not None


def test_every_opponent_has_its_module() -> None:
    assert {each.partition(":")[0] for each in OPPONENTS.values()} <= {
        *MODULES
    }


# -- networks ---------------------------------------------------------------


@pytest.mark.parametrize("freeze", ["backbone", "inner"])
@pytest.mark.parametrize(
    ("model", "head"),
    [
        ("resnet18", "fc"),
        ("mobilenet_v3_small", "classifier"),
        ("vit_b_16", "heads"),
    ],
)
def test_frozen_part_and_tail_are_the_whole_network(
    model: str, head: str, freeze: str
) -> None:
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    pixels = ImageClassification(crop_size=64, resize_size=64)(images)
    whole = build(model, 64)
    # Of random weights the heads yield next to nothing.
    seen: list[torch.Tensor] = []
    getattr(whole, head).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    with torch.no_grad():
        whole(pixels)
    _, tail = split(model, freeze, 64)
    trainer = Trainer(Task(model, freeze, 2, 64, 64))
    with torch.no_grad():
        found = tail[:-1].eval()(trainer.features(images))
    scale = float(seen[0].abs().max())
    assert scale > 0
    torch.testing.assert_close(
        found / scale, seen[0] / scale, rtol=1e-4, atol=1e-5
    )
    assert type(tail[-1]) is type(getattr(whole, head))


@pytest.mark.parametrize("channels_last", [False, True])
def test_pixels_are_those_of_hapi(channels_last: bool) -> None:
    ((jpeg, _),) = jpegs(1)
    task = Task("resnet18", "backbone", 1, 128, 112)
    trainer = Trainer(task, channels_last=channels_last)
    seen = []
    trainer.frozen = lambda pixels: seen.append(pixels)
    trainer.features(Decoder(task)(jpeg)[None])
    expected = ImageTransform(128, 112)(decode_image(jpeg))
    # Normalised in one step here, in two there.
    torch.testing.assert_close(seen[0][0], expected, rtol=1e-5, atol=1e-5)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert seen[0].is_contiguous(memory_format=layout)


# -- tars -------------------------------------------------------------------


class Dribble(io.BytesIO):
    """Hands out a few bytes at a time, as a socket may."""

    def readinto(self, buffer) -> int:
        return super().readinto(buffer[:700])


@pytest.mark.parametrize("kind", [io.BytesIO, Dribble])
def test_samples_of_a_tar_are_what_tarfile_finds(
    kind: type[io.BytesIO],
) -> None:
    data = shard(5)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = {
            each.name: archive.extractfile(each).read() for each in archive
        }
    found = list(tars.samples(kind(data)))
    assert len(found) == 5
    for key, jpeg, number in found:
        assert files[f"{key}.jpg"] == jpeg
        assert int(files[f"{key}.cls"]) == number


def test_a_tar_that_ends_too_early_is_told() -> None:
    with pytest.raises(EOFError, match="ends too early"):
        list(tars.samples(io.BytesIO(shard(2)[:5000])))


def test_a_tar_with_long_names_is_told() -> None:
    data = tar_of([("n" * 120 + ".jpg", b"data")])
    with pytest.raises(ValueError, match="plain ASCII"):
        list(tars.samples(io.BytesIO(data)))


# -- conversions ------------------------------------------------------------


def test_photographs_become_smaller_by_their_shorter_side() -> None:
    sink = io.BytesIO()
    Image.new("L", (300, 200), 90).save(sink, "JPEG")
    with Image.open(io.BytesIO(convert.smaller(sink.getvalue(), 100))) as made:
        assert made.size == (150, 100)
        assert made.mode == "RGB"


def test_photographs_that_are_small_stay_as_they_are() -> None:
    ((jpeg, _),) = jpegs(1, size=96)
    assert convert.smaller(jpeg, 96) == jpeg


# -- windows ----------------------------------------------------------------


class Clock:
    """Each step of a loop takes half a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.closed = False

    def steps(self, count: int) -> Iterator[torch.Tensor]:
        try:
            for _ in range(count):
                self.now += 0.5
                yield torch.zeros(4)
        finally:
            self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(window.time, "monotonic", lambda: made.now)
    return made


METER = window.Meter(None, ())


def test_a_window_counts_what_comes_after_the_pipeline_has_filled(
    clock: Clock,
) -> None:
    pace = window.Throughput(
        fill_seconds=2, fill_batches=2, seconds=3, batches=4, most_seconds=60
    )
    found = window.measure(clock.steps(100), METER, pace)
    assert found["batches"] == 6
    assert found["samples"] == 24
    assert found["samples_per_second"] == pytest.approx(8)
    assert clock.closed


def test_a_window_ends_with_the_epoch(clock: Clock) -> None:
    pace = window.Throughput(fill_seconds=0, fill_batches=1, seconds=60)
    found = window.measure(clock.steps(6), METER, pace)
    assert found["batches"] == 5
    with pytest.raises(ValueError, match="ended after 4 batches"):
        window.measure(clock.steps(4), METER, pace)


def test_a_slow_window_ends_with_few_batches(clock: Clock) -> None:
    pace = window.Throughput(
        fill_seconds=0, fill_batches=1, seconds=60, most_seconds=1
    )
    found = window.measure(clock.steps(100), METER, pace)
    assert found["batches"] == window.MIN_BATCHES
    assert clock.closed


# -- settings ---------------------------------------------------------------


def test_the_fastest_settings_are_those_of_the_best_median() -> None:
    grid = [{"workers": 0}, {"workers": 1}, {"workers": 2}]
    rates = {0: [9.0, 9.0], 1: [12.0, 4.0], 2: [8.0, 11.0]}
    asked = []

    def ask(options) -> float:
        asked.append(options["workers"])
        return rates[options["workers"]].pop(0)

    options, tried = choose(ask, grid)
    assert options == {"workers": 2}
    assert asked == [0, 1, 2, 2, 1, 0]
    assert tried == {
        label(grid[0]): 9.0,
        label(grid[1]): 8.0,
        label(grid[2]): 9.5,
    }


def test_one_choice_is_not_measured() -> None:
    assert choose(lambda _: 1 / 0, [{"a": 1}]) == ({"a": 1}, {})


def test_no_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to choose"):
        choose(lambda _: 1.0, [])


@pytest.mark.parametrize(
    ("enough", "chosen", "num_tried"),
    [(5.0, 1, 1), (6.0, 2, 2), (9.0, 2, 3)],
)
def test_first_setting_that_is_fast_enough_is_taken(
    enough: float, chosen: int, num_tried: int
) -> None:
    rates = {1: 5.0, 2: 7.0, 3: 6.5}
    grid = [{"num_workers": each} for each in rates]
    found, tried = first_enough(
        lambda options: rates[options["num_workers"]], grid, enough
    )
    assert found == {"num_workers": chosen}
    assert list(tried.values()) == list(rates.values())[:num_tried]
