"""Grants, shares of accounts, draining."""

from __future__ import annotations

import threading

import pytest

from hapi_protocol.errors import RightsError, ShareError, UnavailableError
from hapi_protocol.messages import JobRequest
from hapi_worker.admission import Admission


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeLease:
    def __init__(self) -> None:
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


def request(account: str = "AUTH_a") -> JobRequest:
    return JobRequest(
        kind="index",
        charged_account=account,
        model=None,
        cut=0,
        encoding="float32",
        transform="eval",
        numerics="exact",
        samples=None,
        ranged=False,
        source_name="/AUTH_a/c/o",
        source_etag="etag",
        source_length_bytes=1,
        trans_id="tx",
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> Admission:
    return Admission(3, 2, 10.0, clock=clock)


def test_streams_are_bounded_in_total_and_per_account(
    admission: Admission,
) -> None:
    first = admission.grant(request(), None)
    admission.grant(request(), None)
    with pytest.raises(ShareError, match="AUTH_a") as share:
        admission.grant(request(), None)
    assert share.value.retry_after
    admission.grant(request("AUTH_b"), None)
    with pytest.raises(UnavailableError) as full:
        admission.check("AUTH_c")
    assert full.value.code == "queue_full"
    assert full.value.retry_after
    admission.end(first)
    admission.check("AUTH_c")


def test_grant_lapses_when_it_is_not_used(
    admission: Admission, clock: Clock
) -> None:
    lease = FakeLease()
    job = admission.grant(request(), lease)  # type: ignore[arg-type]
    clock.now += 9.9
    admission.drop_lapsed()
    assert lease.num_released == 0
    clock.now += 0.2
    with pytest.raises(RightsError) as gone:
        admission.start(job.job_id)
    assert gone.value.code == "not_found"
    assert lease.num_released == 1


def test_job_starts_once_and_does_not_lapse_while_it_runs(
    admission: Admission, clock: Clock
) -> None:
    job = admission.grant(request(), None)
    admission.start(job.job_id)
    with pytest.raises(RightsError):
        admission.start(job.job_id)
    clock.now += 1000
    admission.drop_lapsed()
    assert admission.num_running() == 1
    admission.end(job)
    assert admission.num_running() == 0


def test_drain_refuses_new_jobs_and_waits_for_running_ones() -> None:
    admission = Admission(3, 3, 10.0)
    job = admission.start(admission.grant(request(), None).job_id)
    threading.Timer(0.1, admission.end, [job]).start()
    assert admission.drain(5.0)
    with pytest.raises(UnavailableError) as refused:
        admission.check("AUTH_a")
    assert refused.value.code == "draining"


def test_drain_gives_up_when_a_job_outlasts_it() -> None:
    admission = Admission(3, 3, 10.0)
    admission.start(admission.grant(request(), None).job_id)
    assert not admission.drain(0.05)


def test_running_streams_are_counted_by_account(admission: Admission) -> None:
    for account in ("AUTH_a", "AUTH_b", "AUTH_b"):
        admission.start(admission.grant(request(account), None).job_id)
    assert admission.num_running() == 3
    assert admission.num_running("AUTH_b") == 2
    assert admission.num_running("AUTH_c") == 0
