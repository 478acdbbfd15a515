"""The pure parts of ``benchmarks.adaptation`` and ``benchmarks.tenants``."""

from __future__ import annotations

import time
from typing import Any

import pytest
from benchmarks import tenants
from benchmarks.adaptation import arguments_of, phases_of, report
from benchmarks.joint_plan import (
    at_speed,
    dearer,
    joint_optimum,
    mean_costs,
    optimal_mix,
)
from benchmarks.speedometer import ReadPlan, SpanSlice, summary
from benchmarks.tenants import (
    by_cut,
    changes_per_minute,
    contender,
    judge,
    rate_of,
    since,
    used,
)

STREAM = {"link_bytes": 100.0, "storage_seconds": 0.0, "client_seconds": 0.01}
PUSH = {"link_bytes": 0.0, "storage_seconds": 0.02, "client_seconds": 0.0}
COSTS = {"stream": STREAM, "cut-9": PUSH}


def speeds(storage: float = 1.0, client: float = 1.0) -> dict[str, Any]:
    return {
        "storage": {"seconds": storage, "used": 0.0},
        "client": {"seconds": client, "used": 0.0},
    }


def one_pass(factor: float = 1.0, piece: float = 1.0) -> dict[str, Any]:
    """The costs above, times a factor, and what a piece took meanwhile."""
    return {
        name: {
            **{key: factor * value for key, value in cost.items()},
            "speeds": speeds(piece, piece),
        }
        for name, cost in COSTS.items()
    }


FAST, SLOW = 1e6, 1e3


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


def phase(
    rate: float, lost: int = 0, busy: float = 1.0, piece: float = 1.0
) -> dict[str, Any]:
    job = {
        "epochs": [{"lost": lost, "doubled": 0}],
        "fallbacks": 1,
        "retries": 2,
    }
    return {
        "samples_per_second": rate,
        "speeds": speeds(piece, piece),
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


def test_optimum_is_that_at_the_speed_of_the_phase() -> None:
    # A piece takes twice as long while costs are twice as high.
    passes = [one_pass(2.0, piece=2.0), one_pass()]
    costs = at_speed(passes, speeds())
    assert costs["stream"]["client_seconds"] == pytest.approx(0.01)
    assert costs["cut-9"]["storage_seconds"] == pytest.approx(0.02)
    phases = [phase(150.0), phase(60.0, piece=2.0)]
    found = contender(phases, passes, FAST)
    assert found["optimum"] == pytest.approx((150 + 75) / 2)
    assert found["ratios"] == pytest.approx([1.0, 0.8])
    assert found["ratio"] == pytest.approx(0.9)
    assert found["interval"] == pytest.approx((0.8, 1.0))


def test_each_tier_has_a_speed_of_its_own() -> None:
    found = at_speed([one_pass()], speeds(storage=2.0))
    assert found["cut-9"]["storage_seconds"] == pytest.approx(0.04)
    assert found["stream"] == pytest.approx(COSTS["stream"])


def test_samples_dearer_than_the_cores_are_slow_count_against_jobs() -> None:
    slow = contender([phase(100.0), phase(100.0)], [one_pass()], FAST)
    assert slow["ratio"] == pytest.approx(100 / 150)
    assert slow["dearer"]["storage"] == pytest.approx(1.5)
    same = contender([phase(100.0, piece=1.5)] * 2, [one_pass()], FAST)
    assert same["ratio"] == pytest.approx(1.0)
    assert same["dearer"]["storage"] == pytest.approx(1.0)


def test_what_speedometers_use_is_not_to_be_had() -> None:
    read = speeds()
    read["client"]["used"] = 0.1
    assert joint_optimum(COSTS, FAST, read) == pytest.approx(140.0)


def test_speed_is_the_median_of_the_pieces_of_a_time() -> None:
    readings = [
        ReadPlan(float(time), seconds)
        for time, seconds in enumerate([9.0, 0.1, 0.2, 0.6, 9.0])
    ]
    assert summary(readings, 1.0, 4.0) == pytest.approx(
        {"seconds": 0.2, "used": 0.3}
    )
    with pytest.raises(ValueError, match="no reading of the speed in"):
        summary(readings, 1.25, 1.75)


def test_a_piece_of_work_takes_cpu_time() -> None:
    work = SpanSlice()
    before = time.thread_time()
    for _ in range(20):
        work.do()
    assert 1e-5 < (time.thread_time() - before) / 20 < 1.0


def test_verdict_is_of_all_passes_and_rounds() -> None:
    passes = [one_pass(1.5), one_pass(0.5)]
    rounds = [
        {"auto": phase(130.0), "joint": phase(125.0, lost=1)},
        {"auto": phase(150.0), "joint": phase(150.0)},
    ]
    found = judge(passes, phase(90.0, lost=3), rounds, FAST)
    assert found["alone"]["stages"] == mean_costs(passes)
    assert found["alone"]["optimum"] == pytest.approx(150.0)
    assert found["alone"]["optima"] == pytest.approx([100.0, 300.0])
    assert found["alone"]["ratio"] == pytest.approx(140 / 150)
    assert found["samples_per_second"] == pytest.approx(140.0)
    assert found["ratios"] == pytest.approx([130 / 150, 1.0])
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
            **judge([one_pass()] * 2, phase(90.0), rounds, FAST),
        }
    )
    assert "round 2: auto: 150.0 samples/s; used: link 90 %" in text
    assert "0 samples lost, 0 doubled; 10 spans fell back" in text
    assert "(150.0 to 150.0); auto has 1.000 of it" in text
    assert "joint: together 120.0 samples/s, 0.800 of the joint" in text
    assert "auto: together 150.0 samples/s, 1.000 of the joint" in text
    assert "dearer than alone: storage 1.00, client 0.50; goal 0.95" in text
