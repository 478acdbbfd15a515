"""The pure parts of whole runs, tenants, scaling and ablations."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cells import BACKBONE, INNER
from benchmarks.opponents import diary
from benchmarks.suite import (
    ablations,
    entries,
    many_tenants,
    runs,
    scaling,
    tiers,
)
from benchmarks.suite.run_sums import (
    AUTO,
    AUTO_ONCE,
    CACHED,
    STREAM,
    best_first,
    epoch_of,
    judged,
)
from benchmarks.suite.tiers import MIN_STEPS, Amounts, settle
from benchmarks.suite.together import fairness, half
from benchmarks.suite.workloads import Workload
from benchmarks.testbed import Tier

from suite_contexts import context_of


@pytest.mark.parametrize(
    ("rate", "link", "samples"),
    [
        (300.0, 0.25, 1120),  # 15 s at 75 samples per second
        (300.0, 2.0, 4512),
        (300.0, None, 4512),
        (14.0, 0.25, 256),  # shards for all ways, however slow it is
    ],
)
def test_an_epoch_of_a_run_takes_a_while_on_any_machine(
    rate: float, link: float | None, samples: int
) -> None:
    volume = runs.lasting(rate, link, 32)
    assert (volume.samples, volume.shard_samples) == (samples, 32)


def test_many_tenants_are_counted_later_and_for_longer() -> None:
    one, eight = (many_tenants.span_of(n, quick=False) for n in (1, 8))
    assert eight.fill_seconds > one.fill_seconds
    assert eight.seconds > one.seconds
    assert many_tenants.span_of(8, quick=True) == many_tenants.QUICK_SPAN


def run(before: float, *seconds: float) -> dict[str, Any]:
    return {
        "before": {"seconds": before},
        "epochs": [{"seconds": each} for each in seconds],
    }


def cell(freeze: str = BACKBONE) -> dict[str, Any]:
    """Two rounds; kept features are 25 and 20 times as fast."""
    found = {
        STREAM: [run(1.0, 50.0, 52.0, 48.0), run(1.0, 40.0, 40.0, 40.0)],
        AUTO: [run(2.0, 30.0, 20.0, 20.0), run(2.0, 30.0, 10.0, 10.0)],
        AUTO_ONCE: [run(3.0, 48.0), run(3.0, 40.0)],
        CACHED: [run(4.0, 10.0, 2.0, 2.0), run(4.0, 10.0, 1.0, 3.0)],
        "tar-stream": [run(1.0, 60.0, 60.0, 60.0)] * 2,
        "mosaic": [run(1.0, 45.0, 4.0, 4.0), run(1.0, 45.0, 6.0, 6.0)],
        "local-features": [run(1.0, 44.0, 1.0, 1.0)] * 2,
        "tar-stream-resized": [run(1.0, 8.0, 8.0, 8.0)] * 2,
    }
    one_offs = {
        "index": {"seconds": 0.5},
        "mds": {"seconds": 100.0},
        "resized": {"seconds": 70.0},
    }
    return {
        "name": f"resnet18/{freeze}/0.25",
        "freeze": freeze,
        "link": 0.25,
        **judged(found, one_offs),
        "complete": True,
    }


def test_later_epochs_are_compared_round_by_round() -> None:
    found = cell()
    # Features kept locally and resized photographs read other bytes.
    assert found["best_first"] == "mosaic"
    assert found["first_seconds"][STREAM] == {
        "median": 45.0,
        "least": 40.0,
        "most": 50.0,
    }
    assert found["speedup"][CACHED] == {
        STREAM: {"median": 22.5, "least": 20.0, "most": 25.0},
        "mosaic": {"median": 22.5, "least": 22.5, "most": 22.5},
    }
    assert found["beside"][CACHED]["mosaic"]["median"] == 2.5
    assert found["beside"][AUTO]["local-features"]["least"] == 0.05
    assert AUTO_ONCE not in found["later_seconds"]


def test_runs_of_one_epoch_are_those_that_were_told_of_one() -> None:
    found = cell()["auto_over_stream"]
    assert found["1"]["median"] == pytest.approx((51 / 51 + 43 / 41) / 2)
    assert found["3"]["most"] == pytest.approx(72 / 151)


def test_conversions_are_added_to_the_sums_of_those_who_need_them() -> None:
    sums = cell()["cumulative"]
    assert sums["mosaic"]["seconds"] == [46.0, 51.0, 56.0]
    assert sums["mosaic"]["with_one_off"] == [146.0, 151.0, 156.0]
    assert sums[CACHED]["with_one_off"] == [14.5, 16.0, 18.5]
    assert sums["tar-stream"]["with_one_off"] == sums["tar-stream"]["seconds"]


def test_best_first_epoch_is_of_one_that_reads_the_same_photographs() -> None:
    found = {
        "tar-stream": [run(0.0, 3.0)],
        "webdataset": [run(0.0, 2.0)],
        "local-features": [run(0.0, 1.0)],
        STREAM: [run(0.0, 1.0)],
    }
    assert best_first(found) == "webdataset"


def test_package_is_apart_from_an_epochs_bytes() -> None:
    found = epoch_of(
        {
            "seconds": 2.0,
            "samples": 10,
            "samples_per_second": 5.0,
            "down_bytes": 3.0,
            "up_bytes": 100.0,
            "client_seconds": 0.1,
            "storage_seconds": 0.2,
            "package_bytes": 900,
            "cached": 0,
            "fallbacks": 1,
        }
    )
    assert found["down_bytes"] == 30.0
    assert found["up_bytes"] == 100.0
    assert found["package_bytes"] == 900
    assert found["client_seconds"] == 1.0
    assert found["fallbacks"] == 1


def test_goals_of_whole_runs() -> None:
    good, bad = cell(), cell()
    bad["speedup"][CACHED][STREAM]["median"] = 19.9
    bad["auto_over_stream"]["1"]["median"] = 1.06
    assert list(runs.met({"entries": [good]}).values()) == [True, True]
    assert list(runs.met({"entries": [good, bad]}).values()) == [False, False]
    # Features of inner layers are no part of the first goal.
    inner = cell(INNER)
    assert list(runs.met({"entries": [inner]}).values()) == [None, True]
    assert list(runs.met({"entries": []}).values()) == [None, None]


def test_whole_runs_are_shown() -> None:
    shown = runs.table({"epochs": 3, "entries": [cell()]})
    assert "one and of 3 epochs" in shown
    assert "resnet18/backbone/0.25" in shown
    assert "22.5" in shown


def test_features_of_inner_layers_are_not_kept() -> None:
    inner = Workload("resnet18", INNER)
    assert CACHED in runs.ours_of(runs.CELLS[0][0])
    assert CACHED not in runs.ours_of(inner)
    assert len(runs.cells_of(quick=False, shaped=True)) == 4
    assert len(runs.cells_of(quick=False, shaped=False)) == 3
    assert [
        link for _, link in runs.cells_of(quick=True, shaped=False).values()
    ] == [None]


def test_what_is_complete_is_not_measured_again() -> None:
    notes: list[str] = []
    section: dict[str, Any] = {}
    context = context_of(section, note=notes.append)
    names = ["a/1", "a/2", "b/1"]
    assert entries.missing(context, names) == names
    entries.begin(section, "a/1")["complete"] = True
    entries.begin(section, "a/2", half="done")
    assert entries.missing(context, names) == ["a/2", "b/1"]
    again = entries.begin(section, "a/2")
    assert [each["name"] for each in section["entries"]] == ["a/1", "a/2"]
    assert "half" not in again
    assert entries.matching(names, ["a/*", "*/1"]) == names
    assert entries.matching(names, ["b/*"]) == ["b/1"]
    assert not notes


@pytest.mark.parametrize("module", [many_tenants, scaling])
def test_no_testbed_is_started_for_nothing(module: Any) -> None:
    notes: list[str] = []
    context = context_of({}, quick=True, only=["vgg/*"], note=notes.append)
    module.measure(context)
    assert notes == ["nothing here matches vgg/*"]
    assert module.table(context.section)


def steps(sizes: list[int], closed: list[int]) -> Any:
    def of(epoch: int) -> Generator[torch.Tensor, None, None]:
        try:
            for size in sizes:
                time.sleep(0.002)
                yield torch.zeros(size)
        finally:
            closed.append(epoch)

    return of


def test_diary_goes_on_over_epochs_until_its_time() -> None:
    closed: list[int] = []
    until = time.monotonic() + 0.05
    found = diary.follow(steps([4, 2], closed), 7, until)
    assert found[0][1] == 0
    assert [count for _, count in found[:5]] == [0, 4, 6, 10, 12]
    assert found[-1][0] >= until > found[-2][0]
    assert closed == list(range(7, 7 + len(closed)))
    assert len(closed) == -(-(len(found) - 1) // 2)


def test_diary_ends_when_an_epoch_has_nothing() -> None:
    with pytest.raises(ValueError, match="epoch 3 has no batch"):
        diary.follow(steps([], []), 3, time.monotonic() + 1e6)


def test_amounts_between_two_moments() -> None:
    later, earlier = Amounts(5, 70, 40, 2, 3), Amounts(3, 50, 10, 1, 1)
    assert asdict(later - earlier) == {
        "seconds": 2,
        "down_bytes": 20,
        "up_bytes": 30,
        "client_seconds": 1,
        "storage_seconds": 2,
    }


def test_plans_are_waited_for_no_longer_than_allowed() -> None:
    taken: list[int] = []
    found = settle(lambda: taken.append(1), lambda: None, most_seconds=0.0)
    assert taken == [1] * MIN_STEPS
    assert found == {"plans": [None] * MIN_STEPS, "settled": False}


def test_a_plan_that_stays_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SETTLED_SECONDS", 0.0)
    labels = iter(["a", None, "b", "b"])
    found = settle(lambda: None, lambda: next(labels), most_seconds=60.0)
    assert found == {"plans": ["a", None, "b"], "settled": True}
    monkeypatch.setattr(tiers, "SETTLED_SECONDS", 1e-3)
    labels = iter(["a", "b", "c", "c"])
    found = settle(
        lambda: time.sleep(2e-3), lambda: next(labels), most_seconds=60.0
    )
    assert found == {"plans": ["a", "b", "c", "c"], "settled": True}


def test_a_first_plan_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SETTLED_SECONDS", 0.0)
    labels = iter([None] * 5 + ["a", "a"])
    decided = iter([False] * 6 + [True])
    found = settle(
        lambda: None, lambda: next(labels), 60.0, lambda: next(decided)
    )
    assert found == {"plans": [None] * 5 + ["a"], "settled": True}
    monkeypatch.setattr(tiers, "MOST_UNDECIDED_SECONDS", 0.0)
    found = settle(lambda: None, lambda: None, 0.0, lambda: False)
    assert found == {"plans": [None] * MIN_STEPS, "settled": True}


def test_shares_of_a_mix_are_over_what_each_gets_alone() -> None:
    found = {"each": [10.0, 40.0]}
    assert many_tenants.shares(found, None) == {"jain": fairness([10, 40])}
    mixed = many_tenants.shares(found, [20.0, 80.0])
    assert mixed == {"jain": pytest.approx(1.0), "relative": 1.0}


def test_tenants_are_summarised_by_medians() -> None:
    entry: dict[str, Any] = {
        "name": "same/2",
        "rounds": {
            name: [
                {"samples_per_second": rate, "jain": 1.0}
                for rate in (10.0, 30.0, 20.0)
            ]
            for name in many_tenants.CONTENDERS
        },
        "complete": True,
    }
    many_tenants.summarise(entry)
    assert set(entry["samples_per_second"].values()) == {20.0}
    assert "relative" not in entry
    shown = many_tenants.table({"entries": [entry]})
    assert shown.splitlines()[-1].count("20.0 (1.000)") == 3


def test_tenants_have_accounts_of_their_own() -> None:
    every = many_tenants.entries_of(quick=False)
    assert [len(each) for each in every.values()] == [1, 2, 4, 8, 4]
    assert len(set(every["mix/4"])) == 4
    tenants = many_tenants.tenants_of(2)
    options = many_tenants.with_accounts(tenants)["swift_options"]
    users = options["proxy-server.conf"]["filter:tempauth"]
    assert users["user_tenant1_trainer"] == f"{tenants[1].key} .admin"


def test_two_are_compared_with_one_round_by_round() -> None:
    entry: dict[str, Any] = {
        "name": "ranks/auto",
        "rounds": {
            setup: [{"samples_per_second": rate} for rate in rates]
            for setup, rates in {
                scaling.ONE: (10.0, 20.0, 40.0),
                scaling.TWO: (10.0, 18.0, 20.0),
            }.items()
        },
        "complete": True,
    }
    scaling.judge(entry)
    assert entry["ratio"]["median"] == 0.9
    assert entry["ratio"]["interval"] == [0.5, 1.0]
    section = {"entries": [entry], "cores": {"storage": 1, "client": 1}}
    assert list(scaling.met(section).values()) == [False]
    shown = scaling.table(section)
    assert "0.900 (0.500 … 1.000)" in shown
    assert "costs nothing" in shown
    section["cores"] = {"storage": 2, "client": 2}
    assert list(scaling.met(section).values()) == [None]
    assert "costs nothing" not in scaling.table(section)
    assert list(scaling.met({"entries": []}).values()) == [None]


def test_each_of_two_has_half_of_the_cores() -> None:
    tier = Tier("client", (2, 3, 4), None, {"A": "b"})
    assert [half(tier, number).cores for number in (0, 1)] == [(2,), (3, 4)]
    environment = half(tier, 1).environment
    assert (environment["A"], environment["OMP_NUM_THREADS"]) == ("b", "2")
    single = Tier("client", (5,), None, {})
    assert [half(single, number).cores for number in (0, 1)] == [(5,), (5,)]


def test_ranks_are_told_as_by_torchrun() -> None:
    assert scaling.rank_of(1, 2) == {"RANK": "1", "WORLD_SIZE": "2"}
    quick = scaling.entries_of(quick=True)
    assert {kind for kind, _ in quick.values()} == set(scaling.KINDS)


def test_parts_are_worth_what_their_absence_costs() -> None:
    entry: dict[str, Any] = {
        "name": "resnet18/backbone/2",
        "rounds": {
            name: [{"samples_per_second": 10.0 * (number + 1)}] * 2
            for number, name in enumerate(ablations.CONTENDERS)
        },
        "complete": True,
    }
    ablations.judge(entry, ablations.PARTS)
    assert set(entry["parts"]) == set(ablations.PARTS)
    found = entry["parts"]["kept features"]["median"]
    assert found == pytest.approx(50 / 40)
    assert "1.250 (1.250 … 1.250)" in ablations.table({"entries": [entry]})


def test_published_rule_gives_all_that_memory_allows() -> None:
    workload = ablations.WORKLOADS[1]
    assert ablations.lp_batch(workload, 100e9, 64) == 64
    assert 1 <= ablations.lp_batch(workload, 1.2e9, 64) < 64


def test_results_are_of_json(tmp_path: Path) -> None:
    path = tmp_path / "cell.json"
    path.write_text(json.dumps(cell()))
    assert runs.line_of(json.loads(path.read_text())) == runs.line_of(cell())
