"""Policies of a shared device."""

from __future__ import annotations

import pytest

from hapi_training.turn_policies import POLICIES, FairShares, Share


def seconds_of(policy, shares, turns, turn_seconds):
    """Lets jobs that always want the device have some turns."""
    waiting = list(shares)
    for share in shares:
        policy.asks(share)
    for _ in range(turns):
        share = policy.choose(waiting)
        seconds = turn_seconds[share]
        share.turns, share.seconds = share.turns + 1, share.seconds + seconds
        policy.ends(share, seconds)
        policy.asks(share)
    return [share.seconds for share in shares]


def test_fair_shares_are_those_of_the_weights():
    shares = [Share(1.0), Share(3.0), Share(4.0)]
    lengths = dict(zip(shares, (0.5, 0.02, 0.1), strict=True))
    seconds = seconds_of(FairShares(), shares, 5000, lengths)
    assert [s / sum(seconds) for s in seconds] == pytest.approx(
        [1 / 8, 3 / 8, 4 / 8], abs=0.01
    )


def test_job_that_was_away_saves_up_no_turns():
    policy, busy, late = FairShares(), Share(1.0), Share(1.0)
    seconds_of(policy, [busy], 100, {busy: 1.0})
    policy.asks(late)
    seconds_of(policy, [busy, late], 10, {busy: 1.0, late: 1.0})
    assert late.seconds == pytest.approx(5.0, abs=1.0)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_shortest_remaining_goes_first(first):
    shares = [
        Share(1.0, turns=10, seconds=10.0, left=50),
        Share(1.0, turns=10, seconds=1.0, left=90),
        # Says nothing: as long again as until now.
        Share(1.0, turns=10, seconds=20.0),
    ]
    order = [1, 2, 0]
    waiting = [shares[number] for number in order[first:]]
    policy = POLICIES["srtf"]()
    assert policy.choose(waiting) is shares[order[first]]
