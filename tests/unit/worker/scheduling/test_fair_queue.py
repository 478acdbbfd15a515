"""Fairness between accounts, and when a micro-batch starts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi_splitter.numerics import batch_size
from hapi_worker.scheduling.batch_start import Backlog, num_passes
from hapi_worker.scheduling.fair_queue import (
    CREDIT_SECONDS,
    MAX_REMEMBERED_ACCOUNTS,
    FairQueue,
    Ledger,
)

KIND = "decode"


class Served:
    """A queue whose work is its own cost, run one piece at a time."""

    def __init__(self, weights=None):
        self.ledger = Ledger(weights)
        self.queue: FairQueue[float] = FairQueue(self.ledger)
        self.seconds: Counter[str] = Counter()

    def push(self, account, cost, count=1):
        for _ in range(count):
            self.queue.push(account, cost)

    def next(self):
        found = self.queue.pop()
        if found is not None:
            account, cost = found
            charged = self.ledger.begun(account, KIND)
            self.ledger.ended(account, KIND, charged, cost)
            self.seconds[account] += cost
        return found

    def serve(self, count):
        found = [self.next() for _ in range(count)]
        return [each[0] for each in found if each is not None]


@pytest.mark.parametrize("urgent", [False, True])
def test_work_of_one_account_keeps_its_order(urgent):
    served = Served()
    costs = [0.3, 0.1, 0.2, 5.0, 0.0]
    for cost in costs:
        served.queue.push("a", cost, urgent=urgent)
    assert [served.next() for _ in costs] == [("a", cost) for cost in costs]
    assert len(served.queue) == 0
    assert served.next() is None


def test_urgent_work_is_first_of_its_account():
    served = Served()
    served.push("a", 1.0, 2)
    served.queue.push("a", 2.0, urgent=True)
    expected = [("a", 2.0), ("a", 1.0), ("a", 1.0)]
    assert [served.next() for _ in expected] == expected


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.floats(0.1, 10), st.floats(0.01, 0.5)),
        min_size=2,
    )
)
def test_accounts_that_always_have_work_get_seconds_by_weight(accounts):
    served = Served({name: weight for name, (weight, _) in accounts.items()})
    for name, (_, cost) in accounts.items():
        served.push(name, cost, 600)
    # Nobody is ahead by more than one piece of work, in weighted seconds.
    slack = max(cost / weight for weight, cost in accounts.values())
    while min(len(line) for line in served.queue._by_account.values()) > 100:
        served.serve(50)
        tags = [served.seconds[name] / w for name, (w, _) in accounts.items()]
        assert max(tags) - min(tags) <= 2 * slack + 1e-6


def test_new_account_is_served_soon_when_another_has_much_work():
    served = Served()
    served.push("busy", 0.1, 1000)
    served.serve(100)
    served.push("new", 0.1)
    assert "new" in served.serve(2)


def test_idle_time_saves_no_more_than_a_small_credit():
    served = Served()
    served.push("resting", 0.01)
    served.serve(1)
    served.push("busy", 0.01, 10_000)
    served.serve(5000)
    served.push("resting", 0.01, 1000)
    first = served.serve(100)
    ahead = 0.01 * (first.count("resting") - first.count("busy"))
    assert ahead <= CREDIT_SECONDS + 0.02


def test_account_that_submits_piece_by_piece_is_charged():
    served = Served()
    served.push("steady", 0.05, 300)
    last = "dripping"
    for _ in range(200):
        if last == "dripping":
            served.push("dripping", 0.2)
        [last] = served.serve(1)
    assert served.seconds["dripping"] <= 1.5 * served.seconds["steady"]


def test_account_that_pauses_between_pieces_loses_nothing():
    served = Served()
    served.push("steady", 0.01, 2000)
    for _ in range(200):
        served.push("pausing", 0.01)
        while "pausing" not in served.serve(1):
            pass
        served.serve(1)
    assert served.seconds["pausing"] >= 0.9 * served.seconds["steady"]


def test_pieces_that_run_are_charged_before_they_end():
    ledger = Ledger()
    queue: FairQueue[int] = FairQueue(ledger)
    queue.push("a", 1)
    queue.pop()
    ledger.ended("a", KIND, ledger.begun("a", KIND), 1.0)
    queue.push("a", 2)
    queue.push("a", 3)
    queue.pop()
    before = queue.tag("a")
    charged = ledger.begun("a", KIND)
    assert charged == 1.0
    assert queue.tag("a") == before + 1.0
    ledger.ended("a", KIND, charged, 0.5)
    assert queue.tag("a") == before + 0.5


class Threads:
    """A queue that several threads serve, in simulated time.

    Args:
        num_threads: pieces that run at a time.
    """

    def __init__(self, num_threads):
        self.ledger = Ledger()
        self.queue: FairQueue[float] = FairQueue(self.ledger)
        self.num_threads = num_threads
        self.now = 0.0
        self.running: list[tuple[float, str, float, float]] = []
        self.demand: dict[str, int] = {}
        self.waiting: Counter[str] = Counter()
        self.served: list[tuple[float, str]] = []

    def run(self, until):
        """Each account keeps as many pieces of 1 s under way as it wants."""
        while self.now < until:
            num_running = Counter(account for _, account, _, _ in self.running)
            for account, count in self.demand.items():
                more = count - num_running[account] - self.waiting[account]
                for _ in range(more):
                    self.queue.push(account, 1.0)
                    self.waiting[account] += 1
            while len(self.running) < self.num_threads:
                found = self.queue.pop()
                if found is None:
                    break
                account, cost = found
                self.waiting[account] -= 1
                self.served.append((self.now, account))
                charged = self.ledger.begun(account, KIND)
                end = self.now + cost
                self.running.append((end, account, charged, cost))
            self.running.sort()
            end, account, charged, cost = self.running.pop(0)
            self.now = end
            self.ledger.ended(account, KIND, charged, cost)


@pytest.mark.parametrize(
    ("demand", "other", "tolerance"),
    [({"a": 8, "b": 8}, "b", 0.15), ({"a": 8, "b": 1, "new": 8}, "new", 0.2)],
)
def test_account_that_used_idle_time_is_served_like_others(
    demand, other, tolerance
):
    threads = Threads(8)
    threads.demand = {"a": 5, "b": 1}
    threads.run(300)
    threads.demand = demand
    threads.served.clear()
    threads.run(320)
    counts = Counter(account for _, account in threads.served)
    assert counts["a"] == pytest.approx(counts[other], rel=tolerance)


def test_queues_of_two_devices_do_not_block_each_other():
    ledger = Ledger()
    first, second = FairQueue[float](ledger), FairQueue[float](ledger)
    for _ in range(1000):
        for queue, account in ((first, "a"), (second, "c")):
            queue.push(account, 1.0)
            queue.pop()
            cost = 1.0 if account == "c" else 0.2
            ledger.ended(account, KIND, ledger.begun(account, KIND), cost)
    for _ in range(20):
        second.push("a", 1.0)
        second.push("c", 1.0)
    served = Counter()
    for _ in range(20):
        account, cost = second.pop() or ("", 0.0)
        served[account] += 1
        ledger.ended(account, KIND, ledger.begun(account, KIND), cost)
    assert served["a"] == pytest.approx(served["c"], abs=2)


def test_new_weights_rescale_the_lead_of_accounts():
    served = Served({"a": 0.001})
    served.push("a", 1.0, 100)
    served.push("x", 1.0, 100)
    served.serve(2)
    served.ledger.set_weights({})
    served.seconds.clear()
    served.serve(20)
    assert served.seconds["a"] == pytest.approx(served.seconds["x"], abs=2)


def test_dropped_work_leaves_no_account_waiting():
    ledger = Ledger()
    queue: FairQueue[int] = FairQueue(ledger)
    queue.push("a", 1)
    queue.push("b", 1)
    queue.clear()
    assert len(queue) == 0
    assert ledger._queues[0].waiting == {}


def test_remembered_accounts_are_bounded():
    served = Served()
    for number in range(MAX_REMEMBERED_ACCOUNTS + 100):
        served.push(f"account-{number}", 0.1)
        served.serve(1)
    assert len(served.ledger._queues[0].tags) <= MAX_REMEMBERED_ACCOUNTS
    assert len(served.ledger._usual) <= MAX_REMEMBERED_ACCOUNTS


def backlog(**changes):
    values: dict[str, object] = {
        "ready": 5,
        "pending": 0,
        "quiet": False,
        "waited_seconds": 0.0,
    }
    return Backlog(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"ready": 0, "quiet": True}, 0),
        ({"ready": 8}, 1),
        ({"ready": 8, "pending": 3}, 1),
        ({"ready": 23, "pending": 1}, 2),
        ({"ready": 23, "quiet": True}, 3),
        ({}, 0),
        ({"quiet": True}, 1),
        ({"quiet": True, "pending": 1}, 0),
        ({"waited_seconds": 0.09}, 0),
        ({"waited_seconds": 0.1}, 1),
        ({"waited_seconds": 9.0, "pending": 1}, 0),
    ],
)
def test_passes_that_are_due(changes, count):
    assert num_passes(backlog(**changes), 8) == count


@pytest.mark.parametrize(
    ("num_samples", "size"),
    [(None, 8), (1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (60, 8), (0, 1)],
)
def test_size_of_batches_depends_on_the_request_alone(num_samples, size):
    assert batch_size(8, num_samples) == size
    for largest in (1, 6):
        assert batch_size(largest, num_samples) == min(largest, size)
