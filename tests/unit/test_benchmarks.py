"""Mathematics of the benchmarks' verdicts, and their published record."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.experiments import regret_cell, run_summary, runs, verdict
from benchmarks.micro.contention import SCENARIOS
from benchmarks.micro.contention import judge as judge_fairness
from benchmarks.micro.storage_nodes import HASH, Settings, Simulation
from benchmarks.ratios import (
    fastest,
    interval_of,
    rate_between,
    ratio,
    rotated,
)
from benchmarks.record import SuiteRecord, begin, load, missing
from benchmarks.report import write_rst

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "two-cores.json"


def test_rounds_are_paired_and_rotated():
    assert interval_of([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 5.0)
    result = ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert (result["median"], result["interval"]) == (2.0, [1.0, 3.0])
    # Contenders with fewer rounds are ignored.
    rates = {"a": [1.0, 1.0], "b": [9.0], "c": [2.0, 0.5]}
    assert fastest(rates, ["a", "b", "c", "absent"]) == "c"
    assert [rotated("abc", n)[0] for n in range(4)] == ["a", "b", "c", "a"]
    progress = [(0.0, 0.0), (2.0, 20.0)]
    assert rate_between([progress, progress], 0.5, 1.5) == 20.0


def test_fairness_is_missed_if_a_guarded_account_starves():
    scenario = SCENARIOS[0]

    def rates(cost):
        return {"samples": cost, "cost": cost, "refused": 0}

    alone = {a.name: rates(2.0) for a in scenario.accounts}
    equal = {a.name: rates(0.5) for a in scenario.accounts}
    starving = {**equal, scenario.accounts[1].name: rates(0.1)}
    fair = {"alone": alone, "together": equal}
    unfair = {"alone": alone, "together": starving}
    assert judge_fairness(scenario, [fair, fair])["met"]
    assert not judge_fairness(scenario, [unfair, unfair])["met"]


ONLY_WORKERS = Settings(
    **{
        f"{name}_seconds": 0.0
        for name in (
            *("proxy_request", "proxy_sample", "node_request", "node_sample"),
            *("head", "disk_request", "disk_sample"),
        )
    },
    node_rate=6400.0,
    package_losses=0.0,
    shards=0,
    slack=HASH,
)


@pytest.mark.parametrize(("nodes", "flows"), [(2, 2), (10, 4), (20, 8)])
def test_simulated_rate_is_that_of_a_closed_network(nodes, flows):
    settings = replace(ONLY_WORKERS, nodes=nodes, flows=flows)
    result = Simulation(settings, 20_000).run()
    spans = flows * nodes
    expected = spans / (spans + nodes - 1)  # Gordon and Newell
    assert result["share"] == pytest.approx(expected, rel=0.03)
    assert result["moved"] == 0


def epochs(*rates):
    return [{"samples_per_second": rate} for rate in rates]


def test_grid_verdict_compares_auto_with_the_best_opponent():
    entry = {
        "again": "tar-stream",
        "rounds": {
            "auto": epochs(8.0, 9.0),
            "tar-stream": epochs(4.0, 4.5),
            "webdataset": epochs(5.0),
            "again": epochs(4.0, 4.5),
        },
    }
    verdict.judge(entry)
    assert entry["best_external"] == "tar-stream"
    assert entry["ratio"]["median"] == 2.0
    assert entry["noise"]["median"] == 1.0


def test_regret_is_missed_only_beyond_its_interval():
    def judged(auto):
        entry = {
            "shared": {"hapi-2022": "cut-1"},
            "rounds": {"auto": auto, "stream": [5.0] * 5, "cut-1": [10.0] * 5},
        }
        regret_cell.judge(entry)
        return entry

    slow = judged([9.0] * 5)
    assert slow["regret"] == pytest.approx(0.1)
    assert slow["missed"]
    assert slow["samples_per_second"]["hapi-2022"] == 10.0
    assert not judged([9.0, 9.8, 9.0, 10.0, 9.0])["missed"]
    assert judged([11.0] * 5)["above_best_static"]


def whole_run(before, *seconds):
    return {
        "before": {"seconds": before},
        "epochs": [{"seconds": number} for number in seconds],
    }


def whole_runs():
    """One round of a cell."""
    return {
        "auto-1": [whole_run(1.0, 9.0)],
        "auto-5": [whole_run(2.0, 6.0, *[1.0] * 4)],
        "auto-20": [whole_run(2.0, 7.0, *[0.5] * 19)],
        "stream": [whole_run(1.0, 10.0, 10.0, 10.0)],
        "auto-disk": [whole_run(1.0, 10.0, 0.25, 0.25)],
        "auto-cache": [whole_run(1.0, 10.0, 4.0, 2.0)],
        "freeze-cache": [whole_run(1.0, 6.0, 0.4, 0.4)],
        "tar-stream": [whole_run(0.5, 7.5, 8.0, 10.0)],
        "mosaic": [whole_run(0.5, 9.0, *[2.0] * 4)],
        "local-features": [whole_run(0.5, 8.0, *[0.5, 0.5, 0.5, 1.5])],
        "tar-stream-resized": [whole_run(0.0, 1.0, 1.0, 1.0)],
    }


def test_run_summary_derives_the_seconds_of_longer_runs():
    summary = run_summary.summarise(whole_runs(), (1, 5, 20))
    epochs = summary["epochs"]
    assert list(epochs) == ["1", "5", "20"]
    best = [epoch["best"] for epoch in epochs.values()]
    assert best == ["tar-stream", "local-features", "local-features"]
    assert epochs["1"]["auto_over_best"] == 10.0 / 8.0
    assert epochs["5"]["auto_over_best"] == 12.0 / 11.5
    assert epochs["20"]["auto_over_best"] == 18.5 / (8.5 + 19 * 0.75)
    assert epochs["20"]["interval"] == [18.5 / 22.75] * 2
    over = epochs["20"]["over"]
    assert over["tar-stream"]["median"] == 18.5 / (8.0 + 19 * 9.0)
    assert over["tar-stream-resized"]["median"] == 18.5 / 20.0
    speeds = summary["later_over_stream_first"]
    speeds = {tier: speed["median"] for tier, speed in speeds.items()}
    assert speeds == {"memory": 20.0, "disk": 40.0, "store": 25.0}
    seconds = {n: x["seconds"] for n, x in summary["cumulative"].items()}
    assert seconds["auto"] == seconds["auto-20"]
    assert seconds["auto-5"] == [8.0, 9.0, 10.0, 11.0, 12.0]
    assert seconds["tar-stream"][2:4] == [26.0, 8.0 + 3 * 9.0]
    assert len(seconds["tar-stream"]) == 20


def test_goals_of_whole_runs_hold_in_all_cells():
    cell = {
        **run_summary.summarise(whole_runs(), (1, 5, 20)),
        **{"freeze": "backbone", "link": 0.25, "complete": True},
    }
    assert list(runs.goals({"entries": [cell]}).values()) == [
        False,
        False,
        True,
    ]
    for epoch in cell["epochs"].values():
        epoch["auto_over_best"] = 0.75
    assert all(runs.goals({"entries": [cell]}).values())
    assert set(runs.goals({"entries": []}).values()) == {None}


def test_record_is_continued_only_with_equal_settings(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    record = SuiteRecord(path, {"quick": True})
    section = record.section("grid")
    missing(section, [])
    begin(section, "a")["complete"] = True
    begin(section, "b")
    record.save()
    with pytest.raises(ValueError, match="--resume"):
        SuiteRecord(path, {"quick": True})
    with pytest.raises(ValueError, match="quick=True"):
        SuiteRecord(path, {"quick": False}, resume=True)
    again = SuiteRecord(path, {"quick": True}, resume=True)
    assert missing(again.section("grid"), ["a", "b", "c"]) == ["b", "c"]
    monkeypatch.setattr("benchmarks.record.commit", lambda: "another")
    with pytest.raises(ValueError, match="commit="):
        SuiteRecord(path, {"quick": True}, resume=True)


def test_results_page_is_that_of_the_record(tmp_path):
    record, page = load(RECORD), tmp_path / "docs" / "results.rst"
    page.parent.mkdir()
    images = page.parent / "images" / "results"
    write_rst(record, RECORD.relative_to(ROOT), page, images)
    assert page.read_text() == (ROOT / "docs" / "results.rst").read_text()
