"""Replayed cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import replay
from benchmarks.cells import FETCH_OPTIONS
from benchmarks.contenders import problem_json
from benchmarks.simulation import Knowledge, Parts, SimulatedJob, Stage
from benchmarks.tenants import joint_optimum

from hapi_splitter.planner.costs import Conditions

SHORT = [
    *("--seeds", "2"),
    *("--fill-seconds", "30", "--measured-seconds", "10"),
    *("--fill-turns", "1", "--measured-turns", "1"),
]
STREAM = (0, "raw")
PUSH = (9, "float32")
STAGES = {
    STREAM: [Stage(100e3, 0.5e-3, 10e-3), Stage(100e3, 0.5e-3, 11e-3)],
    PUSH: [Stage(2e3, 12e-3, 0.5e-3)],
}
KNOWLEDGE = Knowledge.from_json(
    {
        "capacities": {
            "link": 1e9,
            "server cpu": 1.0,
            "server device": 1.0,
            "client cpu": 1.0,
            "client device": 1.0,
        },
        # What profiles say is not quite what was measured.
        "options": [
            {
                "cut": 0,
                "encoding": "raw",
                "link_bytes": 100e3,
                "work": {
                    "serving": 0.3e-3,
                    "client decoding": 4e-3,
                    "client layers": 3.9e-3,
                    "training": 0.1e-3,
                },
            },
            {
                "cut": 9,
                "encoding": "float32",
                "link_bytes": 2e3,
                "work": {
                    "serving": 0.4e-3,
                    "server decoding": 2.6e-3,
                    "server layers": 6e-3,
                    "client decoding": 0.2e-3,
                    "client layers": 0.1e-3,
                    "training": 0.1e-3,
                },
            },
        ],
        "train_seconds": 0.1e-3,
    }
)


def rate_of(link: float, weights: dict[Any, float] | None) -> float:
    job = SimulatedJob(
        STAGES,
        {(o.cut, o.encoding): Parts.of(o) for o in KNOWLEDGE.options},
        KNOWLEDGE,
        link,
        span_samples=8,
        weights=weights,
        options=FETCH_OPTIONS,
        seed=0,
    )
    job.run(60.0)
    # Long beside what may be loaded ahead at its beginning.
    return job.run(120.0)


def test_fixed_way_goes_as_fast_as_what_limits_it() -> None:
    assert rate_of(1e9, {PUSH: 1.0}) == pytest.approx(1 / 12e-3, rel=0.03)
    assert rate_of(1e9, {STREAM: 1.0}) == pytest.approx(1 / 10.5e-3, rel=0.03)
    assert rate_of(1e6, {STREAM: 1.0}) == pytest.approx(10.0, rel=0.1)
    # The worker computes while its answers are on their way.
    assert rate_of(0.5e6, {PUSH: 1.0}) == pytest.approx(1 / 12e-3, rel=0.03)


def test_worker_does_not_report_the_seconds_of_swift() -> None:
    parts = Parts.of(KNOWLEDGE.options[1])
    assert parts.serving == pytest.approx(0.4 / 9)
    assert parts.forward == pytest.approx(6 / 9)


@pytest.mark.parametrize("link", [1e9, 3e6, 0.5e6, 0.2e6])
def test_planned_job_comes_near_the_optimum_of_its_mix(link: float) -> None:
    best = joint_optimum(
        {name: vars(STAGES[name][0]) for name in (STREAM, PUSH)}, link
    )
    assert 0.85 * best <= rate_of(link, None) <= 1.02 * best


def a_cell(link: float, bytes_per_second: float) -> dict[str, Any]:
    stages = {
        name: [vars(stage) for stage in STAGES[way]]
        for name, way in (("stream", STREAM), ("cut-9", PUSH))
    }
    return {
        "name": f"resnet18/backbone/{link:g}",
        "model": "resnet18",
        "freeze": "backbone",
        "link": link,
        "link_bytes_per_second": bytes_per_second,
        "complete": True,
        "calibration": {"saturating_bytes_per_second": 9.5e6},
        "encodings": {"cut-9": "float32"},
        "more_cuts": [],
        "stages": stages,
        "problem": {
            "capacities": dict(KNOWLEDGE.capacities),
            "options": [
                {
                    "cut": o.cut,
                    "encoding": o.encoding,
                    "link_bytes": o.use["link"],
                    "work": dict(o.work),
                }
                for o in KNOWLEDGE.options
            ],
            "train_seconds": KNOWLEDGE.train_seconds,
        },
        "samples_per_second": {"auto": 150.0, "stream": 95.0, "cut-9": 80.0},
        "regret": -0.5,
    }


def test_replay_says_what_it_is_and_how_far_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "splits.json", tmp_path / "replay.json"
    source.write_text(
        json.dumps({"cells": [a_cell(2.0, 19e6)], "machine": {}})
    )
    arguments = ["--links", "0.5", *SHORT, "--json", str(target)]
    assert replay.main([str(source), *arguments]) == 0
    body = json.loads(target.read_text())
    [known], [more] = body["validation"], body["cells"]
    assert known["replayed"]
    assert more["replayed"]
    assert known["error"]["cut-9"] == pytest.approx(1 / 12e-3 / 80 - 1, 0.1)
    assert known["measured_regret"] == -0.5
    assert more["link_bytes_per_second"] == pytest.approx(4.75e6)
    assert more["samples_per_second"]["stream"] == pytest.approx(47.5, 0.1)
    assert set(more["samples_per_second"]) == {"auto", "stream", "cut-9"}
    assert "cell (replayed)" in capsys.readouterr().out


def test_cut_that_one_cell_alone_has_measured_is_replayed_as_fixed(
    tmp_path: Path,
) -> None:
    slow, fast = a_cell(0.25, 2.4e6), a_cell(2.0, 19e6)
    fast["more_cuts"] = [5]
    fast["encodings"]["cut-5"] = "float32"
    fast["samples_per_second"]["cut-5"] = 100.0
    fast["stages"]["cut-5"] = [
        {
            "link_bytes": 50e3,
            "storage_seconds": 10e-3,
            "client_seconds": 5e-3,
        }
    ]
    option = {**fast["problem"]["options"][1], "cut": 5}
    fast["problem"]["options"].append(option)
    slow["encodings"]["cut-9"] = "float32;zstd"
    slow["problem"]["options"][1]["encoding"] = "float32;zstd"
    source, target = tmp_path / "splits.json", tmp_path / "replay.json"
    source.write_text(json.dumps({"cells": [slow, fast], "machine": {}}))
    arguments = ["--links", "1", *SHORT, "--json", str(target)]
    assert replay.main([str(source), *arguments]) == 0
    [cell] = json.loads(target.read_text())["cells"]
    assert set(cell["samples_per_second"]) == {
        "auto",
        "stream",
        "cut-5",
        "cut-9 float32",
        "cut-9 float32;zstd",
    }
    assert "cut 5" not in cell["plan"]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ({"complete": False}, "no cell of the file is complete"),
        (
            {"complete": True, "name": "a/b/2", "link_bytes_per_second": 1},
            "cell a/b/2 has no stage times",
        ),
    ],
)
def test_file_without_stages_is_refused(
    cell: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "splits.json"
    source.write_text(json.dumps({"cells": [cell], "machine": {}}))
    assert replay.main([str(source)]) == 1
    assert said in capsys.readouterr().err


def test_what_the_bench_writes_is_what_the_replay_reads() -> None:
    problem = KNOWLEDGE.problem(
        Conditions(
            link_bytes_per_second=1e6, train_seconds=KNOWLEDGE.train_seconds
        )
    )
    again = Knowledge.from_json(
        json.loads(json.dumps(problem_json(problem, KNOWLEDGE.train_seconds)))
    )
    for option, read in zip(KNOWLEDGE.options, again.options, strict=True):
        assert read.use == pytest.approx(option.use)
    body = problem_json(problem, 0.0)
    del body["options"][0]["work"]
    with pytest.raises(ValueError, match="measure it again"):
        Knowledge.from_json(body)
