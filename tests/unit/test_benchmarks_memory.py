"""``benchmarks.memory``: its probe, its verdicts, and those of the soak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import soak
from benchmarks.memory import Cells, arguments_of, cell, cuts_of, report
from benchmarks.memory_probe import status_bytes, validated
from benchmarks.worker_process import ROOT
from torch import nn

from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.package.writer import write_package
from hapi_splitter.profiling.memory_model import needs_of

MIB = 1 << 20
PIXELS = 256


class Wide(nn.Module):
    """2 MiB of activations for each sample, beside 0.75 of input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.cat([x, x[:, :1], x[:, :1], x], dim=1))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packages") / "wide.hapi"
    model = nn.Sequential(Wide(), nn.Conv2d(8, 1, 1))
    transform = ImageTransform(resize_size=PIXELS, crop_size=PIXELS)
    write_package(split(model.eval(), "0", transform=transform).frozen, path)
    return path


def probed(package: Path, batch: int) -> Mapping[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory_probe"],
        input=json.dumps({"package": str(package), "cut": 1, "batch": batch}),
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=True,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_probe_measures_what_a_forward_pass_takes(package: Path) -> None:
    """Input and concatenation are there at once; nothing else is large."""
    small, large = (probed(package, batch) for batch in (24, 48))
    needs = needs_of(validated(package), 1)
    # Two samples of eight channels, and one of three.
    per_sample = (8 + 3) * 4 * PIXELS**2
    for found, batch in ((small, 24), (large, 48)):
        assert found["measured_bytes"] >= batch * per_sample
        predicted = needs.peak_bytes(batch) - needs.parameter_bytes
        assert predicted >= found["measured_bytes"] - 2 * MIB
    grown = large["measured_bytes"] - small["measured_bytes"]
    assert 24 * per_sample - 2 * MIB < grown < 2 * 24 * per_sample


def test_status_tells_sizes_of_processes() -> None:
    own = status_bytes("VmRSS")
    assert own == pytest.approx(status_bytes("VmRSS", str(os.getpid())), 0.1)
    assert 10 * MIB < own <= status_bytes("VmHWM")
    with pytest.raises(ValueError, match="no VmNothing"):
        status_bytes("VmNothing")


def test_batch_grows_until_there_are_activations_to_compare(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried = []

    def probe(self: Cells, package: Path, cut: int, batch: int) -> Any:
        tried.append(batch)
        return batch * MIB

    monkeypatch.setattr(Cells, "_probe", probe)
    cells = Cells("resnet18", tmp_path, 1, {}, False)
    found = cells._least_batch(tmp_path / "package", 1, 10)
    assert found == tried[-1]
    assert 64 <= found < 80
    assert tried[0] == 10


@pytest.mark.parametrize(
    ("predicted", "measured", "met"),
    [
        (100, [90, 80], True),
        (100, [100, 60], True),
        (99, [100, 60], False),  # less than there was
        (150, [100, 80], True),
        (151, [100, 80], False),
    ],
)
def test_cell_is_met_between_the_measured_and_half_more(
    predicted: int, measured: list[int], met: bool
) -> None:
    found = cell("resnet18", 3, "relu", 8, predicted, measured)
    assert found["met"] is met
    assert found["ratio"] == pytest.approx(predicted / max(measured))
    assert found["repeats"] == measured
    assert report([found]).startswith(f"{int(met)} of 1 cells within 1 to 1.5")


def test_cuts_are_early_middle_and_last() -> None:
    assert cuts_of(22) == [1, 5, 11, 22]
    assert cuts_of(2) == [1, 2]
    assert cuts_of(1) == [1]


# -- soak -------------------------------------------------------------------

PARTS = {"start": 300, "memory_limit": 500, "libraries": 200}


def done(**changes: Any) -> dict[str, Any]:
    return {
        "refused": 3,
        "uploads": 1,
        "shards": 20,
        "unfinished": 0,
        "longest_seconds": 4.0,
        "progress": [(0.0, 0), (9.0, 320)],
        **changes,
    }


def series(second: float, last: float) -> list[tuple[float, float]]:
    """An hour, which rises evenly after the first fifth."""
    first = [(float(n), 100.0) for n in range(720)]
    slope = (last - second) / (4 / 5 - 1 / 5)
    begin = second - slope * 1 / 10
    later = [
        (float(n), begin + slope * (n - 720) / 3600) for n in range(720, 3600)
    ]
    return first + later


def test_flat_soak_below_its_limit_is_met() -> None:
    found = soak.judge([done(), done()], series(800, 808), PARTS)
    assert found["met"]
    assert found["limit_bytes"] == 1000
    assert found["growth"] == pytest.approx(0.01, rel=0.3)
    assert found["samples"] == 640
    assert (found["refused"], found["uploads"], found["shards"]) == (6, 2, 40)
    low, high = found["slope_interval"]
    assert low <= found["slope_bytes_per_hour"] <= high
    assert found["slope_bytes_per_hour"] == pytest.approx(8 / 0.6, rel=0.01)
    assert found["series"][0] == (0.0, 100.0)
    assert len(found["series"]) <= 600
    assert "40 shards, 6 refusals" in soak.report(found)


@pytest.mark.parametrize(
    ("clients", "sizes"),
    [
        ([done()], series(800, 880)),  # grows
        ([done()], series(1010, 1010)),  # more than the limit
        ([done(), done(unfinished=1)], series(800, 800)),
    ],
)
def test_soak_is_missed_by_growth_limit_or_request(
    clients: list[Any], sizes: list[Any]
) -> None:
    assert not soak.judge(clients, sizes, PARTS)["met"]


def test_limit_counts_uploads_and_streams(package: Path) -> None:
    found = soak.other_bytes([package], shard_bytes=1000, streams=10)
    decoded = 16 * 4 * 3 * PIXELS**2
    assert found["streams"] == 2 * 10 * (1000 + decoded)
    assert found["uploads"] == 2 * 2 * package.stat().st_size


# -- the command ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats", "0"], "--repeats is 0; 1 or more"),
        (["--malloc", "ARENA=1"], "'ARENA=1' is not MALLOC_NAME=VALUE"),
        (["--soak", "0"], "--soak is 0 minutes; 0.25 or more"),
        (["--options", "max_batch"], "'max_batch' is not KEY=VALUE"),
        (["--models", "alexnet"], "invalid choice: 'alexnet'"),
    ],
)
def test_arguments_that_cannot_be_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments_of(arguments)
    assert said in capsys.readouterr().err


def test_data_is_for_the_soak_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HAPI_TEST_DATA", raising=False)
    assert arguments_of([]).soak is None
    with pytest.raises(SystemExit):
        arguments_of(["--soak", "5"])
    assert "give --data, or set HAPI_TEST_DATA" in capsys.readouterr().err
