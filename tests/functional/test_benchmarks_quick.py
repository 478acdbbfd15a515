"""Every benchmark, with ``--quick`` on a real Swift and a real worker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from photos import shard
from waiting import SECONDS

ROOT = Path(__file__).resolve().parents[2]
NUM_PHOTOGRAPHS = 64

needs_minutes = pytest.mark.skipif(
    not os.environ.get("HAPI_SLOW_BENCHMARKS"),
    reason="takes minutes; set HAPI_SLOW_BENCHMARKS=1",
)
pytestmark = [
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="two tiers need two cores"
    ),
]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A tar of small photographs."""
    path = tmp_path_factory.mktemp("photographs") / "photos.tar"
    path.write_bytes(shard(NUM_PHOTOGRAPHS, size=96))
    return path


def run(*arguments):
    subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        check=True,
        timeout=SECONDS,
    )


def experiment(name, photographs, tmp_path):
    """Section of the record, which is rendered as HTML."""
    path = tmp_path / "record.json"
    options = ["--quick", "--no-netns", "--json", str(path)]
    run("run", name, "--data", str(photographs), *options)
    record = json.loads(path.read_text())
    assert record["settings"]["quick"]
    run("report", str(path), "--html", str(tmp_path / "html"))
    assert (tmp_path / "html" / "index.html").stat().st_size > 0
    section = record["experiments"][name]
    assert section["complete"]
    return section


@needs_minutes
def test_grid_compares_auto_with_opponents(photographs, tmp_path):
    [cell] = experiment("grid", photographs, tmp_path)["cells"]
    assert cell["ratio"]["median"] > 0
    assert cell["best_external"] in cell["samples_per_second"]
    for epochs in cell["rounds"].values():
        assert all(each["samples"] > 0 for each in epochs)


@needs_minutes
def test_regret_compares_auto_with_fixed_cuts(photographs, tmp_path):
    [cell] = experiment("regret", photographs, tmp_path)["body"]["cells"]
    assert cell["regret"] < 1
    assert cell["best_static"] in cell["rounds"]
    assert cell["shared"].keys() == {"hapi-2022", "hapi-sc24"}


@needs_minutes
def test_runs_start_from_cold(photographs, tmp_path):
    [cell] = experiment("runs", photographs, tmp_path)["entries"]
    assert cell["epochs"].keys() == {"1", "5", "20"}
    for each in cell["epochs"].values():
        low, high = each["interval"]
        assert 0 < low <= each["auto_over_best"] <= high
        assert each["best"] in cell["runs"]
    tiers = cell["later_over_stream_first"]
    assert tiers.keys() == {"memory", "disk", "store"}
    measured = {n: len(run[0]["epochs"]) for n, run in cell["runs"].items()}
    assert (measured["auto-20"], measured["tar-stream"]) == (20, 3)
    [cached] = cell["runs"]["freeze-cache"]
    assert cached["epochs"][-1]["cached"] == cell["samples"]
    packages = [cached["before"], *cached["epochs"]]
    assert sum(each["package_bytes"] for each in packages) > 0


@needs_minutes
def test_tenants_train_in_accounts_of_their_own(photographs, tmp_path):
    [entry] = experiment("tenants", photographs, tmp_path)["entries"]
    assert len(entry["workloads"]) == 2
    names = {"auto", "freeze", "tar-stream"}
    assert entry["samples_per_second"].keys() == names


def test_bytes_of_features_are_counted(photographs, tmp_path):
    section = experiment("bytes", photographs, tmp_path)
    found = section["goals"][0]
    # 512 values, and what a stream of few samples adds.
    assert 2 * 512 < found["bytes"] < 3 * 512


def test_accuracy_without_cifar_is_not_measured(photographs, tmp_path):
    section = experiment("accuracy", photographs, tmp_path)
    assert "cifar10-*.tar" in section["absent"]


@pytest.mark.parametrize(
    ("command", "key", "needs_data"),
    [
        ("filter", "proxy", False),
        ("simulation", "rows", False),
        pytest.param("attacks", "attacks", False, marks=needs_minutes),
        pytest.param("memory", "cells", False, marks=needs_minutes),
        pytest.param("checkpoints", "ratios", False, marks=needs_minutes),
        pytest.param("partial", "speed", False, marks=needs_minutes),
        pytest.param("device_queue", "ways", False, marks=needs_minutes),
        pytest.param("worker", "cells", True, marks=needs_minutes),
        pytest.param("fairness", "scenarios", True, marks=needs_minutes),
        pytest.param("places", "storage_bytes", True, marks=needs_minutes),
    ],
)
def test_command_measures_and_writes_json(
    command, key, needs_data, photographs, tmp_path
):
    path = tmp_path / "found.json"
    data = ["--data", str(photographs)] if needs_data else []
    run(command, "--quick", "--json", str(path), *data)
    found = json.loads(path.read_text())
    assert found["benchmark"] == command
    assert found["settings"]["quick"]
    assert found[key]
