"""Admission: grants, shares of accounts, waiting requests, draining."""

from __future__ import annotations

import threading

import pytest

from hapi_protocol.errors import (
    HapiError,
    RightsError,
    ShareError,
    UnavailableError,
)
from hapi_worker.jobs import admission as admission_module
from hapi_worker.jobs.admission import Admission, Job
from hapi_worker.peer import always_connected
from hapi_worker.wait_queue import QueueLimits
from waiting import until
from worker_under_test import job_for


class FakeLease:
    def __init__(self):
        self.num_released = 0

    def release(self):
        self.num_released += 1


def request(account="AUTH_a"):
    return job_for(b"x", charged_account=account)


LIMITS = QueueLimits(slots=3, per_account=2)


@pytest.fixture
def admission(clock):
    return Admission(LIMITS, 10.0, clock=clock)


def granted(admission, account="AUTH_a"):
    job = admission.enter(request(account))
    admission.grant(job, None)
    return job


def started(admission, account="AUTH_a"):
    return admission.start(granted(admission, account).job_id)


def test_streams_are_bounded_in_total_and_per_account(admission):
    first = granted(admission)
    granted(admission)
    with pytest.raises(ShareError, match="AUTH_a") as share:
        granted(admission)
    assert share.value.retry_after
    granted(admission, "AUTH_b")
    with pytest.raises(UnavailableError) as full:
        granted(admission, "AUTH_c")
    assert full.value.code == "queue_full"
    assert full.value.retry_after
    admission.end(first)
    granted(admission, "AUTH_c")


def test_unused_grant_expires(admission, clock):
    lease = FakeLease()
    job = admission.enter(request())
    clock.now += 100
    admission.drop_expired()
    admission.grant(job, lease)
    clock.now += 9.9
    admission.drop_expired()
    assert lease.num_released == 0
    clock.now += 0.2
    with pytest.raises(RightsError) as refused:
        admission.start(job.job_id)
    assert refused.value.code == "not_found"
    assert lease.num_released == 1


def test_job_starts_once_and_does_not_expire_while_it_runs(admission, clock):
    job = started(admission)
    with pytest.raises(RightsError):
        admission.start(job.job_id)
    clock.now += 1000
    admission.drop_expired()
    assert admission.num_running() == 1
    admission.end(job)
    admission.end(job)
    assert admission.num_running() == 0


def test_drain_refuses_new_jobs_and_waits_for_running_ones():
    admission = Admission(LIMITS, 10.0)
    job = started(admission)
    threading.Timer(0.1, admission.end, [job]).start()
    assert admission.drain(5.0)
    with pytest.raises(UnavailableError) as refused:
        admission.enter(request())
    assert refused.value.code == "draining"


def test_drain_gives_up_when_a_job_outlasts_it():
    admission = Admission(LIMITS, 10.0)
    started(admission)
    assert not admission.drain(0.05)


def test_running_streams_are_counted_by_account(admission):
    for account in ("AUTH_a", "AUTH_b", "AUTH_b"):
        started(admission, account)
    assert admission.num_running() == 3
    assert admission.num_running("AUTH_b") == 2
    assert admission.num_running("AUTH_c") == 0


class Queue:
    """Requests that wait in threads, in the order they came."""

    def __init__(self, admission):
        self.admission = admission
        self.served: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.jobs: list[Job] = []
        self._threads: list[threading.Thread] = []

    def enter(self, account, is_disconnected=always_connected):
        before = self.admission.queue.num_waiting()
        thread = threading.Thread(
            target=self._enter, args=[account, is_disconnected]
        )
        self._threads.append(thread)
        num_ended = len(self.served) + len(self.refused)
        thread.start()
        until(
            lambda: (
                self.admission.queue.num_waiting() != before
                or len(self.served) + len(self.refused) != num_ended
            )
        )

    def _enter(self, account, is_disconnected):
        try:
            job = self.admission.enter(request(account), is_disconnected)
        except HapiError as error:
            self.refused.append((account, error.code))
            return
        self.jobs.append(job)
        self.served.append(account)

    def join(self):
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()


def queueing(
    streams=2, per_account=2, waiting=8, queue_seconds=5.0, **weights
):
    return Queue(
        Admission(
            QueueLimits(streams, per_account, waiting),
            10.0,
            queue_seconds=queue_seconds,
            weight=lambda account: weights.get(account, 1.0),
        )
    )


def serve_all(queue):
    """Ends one job after another, until all requests were admitted."""
    while queue.admission.jobs():
        num_served = len(queue.served)
        waiting = queue.admission.queue.num_waiting()
        queue.admission.end(queue.admission.jobs()[0])
        if waiting:
            until(lambda: len(queue.served) > num_served)  # noqa: B023
    queue.join()


def test_request_waits_for_admission():
    queue = queueing(streams=1)
    job = granted(queue.admission)
    queue.enter("b")
    assert queue.served == []
    assert queue.admission.queue.waiting_by_account() == {"b": 1}
    queue.admission.end(job)
    queue.join()
    assert queue.served == ["b"]
    assert queue.admission.queue.num_waiting() == 0


