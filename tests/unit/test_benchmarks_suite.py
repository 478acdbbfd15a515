"""The pure parts of ``python -m benchmarks run``."""

from __future__ import annotations

import argparse
import functools
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.suite import regret
from benchmarks.suite.command import core_list, main
from benchmarks.suite.experiments import EXPERIMENTS
from benchmarks.suite.grid import met, table
from benchmarks.suite.results import SuiteResults, load, processor
from benchmarks.suite.standalone import STAGES
from benchmarks.suite.verdict import AGAIN, best_external, in_reach, judge
from benchmarks.suite.workloads import (
    LINKS,
    LONG,
    SHORT,
    SHORTEST,
    WORKLOADS,
    cell_name,
    chosen,
    streamed,
)

from suite_contexts import context_of

SETTINGS = {"quick": True, "rounds": 2}


def passes(*rates: float) -> list[dict[str, Any]]:
    return [{"samples_per_second": rate} for rate in rates]


def cell() -> dict[str, Any]:
    return {
        "name": "resnet18/backbone/0.25",
        "complete": True,
        "rounds": {
            "tar-stream": passes(10.0, 10.2, 9.8),
            "webdataset": passes(12.0),
            "mosaic": passes(10.5, 9.0, 10.0),
            "auto": passes(20.0, 20.4, 19.0),
            "tar-stream-resized": passes(40.0, 40.0, 40.0),
            "auto-resized": passes(50.0, 50.0, 44.0),
            AGAIN: passes(10.2, 9.8),
        },
        "again": "tar-stream",
    }


def test_cell_is_judged_by_the_ratios_of_its_rounds() -> None:
    entry = cell()
    judge(entry)
    # Measured once, webdataset is no best opponent of three rounds.
    assert entry["best_external"] == "tar-stream"
    assert entry["ratio"]["median"] == pytest.approx(2.0)
    low, high = entry["ratio"]["interval"]
    assert low == pytest.approx(19.0 / 9.8)
    assert high == pytest.approx(2.0)
    assert entry["ratio_resized"]["median"] == pytest.approx(1.25)
    # Its second passes begin in the second round.
    assert entry["noise"]["median"] == pytest.approx(1.0)
    assert AGAIN not in entry["samples_per_second"]
    assert entry["samples_per_second"]["mosaic"] == 10.0
    shown = table({"cells": [entry]})
    assert "resnet18/backbone/0.25" in shown
    assert " 2.000 (1.939 … 2.000)" in shown


def test_noise_is_of_one_opponent_even_if_another_one_wins() -> None:
    entry = cell()
    entry["again"] = "mosaic"
    entry["rounds"][AGAIN] = passes(9.9, 11.0)
    judge(entry)
    assert entry["best_external"] == "tar-stream"
    # Of mosaic's 9.0 and 10.0.
    assert entry["noise"]["median"] == pytest.approx(1.1)


@pytest.mark.parametrize(("rate", "is_met"), [(0.96, False), (0.98, True)])
def test_goal_is_missed_by_one_cell_below_it(
    rate: float, is_met: bool
) -> None:
    entries = [cell(), cell()]
    entries[1]["rounds"]["auto"] = passes(
        *(rate * each for each in (10.0, 10.2, 9.8))
    )
    for entry in entries:
        judge(entry)
    assert list(met({"cells": entries}).values()) == [is_met]


def test_goal_is_not_told_without_a_complete_cell() -> None:
    assert list(met({"cells": [{"complete": False}]}).values()) == [None]


def test_only_near_ones_are_measured_after_the_first_round() -> None:
    rates = {
        "tar-stream": [10.0],
        "webdataset": [8.4],
        "mosaic": [8.6],
        "s3-tars": [9.0],
        "auto": [30.0],
        "stream": [10.0],
        "freeze": [29.0],
        "freeze-float16": [31.0],
        "tar-stream-resized": [1.0],
        "auto-resized": [1.0],
    }
    assert in_reach(rates) == [
        "tar-stream",
        "s3-tars",
        "auto",
        "freeze",
        "tar-stream-resized",
        "auto-resized",
    ]


def test_slow_opponents_are_not_measured_again() -> None:
    rates = {"tar-stream": [10.0], "mosaic": [8.4], "auto": [1.0]}
    assert in_reach(rates) == ["tar-stream", "auto"]
    rates["mosaic"] = [9.9]
    assert in_reach(rates) == ["tar-stream", "mosaic", "auto"]
    assert in_reach(rates, 1) == ["tar-stream", "auto"]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mobilenet_v3_small/inner", LONG),
        ("resnet18/backbone", LONG),
        ("resnet18/inner", SHORT),
    ],
)
def test_large_features_go_no_faster_than_photographs(
    name: str, size: str
) -> None:
    [workload] = [each for each in WORKLOADS if each.name == name]
    assert workload.pushed(SHORT) == size
    assert workload.pushed(LONG) == LONG
    volumes = [workload.volumes[each] for each in (SHORTEST, SHORT, LONG)]
    samples = [each.samples for each in volumes]
    assert samples == sorted({*samples})


@pytest.mark.parametrize(
    ("link", "size"),
    [(0.1, SHORTEST), (0.25, SHORT), (1.0, LONG), (10.0, LONG), (None, LONG)],
)
def test_slower_links_have_shorter_epochs(
    link: float | None, size: str
) -> None:
    assert streamed(link) == size


def test_best_opponent_reads_the_same_photographs() -> None:
    rates = {"tar-stream": [1.0], "s3-tars": [2.0], "tar-stream-resized": [9]}
    assert best_external(rates) == "s3-tars"


