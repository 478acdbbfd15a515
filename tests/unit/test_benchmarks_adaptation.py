"""The pure parts of ``benchmarks.adaptation`` and ``benchmarks.tenants``."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import tenants
from benchmarks.adaptation import arguments_of, phases_of, report
from benchmarks.tenants import (
    by_cut,
    changes_per_minute,
    contender,
    dearer,
    joint_optimum,
    judge,
    mean_costs,
    optimal_mix,
    rate_of,
    since,
    used,
)

STREAM = {"link_bytes": 100.0, "storage_seconds": 0.0, "client_seconds": 0.01}
PUSH = {"link_bytes": 0.0, "storage_seconds": 0.02, "client_seconds": 0.0}
COSTS = {"stream": STREAM, "cut-9": PUSH}
FAST, SLOW = 1e6, 1e3
FULL = {"link": 0.0, "storage": 1.0, "client": 1.0}


# -- one job ----------------------------------------------------------------


def test_phases_show_the_last_part_of_each() -> None:
    progress = [(0.0, 0), (100.0, 1000), (200.0, 6000)]
    slow, fast = phases_of(progress, [0.0, 100.0, 200.0])
    assert slow["samples_per_second"] == pytest.approx(10.0)
    assert fast["samples_per_second"] == pytest.approx(50.0)
    assert fast["part"] == (160.0, 200.0)


def test_report_has_events_and_plans_in_the_order_of_time() -> None:
    job = {
        "plans": [{"time": 12.0, "mix": "100 % stream", "why": "slow"}],
        "epochs": [{"samples": 8}],
        "fallbacks": 2,
    }
    text = report(
        "worker",
        {
            "events": [{"time": 10.0, "what": "worker stopped"}],
            "jobs": [job],
            "phases": phases_of([(0.0, 0), (20.0, 40)], [0.0, 10.0, 20.0]),
            "lost": 0,
            "doubled": 0,
        },
    ).splitlines()
    assert [line.split()[0] for line in text[1:5]] == [
        "10.0",
        "10.0",
        "12.0",
        "20.0",
    ]
    assert "0 samples lost, 0 doubled; 2 spans fell back" in text[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "1"], "--rounds is 1; 2 or more"),
        (["--phase-seconds", "0"], "--phase-seconds is 0; above 0"),
        (["--phase-seconds", "301"], "300 at most"),
    ],
)
def test_arguments_that_cannot_be_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments_of(arguments)
    assert said in capsys.readouterr().err


# -- several jobs -----------------------------------------------------------


def test_joint_optimum_uses_both_tiers_and_the_link() -> None:
    assert joint_optimum(COSTS, FAST) == pytest.approx(150.0)
    assert joint_optimum(COSTS, SLOW) == pytest.approx(60.0)


def test_the_mix_of_the_optimum_has_no_way_that_it_does_not_use() -> None:
    useless = {key: 2 * value for key, value in PUSH.items()}
    mix = optimal_mix({**COSTS, "cut-10": useless}, SLOW)
    assert mix == pytest.approx({"stream": 1 / 6, "cut-9": 5 / 6})


def test_rate_is_of_all_jobs_between_two_times() -> None:
    progress = [(0.0, 0), (100.0, 1000), (200.0, 6000)]
    assert rate_of([progress, progress], 150.0, 200.0) == pytest.approx(100.0)


def test_plan_changes_count_in_their_minute() -> None:
    plans = [{"time": t} for t in (5.0, 65.0, 70.0)]
    assert changes_per_minute(plans, 60.0, 90.0) == pytest.approx(4.0)


def test_a_diary_begins_with_its_phase() -> None:
    job = {"progress": [(105.0, 3)], "plans": [{"time": 107.0}]}
    since(100.0, job)
    assert job == {"progress": [(5.0, 3)], "plans": [{"time": 7.0}]}


def test_use_is_a_part_of_what_there_is() -> None:
    before = {"time": 10.0, "link": 1000.0, "storage": 3.0, "client": 7.0}
    after = {"time": 20.0, "link": 6000.0, "storage": 12.0, "client": 9.0}
    assert used(before, after, SLOW) == pytest.approx(
        {"link": 0.5, "storage": 0.9, "client": 0.2}
    )


def test_samples_by_cut_are_those_between_two_times() -> None:
    job = {
        "progress": [(0.0, 0), (10.0, 8), (20.0, 24), (30.0, 40)],
        "cuts": [{}, {"0": 8}, {"0": 16, "9": 8}, {"0": 24, "9": 16}],
    }
    assert by_cut([job, job], 10.0, 25.0) == {"0": 16, "9": 16}


def phase(rate: float, lost: int = 0, busy: float = 1.0) -> dict[str, Any]:
    job = {
        "epochs": [{"lost": lost, "doubled": 0}],
        "fallbacks": 1,
        "retries": 2,
    }
    return {
        "samples_per_second": rate,
        "used": {"link": 0.9, "storage": busy, "client": 0.5},
        "by_cut": {"0": 100, "9": 50},
        "plan_changes_per_minute": [4.0, 8.0],
        "jobs": [job, job],
    }


def test_samples_are_dearer_by_what_they_took_more_than_alone() -> None:
    # A third is pushed and takes 20 ms of the storage tier alone.
    found = dearer(phase(120.0), COSTS)
    assert found["storage"] == pytest.approx(1 / 120 / (20e-3 / 3))
    assert found["client"] == pytest.approx(0.5 / 120 / (2 * 10e-3 / 3))
    other = {**phase(120.0), "by_cut": {"0": 100, "8": 50}}
    assert dearer(other, COSTS) == found


def test_what_is_idle_is_missing_and_what_is_dearer_is_not() -> None:
    # Alone, both tiers at their limits: 100 streamed and 50 pushed.
    alone = contender([{**phase(150.0), "used": FULL}] * 2, COSTS, FAST)
    assert alone["ratio"] == pytest.approx(1.0)
    slow = contender([{**phase(120.0), "used": FULL}] * 2, COSTS, FAST)
    assert slow["dearer"] == pytest.approx({"storage": 1.25, "client": 1.25})
    assert slow["ratio"] == pytest.approx(1.0)
    idle = {"link": 0.0, "storage": 0.8, "client": 0.8}
    idling = contender([{**phase(120.0), "used": idle}] * 2, COSTS, FAST)
    assert idling["dearer"] == pytest.approx({"storage": 1.0, "client": 1.0})
    assert idling["ratio"] == pytest.approx(0.8)


def test_a_way_not_worth_it_is_missing_as_well() -> None:
    dear = {**COSTS, "cut-7": {**PUSH, "storage_seconds": 0.04}}
    wrong = {**phase(125.0), "by_cut": {"0": 100, "7": 25}, "used": FULL}
    assert contender([wrong] * 2, dear, FAST)["ratio"] == pytest.approx(
        125 / 150
    )


def test_verdict_is_of_all_passes_and_rounds() -> None:
    slower, faster = (
        {
            name: {key: factor * value for key, value in cost.items()}
            for name, cost in COSTS.items()
        }
        for factor in (1.5, 0.5)
    )
    rounds = [
        {"auto": phase(130.0), "joint": phase(125.0, lost=1)},
        {"auto": phase(150.0), "joint": phase(150.0)},
    ]
    found = judge([slower, faster], phase(90.0, lost=3), rounds, FAST)
    assert found["alone"]["stages"] == mean_costs([slower, faster])
    assert found["alone"]["optimum"] == pytest.approx(150.0)
    assert found["alone"]["optima"] == pytest.approx([100.0, 300.0])
    assert found["alone"]["ratio"] == pytest.approx(140 / 150)
    assert found["samples_per_second"] == pytest.approx(140.0)
    assert found["ratio"] == pytest.approx(sum(found["ratios"]) / 2)
    low, high = found["interval"]
    assert [low, high] == pytest.approx(sorted(found["ratios"]))
    assert found["joint"]["samples_per_second"] == pytest.approx(137.5)
    assert found["joint"]["regret"] == pytest.approx(1 - (1.04 + 1) / 2)
    assert found["plan_changes_per_minute"] == [4.0, 8.0]
    assert (found["lost"], found["doubled"]) == (8, 0)
    assert (found["fallbacks"], found["retries"]) == (10, 20)


def test_report_of_tenants_has_every_round_and_the_verdict() -> None:
    rounds = [{"auto": phase(150.0), "joint": phase(120.0, busy=0.8)}] * 2
    text = tenants.report(
        {
            "rounds": rounds,
            "goal": tenants.GOAL,
            **judge([COSTS, COSTS], phase(90.0), rounds, FAST),
        }
    )
    assert "round 2: auto: 150.0 samples/s; used: link 90 %" in text
    assert "0 samples lost, 0 doubled; 10 spans fell back" in text
    assert "(150.0 to 150.0): 1.000 of it; goal 0.95" in text
    assert "joint: together 120.0 samples/s, 0." in text
    assert "dearer than alone: storage 1.00, client 0.50" in text