def test_account_with_the_fewest_jobs_is_next():
    queue = queueing(streams=2, per_account=2)
    for account in ("greedy", "greedy", "greedy", "greedy", "new", "other"):
        queue.enter(account)
    assert queue.served == ["greedy", "greedy"]
    queue.admission.end(queue.admission.jobs()[0])
    until(lambda: len(queue.served) == 3)
    assert queue.served[2] == "new"
    queue.admission.end(queue.jobs[2])
    until(lambda: len(queue.served) == 4)
    assert queue.served[3] == "other"
    serve_all(queue)


def test_accounts_take_turns():
    queue = queueing(streams=2, per_account=1)
    for account in "abaabcc":
        queue.enter(account)
    for number in range(5):
        until(lambda: len(queue.served) == 2 + number)  # noqa: B023
        queue.admission.end(queue.jobs[number])
    until(lambda: len(queue.served) == 7)
    assert "".join(queue.served) == "ababcac"
    serve_all(queue)


def test_jobs_are_admitted_by_weight():
    queue = queueing(streams=4, per_account=4, waiting=20, heavy=3.0)
    for _ in range(4):
        granted(queue.admission, "x")
    for account in ["light"] * 6 + ["heavy"] * 6:
        queue.enter(account)
    for job in queue.admission.jobs():
        queue.admission.end(job)
    until(lambda: len(queue.served) == 4)
    assert sorted(queue.served) == ["heavy"] * 3 + ["light"]
    serve_all(queue)


def test_next_request_is_searched_once_for_all_that_wake():
    weighed = []

    def weight(account):
        weighed.append(account)
        return 1.0

    limits = QueueLimits(1, 1, 30)
    queue = Queue(Admission(limits, 10, queue_seconds=20, weight=weight))
    for number in range(30):
        queue.enter(str(number))
    weighed.clear()
    queue.admission.end(queue.jobs[0])
    until(lambda: len(queue.served) == 2)
    # One search while the slot is free; else each that wakes would rank all.
    assert len(weighed) <= 2 * 29
    serve_all(queue)


def test_wait_for_admission_ends_in_time():
    queue = queueing(streams=1, per_account=1, queue_seconds=0.1)
    granted(queue.admission, "a")
    queue.enter("a")
    queue.enter("b")
    queue.join()
    assert sorted(queue.refused) == [
        ("a", "share_exceeded"),
        ("b", "queue_full"),
    ]


def test_expired_grant_admits_a_waiting_request():
    admission = Admission(QueueLimits(1, 1, 4), 0.1, queue_seconds=5.0)
    granted(admission, "a")
    queue = Queue(admission)
    queue.enter("b")
    queue.join()
    assert queue.served == ["b"]


def test_account_with_the_longest_queue_is_refused_first():
    queue = queueing(streams=1, per_account=1, waiting=3)
    job = granted(queue.admission, "x")
    for _ in range(3):
        queue.enter("greedy")
    queue.enter("modest")
    assert queue.refused == [("greedy", "queue_full")]
    assert queue.admission.queue.waiting_by_account()["modest"] == 1
    queue.enter("greedy")
    until(lambda: len(queue.refused) == 2)
    assert queue.refused[1][0] == "greedy"
    queue.admission.end(job)
    until(lambda: len(queue.served) == 1)
    serve_all(queue)
    assert sorted(queue.served) == ["greedy", "greedy", "modest"]


def test_disconnected_request_is_not_admitted():
    disconnected = threading.Event()
    queue = queueing(streams=1)
    job = granted(queue.admission, "a")
    queue.enter("b", disconnected.is_set)
    queue.enter("c")
    disconnected.set()
    queue.admission.end(job)
    queue.join()
    assert queue.served == ["c"]
    assert queue.refused == [("b", "bad_request")]


@pytest.mark.parametrize("blocked", [9.0, 0.0])
def test_account_without_a_place_gets_one_of_a_slow_client(
    monkeypatch, blocked
):
    monkeypatch.setattr(admission_module, "PATIENCE_SECONDS", 0.5)
    queue = queueing(streams=3, queue_seconds=3.0)
    aborted = []
    for account in ("one", "two", "two"):
        job = started(queue.admission, account)
        job.blocked_seconds = lambda: blocked

        def abort(error, job=job):
            aborted.append((job.account, error.code))
            queue.admission.end(job)

        job.abort = abort
    # Those with a slot wait, whoever is slow.
    queue.enter("one")
    queue.enter("new")
    queue.join()
    assert aborted == ([("two", "too_slow")] if blocked else [])
    assert queue.served == (["new"] if blocked else [])
    assert ("one", "queue_full") in queue.refused


def test_disconnected_request_ends_its_wait():
    disconnected = threading.Event()
    queue = queueing(streams=1, queue_seconds=60.0)
    granted(queue.admission, "a")
    queue.enter("b", disconnected.is_set)
    disconnected.set()
    queue.join()
    assert queue.refused == [("b", "bad_request")]
    assert queue.admission.queue.num_waiting() == 0


def test_drain_refuses_waiting_requests():
    queue = queueing(streams=1)
    granted(queue.admission)
    queue.enter("b")
    queue.admission.drain(0)
    queue.join()
    assert queue.refused == [("b", "draining")]


def test_new_limits_apply_at_once():
    queue = queueing(streams=1)
    granted(queue.admission, "a")
    queue.enter("b")
    queue.admission.queue.limits = QueueLimits(2, 2, 8)
    queue.join()
    assert queue.served == ["b"]