def test_patterns_choose_cells() -> None:
    every = chosen([], quick=False, shaped=True)
    assert len(every) == len(WORKLOADS) * len(LINKS)
    found = chosen(["resnet18/*/0.25"], quick=False, shaped=True)
    assert [cell_name(*each) for each in found] == [
        "resnet18/backbone/0.25",
        "resnet18/inner/0.25",
    ]
    unshaped = chosen([], quick=False, shaped=False)
    assert [link for _, link in unshaped] == [None] * len(WORKLOADS)
    assert 0 < len(chosen([], quick=True, shaped=True)) < len(every)
    with pytest.raises(ValueError, match="no cell matches vgg/"):
        chosen(["vgg/*"], quick=False, shaped=True)


def test_results_go_on_with_what_a_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    results = SuiteResults(
        path, SETTINGS, resume=False, asked={"experiments": ["grid"]}
    )
    assert not results.tuned
    assert not results.body["experiments"]
    tuned = {"resnet18": {"tar-stream": {"options": {}}}}
    results.section("grid").update(cells=[1], opponents=tuned)
    results.save()
    again = SuiteResults(path, SETTINGS, resume=True)
    assert again.section("grid")["cells"] == [1]
    assert again.tuned == tuned
    first, second = again.body["begun"]
    assert first["experiments"] == ["grid"]
    assert first["commit"] == second["commit"]
    assert first["date"] <= second["date"]
    with pytest.raises(ValueError, match="exists; --resume goes on"):
        SuiteResults(path, SETTINGS, resume=False)
    with pytest.raises(ValueError, match="made with rounds=2, not 5"):
        SuiteResults(path, {**SETTINGS, "rounds": 5}, resume=True)


@pytest.mark.parametrize(
    ("of", "key", "value", "part"),
    [
        (("begun", 0), "cores", 64, "machine"),
        (("versions",), "torch", "1.0", "versions"),
    ],
)
def test_results_of_elsewhere_are_not_gone_on_with(
    tmp_path: Path,
    of: Sequence[Any],
    key: str,
    value: object,
    part: str,
) -> None:
    path = tmp_path / "bench.json"
    SuiteResults(path, SETTINGS, resume=False).save()
    body = json.loads(path.read_text())
    functools.reduce(operator.getitem, of, body)[key] = value
    path.write_text(json.dumps(body))
    with pytest.raises(ValueError, match=f"{key}={value!r}, not .*{part}"):
        SuiteResults(path, SETTINGS, resume=True)


def test_another_processor_goes_on_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    SuiteResults(path, SETTINGS, resume=False).save()
    body = json.loads(path.read_text())
    here = body["begun"][0]["processor"]
    body["begun"][0]["processor"] = "Other CPU"
    path.write_text(json.dumps(body))
    results = SuiteResults(path, SETTINGS, resume=True)
    assert results.others("processor") == ["Other CPU"]
    assert [run["processor"] for run in results.body["begun"]] == [
        "Other CPU",
        here,
    ]
    assert not results.others("commit")


def test_stages_are_measured_once_on_each_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(tars: object, **_: object) -> dict[str, Any]:
        return {"rounds": 7}

    monkeypatch.setattr("benchmarks.stages.measure", measure)
    section: dict[str, Any] = {
        "complete": True,
        "measured": [{"processor": "Other CPU", "rounds": 5}],
    }
    assert STAGES.lacks_here(section)
    for _ in range(2):
        STAGES.measure(context_of(section))
        assert not STAGES.lacks_here(section)
        other, this = section["measured"]
        assert other == {"processor": "Other CPU", "rounds": 5}
        assert (this["processor"], this["rounds"]) == (processor(), 7)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"benchmark": "splits", "format": 1}',
        '{"benchmark": "suite", "format": 1}',
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json (is no JSON|holds no)"):
        load(path)


def test_section_of_splits_is_gone_on_with() -> None:
    section: dict[str, Any] = {"complete": False}
    saved: list[int] = []

    def save() -> None:
        saved.append(len(section["body"]["cells"]))

    settings = {"rounds": 5}
    results = regret.SectionResults(section, settings, save)
    done = {"name": "one", "model": "m", "freeze": "f", "complete": True}
    results.put({**done, "calibration": {}})
    assert results.cells[0]["date"]
    assert "commit" in results.cells[0]
    results.put({**done, "name": "two", "complete": False})
    assert saved == [1, 2]
    section = json.loads(json.dumps(section))
    again = regret.SectionResults(section, settings, save)
    assert [each["name"] for each in again.cells] == ["one"]
    with pytest.raises(ValueError, match="rounds"):
        regret.SectionResults(section, {"rounds": 6}, save)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("5,0-1,1", (0, 1, 5))],
)
def test_lists_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert core_list(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "1,,2", "-1"])
def test_what_is_no_list_of_cores(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no list of cores"):
        core_list(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing"], "no experiment 'nothing'; there are stages"),
        (["run", "--rounds", "4"], "--rounds is 4; at least 5"),
        (["run", "--quick", "--rounds", "1"], "--rounds is 1; at least 2"),
        (["run", "--client-cores", "1"], "--storage-cores and --client-cores"),
        (["run", "--client-cores", "x"], "'x' is no list of cores"),
        (["run"], "give --data, or set HAPI_TEST_DATA"),
        ([], "required: command"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HAPI_TEST_DATA", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_explains_every_experiment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    for each in EXPERIMENTS.values():
        assert f"  {each.name:12} {each.title}" in shown
        assert f"{each.name}:\n{each.keys}" in shown
