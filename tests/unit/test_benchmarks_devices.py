"""Devices of both tiers, and opponents that are not installed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import testbed
from benchmarks.devices import VARIABLE
from benchmarks.opponents import window
from benchmarks.opponents.opponent import Batches, Opponent
from benchmarks.opponents.training import Place, Task
from benchmarks.suite import command, contenders
from benchmarks.suite.experiment import Context, Experiment
from benchmarks.suite.workloads import Volume

TASK = Task("mobilenet_v3_small", "backbone", 2, 72, 64)
PLACE = Place("", "", "", "", "", (), 0)
META = torch.device("meta")


class Still(Opponent):
    def batches(self, epoch: int) -> Batches:
        images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
        yield images, torch.tensor([0, 1])


def test_an_opponent_trains_on_its_tiers_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "meta")
    opponent = Still(TASK, PLACE, {"channels_last": True})
    (labels,) = opponent.steps(0)
    assert labels.device == torch.device("cpu")
    trainer = opponent.trainer
    assert trainer.loss.device == META
    assert {
        each.device
        for part in (trainer.frozen, trainer.tail)
        for each in part.parameters()
    } == {META}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_opponent_learns_on_a_gpu_what_it_learns_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        monkeypatch.setenv(VARIABLE, device)
        opponent = Still(TASK, PLACE, {"channels_last": True})
        list(opponent.steps(0))
        losses.append(opponent.trainer.loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_an_opponent_trains_on_the_cpu_if_nobody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    opponent = Still(TASK, PLACE, {})
    list(opponent.steps(0))
    assert opponent.trainer.loss.device == torch.device("cpu")


def test_a_reading_waits_for_gpus_that_are_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    meter = window.Meter(None, [])
    meter.read()
    assert waits == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    meter.read()
    assert waits == [1]


class Started:
    """A storage tier that nobody started."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def ask(self, do: str, **settings: Any) -> dict[str, str]:
        self.settings = settings
        return {}

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two tiers need two cores"
)
def test_a_testbed_tells_each_tier_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Started()
    monkeypatch.setattr(testbed.Tier, "remote", lambda *_: storage)
    with testbed.two_tiers(
        netns=False,
        worker_device="cuda",
        client_device="cuda:1",
        worker_options={"batch": "4"},
    ) as bed:
        options = storage.settings["worker_options"]
        assert options == {"device": "cuda", "batch": "4"}
        assert bed.client.environment[VARIABLE] == "cuda:1"
    with testbed.two_tiers(netns=False) as bed:
        assert storage.settings["worker_options"] == {"device": "cpu"}
        assert bed.client.environment[VARIABLE] == "cpu"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Contexts, and options of testbeds, of an experiment that does little."""
    found: list[Any] = []

    @contextlib.contextmanager
    def two_tiers(**options: Any) -> Iterator[None]:
        found.append(options)
        yield

    def measure(context: Context) -> None:
        found.append(context)
        with context.testbed():
            pass

    little = Experiment(
        "little", "Little", "", 0, 0, measure, lambda _: "", lambda _: {}
    )
    monkeypatch.setattr(command, "two_tiers", two_tiers)
    monkeypatch.setattr(command, "EXPERIMENTS", {"little": little})
    return found


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    tar = tmp_path / "a.tar"
    tar.touch()
    path = tmp_path / "bench.json"
    wanted = ["run", "--data", str(tar), "--json", str(path), *options]
    assert command.main(wanted) == 0
    settings: dict[str, Any] = json.loads(path.read_text())["settings"]
    return settings


def test_devices_and_scale_reach_the_experiments(
    tmp_path: Path, seen: list[Any]
) -> None:
    devices = ["--worker-device", "cuda", "--client-device", "cuda"]
    settings = run(tmp_path, *devices, "--scale", "8")
    context, options = seen
    assert context.scale == 8
    assert options["worker_device"] == options["client_device"] == "cuda"
    assert settings["worker_device"] == settings["client_device"] == "cuda"
    assert settings["scale"] == 8


def test_a_usual_run_tells_neither_devices_nor_scale(
    tmp_path: Path, seen: list[Any]
) -> None:
    settings = run(tmp_path)
    assert seen[0].scale == 1
    assert seen[1]["worker_device"] == seen[1]["client_device"] == "cpu"
    assert not {"worker_device", "client_device", "scale"} & {*settings}


def test_a_scale_below_one_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command.main(["run", "--scale", "0"])
    assert "--scale is 0; at least 1" in capsys.readouterr().err


def test_a_larger_data_set_has_more_shards() -> None:
    assert Volume(960, 32).times(4) == Volume(3840, 32)


def test_an_opponent_whose_library_is_missing_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contenders, "is_installed", lambda name: "3" in name)
    assert contenders.absent("mosaic") == (
        "mosaicml-streaming is not installed"
    )
    assert contenders.absent("s3-tars") is None
    assert contenders.absent(contenders.TAR_STREAM) is None


def test_distributions_are_found_without_being_imported() -> None:
    assert contenders.is_installed("torch")
    assert not contenders.is_installed("no-such-distribution")
