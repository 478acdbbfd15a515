"""Fair shares, and what ``benchmarks.fairness`` makes of measurements."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import makespan
from benchmarks.contention import (
    Account,
    Rates,
    Scenario,
    due,
    judge,
    report,
    scenarios,
)
from benchmarks.fairness import arguments_of
from benchmarks.makespan import Tenant
from benchmarks.shares import jain_index, max_min_shares
from hypothesis import given
from hypothesis import strategies as st

from hapi_protocol.job_messages import UNAUTHENTICATED_ACCOUNT

# -- shares -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("demands", "weights", "shares"),
    [
        # Enough for all.
        ([1, 2, 3], None, [1, 2, 3]),
        # Nobody has enough.
        ([9, 9, 9], None, [4, 4, 4]),
        # The modest have what they ask for, the others share the rest.
        ([2, 9, 9], None, [2, 5, 5]),
        ([2, 3, 9], None, [2, 3, 7]),
        ([0, 9, 9], None, [0, 6, 6]),
        # By weights.
        ([9, 9, 9], [4, 1, 1], [8, 2, 2]),
        ([5, 9, 9], [4, 1, 1], [5, 3.5, 3.5]),
        ([12, 12, 1], [1, 0.25, 1], [8.8, 2.2, 1]),
    ],
)
def test_water_is_filled_up_to_demands_by_weight(
    demands: list[float],
    weights: list[float] | None,
    shares: list[float],
) -> None:
    names = "abc"
    found = max_min_shares(
        dict(zip(names, demands, strict=True)),
        12,
        weights and dict(zip(names, weights, strict=True)),
    )
    assert list(found) == list(names)
    assert list(found.values()) == pytest.approx(shares)


def test_weight_is_one_unless_given() -> None:
    found = max_min_shares({"a": 9, "b": 9}, 8, {"a": 3})
    assert found == pytest.approx({"a": 6, "b": 2})


amounts = st.floats(0, 100)


@given(
    st.lists(st.tuples(amounts, st.floats(0.1, 10)), min_size=1, max_size=6),
    amounts,
)
def test_shares_are_max_min_fair(
    accounts: list[tuple[float, float]], capacity: float
) -> None:
    demands = {str(n): demand for n, (demand, _) in enumerate(accounts)}
    weights = {str(n): weight for n, (_, weight) in enumerate(accounts)}
    shares = max_min_shares(demands, capacity, weights)
    used = sum(shares.values())
    assert used == pytest.approx(min(capacity, sum(demands.values())))
    for name, share in shares.items():
        assert 0 <= share <= demands[name]
        if share < demands[name] - 1e-6:
            # Who lacks something has as much, by weight, as anybody.
            level = share / weights[name]
            assert all(
                shares[other] / weights[other] <= level + 1e-6
                for other in shares
            )


@pytest.mark.parametrize(
    ("demands", "capacity", "weights", "said"),
    [
        ({"a": -1}, 1, None, "a demands -1"),
        ({"a": 1}, -2, None, "capacity is -2"),
        ({"a": 1}, 1, {"a": 0}, "a weighs 0"),
        ({"a": float("nan")}, 1, None, "a demands nan"),
    ],
)
def test_amounts_that_cannot_be_are_named(
    demands: dict[str, float],
    capacity: float,
    weights: dict[str, float] | None,
    said: str,
) -> None:
    with pytest.raises(ValueError, match=said):
        max_min_shares(demands, capacity, weights)


def test_index_tells_equal_from_unequal() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 0.5]) == pytest.approx(0.9)
    for values in ([], [0.0, 0.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match="values of 0 or more"):
            jain_index(values)


# -- accounts that meet -----------------------------------------------------


def phase(**work: float) -> Rates:
    return {
        name: {"work": each, "samples": 50 * each, "refused": 2}
        for name, each in work.items()
    }


def one_round(together: Rates) -> dict[str, Any]:
    return {"alone": phase(big=1.6, a=1.5, b=0.2), "together": together}


CROWD = Scenario(
    "greedy",
    (
        Account("big", 16, guarded=False),
        Account("a", 2),
        Account("b", 1),
    ),
)


def test_share_is_of_the_capacity_and_up_to_the_demand() -> None:
    fair = one_round(phase(big=0.7, a=0.7, b=0.2))
    capacity, shares = due(CROWD.accounts, fair)
    assert capacity == pytest.approx(1.6)
    assert shares == pytest.approx({"big": 0.7, "a": 0.7, "b": 0.2})


def test_what_is_lost_between_accounts_is_no_excuse() -> None:
    """Equally little for all is fair, and not what they are due."""
    lost = one_round(phase(big=0.35, a=0.35, b=0.1))
    capacity, shares = due(CROWD.accounts, lost)
    assert capacity == pytest.approx(1.6)
    assert shares["a"] == pytest.approx(0.7)
    found = judge(CROWD, [lost, lost])
    assert (found["capacity"], found["used"]) == pytest.approx((1.6, 0.8))
    assert found["jain"] == pytest.approx(1)
    assert not found["met"]


def test_scenario_is_met_when_guarded_accounts_have_their_share() -> None:
    found = judge(CROWD, [one_round(phase(big=0.7, a=0.7, b=0.2))] * 2)
    assert found["met"]
    big, a, b = found["accounts"]
    assert (a["ratio"], b["ratio"]) == pytest.approx((1, 1))
    assert (a["share"], a["demand"]) == pytest.approx((0.7, 1.5))
    assert a["samples_per_second"] == pytest.approx(35)
    assert a["demand_samples_per_second"] == pytest.approx(75)
    assert (big["guarded"], big["refused"]) == (False, 4)
    assert "a (2 streams, weight 1): 35.0 samples/s" in report(found)


@pytest.mark.parametrize(
    ("together", "why"),
    [
        (phase(big=0.78, a=0.62, b=0.2), "a has 0.89 of its share"),
        (phase(big=1.4, a=0.1, b=0.1), "and Jain's index is low"),
    ],
)
def test_scenario_is_missed_when_one_has_too_little(
    together: Rates, why: str
) -> None:
    assert not judge(CROWD, [one_round(together)] * 2)["met"], why


def test_greedy_account_may_have_what_others_leave() -> None:
    """Its own ratio is no goal."""
    rounds = [one_round(phase(big=0.62, a=0.74, b=0.2))] * 2
    found = judge(CROWD, rounds)
    assert found["accounts"][0]["ratio"] < 0.9
    assert found["met"]


def test_options_name_the_weights() -> None:
    found = scenarios(16, 2)
    assert found["greedy"].options == ()
    assert found["weights"].options == (
        "account_weights = AUTH_a=4, AUTH_b=2",
    )
    assert found["anonymous-weighted"].options == (
        "account_weights = .unauthenticated=0.25",
    )
    flood = found["anonymous"].accounts[1]
    assert (flood.name, flood.streams) == (UNAUTHENTICATED_ACCOUNT, 16)


def test_shares_go_by_the_weights_of_the_scenario() -> None:
    weighted = scenarios(16, 2)["weights"]
    work = {a.name: 1.6 for a in weighted.accounts}
    _, shares = due(
        weighted.accounts,
        {"alone": phase(**work), "together": phase(AUTH_a=1.6)},
    )
    assert list(shares.values()) == pytest.approx([0.2, 0.8, 0.4, 0.2])


# -- makespan ---------------------------------------------------------------


def test_makespan_is_over_the_sum_of_the_times_alone() -> None:
    every = [Tenant("t0", "resnet18"), Tenant("t1", "squeezenet1_1")]
    rounds = [
        {"solo": [6.0, 4.0], "together": t, "samples": [9, 9], "refused": 1}
        for t in (9.0, 10.4, 11.0)
    ]
    found = makespan.judge(every, rounds)
    assert found["ratio"] == pytest.approx(1.04)
    assert found["interval"] == pytest.approx((0.9, 1.1))
    assert (found["makespan_seconds"], found["solo_seconds"]) == (10.4, 10.0)
    assert (found["met"], found["refused"]) == (True, 3)
    assert found["tenants"][1] == {
        "account": "t1",
        "model": "squeezenet1_1",
        "samples": 9,
        "solo_seconds": 4.0,
    }
    assert not makespan.judge(every, [{**rounds[2]}] * 2)["met"]


def test_ten_tenants_have_six_models() -> None:
    every = makespan.tenants()
    assert len({tenant.name for tenant in every}) == 10
    assert len({tenant.model for tenant in every}) == 6


# -- the command ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "1"], "--rounds is 1; two or more"),
        (["--seconds", "0.5"], "--seconds is 0.5; 1 or more"),
        (["--shards", "0"], "--shards is 0; 1 or more"),
        (["--options", "max_batch"], "'max_batch' is not KEY=VALUE"),
        (["--scenarios", "envy"], "invalid choice: 'envy'"),
    ],
)
def test_arguments_that_cannot_be_are_told(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments_of(arguments)
    assert said in capsys.readouterr().err


def test_quick_is_quick() -> None:
    found = arguments_of(["--quick", "--data", "somewhere"])
    assert (found.rounds, found.seconds, found.shards) == (2, 4.0, 1)
    assert arguments_of(["--data", "somewhere"]).shard_samples == 60
