"""Fairness between accounts, and when a micro-batch starts."""

from __future__ import annotations

from collections import Counter

import pytest

from hapi_worker.batching import Backlog, next_batch_size
from hapi_worker.scheduler import MAX_REMEMBERED_ACCOUNTS, FairQueue


def serve(
    queue: FairQueue[float], count: int | None = None
) -> list[tuple[str, float]]:
    """Pops and charges ``count`` pieces, whose work is its own cost."""
    served = []
    while (count is None or len(served) < count) and (found := queue.pop()):
        queue.charge(*found)
        served.append(found)
    return served


def test_work_of_one_account_keeps_its_order() -> None:
    queue: FairQueue[float] = FairQueue()
    costs = [0.3, 0.1, 0.2, 5.0, 0.0]
    for cost in costs:
        queue.push("a", cost)
    assert [cost for _, cost in serve(queue)] == costs
    assert len(queue) == 0
    assert queue.pop() is None


def test_accounts_get_equal_seconds_when_their_work_differs() -> None:
    queue: FairQueue[float] = FairQueue(quantum_seconds=0.05)
    for _ in range(400):
        queue.push("large", 0.4)
    for _ in range(4000):
        queue.push("small", 0.01)
    seconds: Counter[str] = Counter()
    for account, cost in serve(queue, 1000):
        seconds[account] += cost
    assert seconds["large"] == pytest.approx(seconds["small"], rel=0.1)


def test_newcomer_is_served_soon_when_another_has_a_long_line() -> None:
    queue: FairQueue[float] = FairQueue(quantum_seconds=0.05)
    for _ in range(1000):
        queue.push("busy", 0.1)
    serve(queue, 100)
    queue.push("new", 0.1)
    assert "new" in [account for account, _ in serve(queue, 2)]


def test_account_that_submits_piece_by_piece_still_pays() -> None:
    queue: FairQueue[float] = FairQueue(quantum_seconds=0.05)
    seconds: Counter[str] = Counter()
    for _ in range(300):
        queue.push("steady", 0.05)
    last = "dripping"
    for _ in range(200):
        if last == "dripping":
            queue.push("dripping", 0.2)
        [(last, cost)] = serve(queue, 1)
        seconds[last] += cost
    assert seconds["dripping"] <= 1.5 * seconds["steady"]


def test_debt_of_a_very_long_piece_costs_no_rounds() -> None:
    queue: FairQueue[float] = FairQueue(quantum_seconds=1e-6)
    queue.push("a", 1e6)
    serve(queue)
    queue.push("a", 1.0)
    assert serve(queue) == [("a", 1.0)]


def test_remembered_accounts_are_bounded() -> None:
    queue: FairQueue[float] = FairQueue()
    for number in range(MAX_REMEMBERED_ACCOUNTS + 100):
        queue.push(f"account-{number}", 0.1)
        serve(queue)
    assert len(queue._credit) <= MAX_REMEMBERED_ACCOUNTS


def backlog(**changes: object) -> Backlog:
    values: dict[str, object] = {
        "ready": 5,
        "pending": 10,
        "limit": 32,
        "flying": 0,
        "ended": False,
        "blocked": False,
        "waited_seconds": 0.0,
    }
    return Backlog(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"ready": 0, "ended": True, "pending": 0}, 0),
        ({"ready": 32}, 32),
        ({"ready": 40}, 32),
        ({"ready": 32, "flying": 1}, 32),
        ({"ready": 32, "flying": 2}, 0),
        ({}, 0),
        ({"ready": 8}, 8),
        ({"ready": 8, "flying": 1}, 0),
        ({"waited_seconds": 1.0}, 5),
        ({"waited_seconds": 1.0, "flying": 1}, 0),
        ({"ended": True}, 0),
        ({"ended": True, "pending": 0}, 5),
        ({"ended": True, "pending": 0, "flying": 1}, 5),
        ({"blocked": True, "pending": 0, "flying": 1}, 5),
        ({"limit": 1, "ready": 1}, 1),
    ],
)
def test_batch_size(changes: dict[str, object], size: int) -> None:
    assert next_batch_size(backlog(**changes)) == size
