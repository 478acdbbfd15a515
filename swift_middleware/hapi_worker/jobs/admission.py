"""Admission of jobs: limits, waiting requests, and grants not yet used.

When a job ends, the account with the fewest jobs by its weight is next, and
within it the request that came first: one account cannot fill the queue for
all others.  If too many requests wait, the newest one of the account with the
most waiting requests is refused.

A place lasts as long as its client reads.  If an account without a place waits
for ``PATIENCE_SECONDS``, it gets one of an account with several, whose client
is slower than a piece of the answer in that time.

Only numbers of jobs count here; :mod:`hapi_worker.models.device_models`
refuses for lack of memory.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hapi_protocol.errors import (
    HapiError,
    NotFoundError,
    ShareError,
    TooSlowError,
    UnavailableError,
)
from hapi_protocol.job_messages import JobRequest
from hapi_worker.models.device_models import Lease
from hapi_worker.peer import (
    POLL_SECONDS,
    IsDisconnected,
    always_connected,
    client_disconnected_error,
)
from hapi_worker.scheduling.fair_queue import last_of_busiest

PATIENCE_SECONDS = 5.0
RETRY_SECONDS = 2.0
DRAIN_RETRY_SECONDS = 10.0


@dataclass(eq=False)
class Job:
    """An admitted job.

    Attributes:
        lease: the job's hold on its model; None for an index job.
        expires: when the grant expires; infinite before it is given.
        abort: makes a running job fail.
        buffered: returns the bytes of samples and features it holds.
        blocked_seconds: returns how long the client has been taking the
            present piece of the answer.
    """

    job_id: str
    request: JobRequest
    lease: Lease | None = None
    expires: float = math.inf
    running: bool = False
    abort: Callable[[HapiError], None] = lambda error: None
    buffered: Callable[[], int] = lambda: 0
    blocked_seconds: Callable[[], float] = lambda: 0.0

    @property
    def account(self) -> str:
        return self.request.charged_account


@dataclass(eq=False)
class _Waiter:
    """A waiting request; in the end it has a job or a refusal."""

    request: JobRequest
    is_disconnected: IsDisconnected
    since: float
    job: Job | None = None
    refusal: HapiError | None = None

    @property
    def account(self) -> str:
        return self.request.charged_account


@dataclass(frozen=True)
class JobLimits:
    """Numbers of jobs that the operator allows.

    Args:
        streams: jobs at a time.
        per_account: jobs at a time that are charged to one account.
        waiting: requests that may wait for admission.
    """

    streams: int
    per_account: int
    waiting: int = 0


class Admission:
    """The jobs of one worker, granted or running.

    Args:
        limits: numbers of jobs.
        grant_seconds: lifetime of an unused grant.
        queue_seconds: longest wait of a request for admission.
        weight: returns the weight of an account.
        on_admitted: called with the waiting time of each admitted request.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limits: JobLimits,
        grant_seconds: float,
        *,
        queue_seconds: float = 0.0,
        weight: Callable[[str], float] = lambda account: 1.0,
        on_admitted: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.queue_seconds = queue_seconds
        self._grant_seconds = grant_seconds
        self._weight = weight
        self._on_admitted = on_admitted
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._waiting: list[_Waiter] = []
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    def check_open(self) -> None:
        """
        Raises:
            UnavailableError: ``draining``.
        """
        if self._draining:
            raise _draining()

    def enter(
        self,
        request: JobRequest,
        is_disconnected: IsDisconnected = always_connected,
    ) -> Job:
        """Admits a job; waits up to ``queue_seconds`` if there are too many.

        Args:
            request: the filter's request.
            is_disconnected: returns True if the filter waits no more.

        Raises:
            AnnotationError: ``bad_request``: the filter has disconnected.
            UnavailableError: ``draining``, ``queue_full``.
            ShareError: the account has its share of streams already.
        """
        started = self._clock()
        deadline = started + self.queue_seconds
        waiter = _Waiter(request, is_disconnected, started)
        with self._changed:
            self._drop_expired()
            if self._draining:
                raise _draining()
            self._waiting.append(waiter)
            self._admit_waiting()
            self._refuse_excess()
            while waiter.job is None and waiter.refusal is None:
                left = deadline - self._clock()
                if left <= 0:
                    self._refuse(waiter)
                else:
                    # Grants that expire meanwhile admit others.
                    self._changed.wait(
                        min(left, self._grant_seconds, POLL_SECONDS)
                    )
                    self._drop_expired()
                    self._drop_disconnected()
                    self._take_slow_place(waiter)
        if waiter.refusal is not None:
            raise waiter.refusal
        assert waiter.job is not None, "refused or admitted"
        self._on_admitted(self._clock() - started)
        return waiter.job

    def grant(self, job: Job, lease: Lease | None) -> None:
        """Starts the lifetime of the job's grant."""
        with self._changed:
            job.lease = lease
            job.expires = self._clock() + self._grant_seconds

    def start(self, job_id: str) -> Job:
        """Returns the granted job; each can be started once.

        Raises:
            NotFoundError: for unknown, expired, started jobs.
        """
        with self._changed:
            self._drop_expired()
            job = self._jobs.get(job_id)
            if job is None or job.running:
                raise NotFoundError(
                    "not_found",
                    f"there is no job {job_id[:64]!r} to start: a grant "
                    f"expires after {self._grant_seconds:g} s and starts "
                    "one stream",
                )
            job.running = True
            return job

    def end(self, job: Job) -> None:
        """Removes the job and releases its lease."""
        with self._changed:
            self._end(job)

    def drop_expired(self) -> None:
        """Ends grants that were not used in time."""
        with self._changed:
            self._drop_expired()

    def num_running(self, account: str | None = None) -> int:
        """Number of running jobs of an account, or of all accounts."""
        with self._changed:
            return sum(
                job.running and account in (None, job.account)
                for job in self._jobs.values()
            )

    def num_waiting(self) -> int:
        """Number of requests that wait for admission."""
        with self._changed:
            return len(self._waiting)

    def waiting_by_account(self) -> Counter[str]:
        """Number of requests that wait for admission, by account."""
        with self._changed:
            return Counter(waiter.account for waiter in self._waiting)

    def jobs(self) -> list[Job]:
        """The admitted jobs."""
        with self._changed:
            return list(self._jobs.values())

    def reconfigure(self, limits: JobLimits, queue_seconds: float) -> None:
        """Sets new limits; jobs over them run to their end."""
        with self._changed:
            self.limits = limits
            self.queue_seconds = queue_seconds
            self._admit_waiting()

    def drain(self, seconds: float) -> bool:
        """Refuses new jobs and waits until no job is left.

        Returns:
            True if all jobs ended within ``seconds``.
        """
        deadline = self._clock() + seconds
        with self._changed:
            self._close()
            while self._jobs:
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
                self._drop_expired()
            return True

    def abort_all(self) -> None:
        """Aborts the jobs that are left after the drain."""
        with self._changed:
            self._close()
            jobs = list(self._jobs.values())
        for job in jobs:
            job.abort(_draining())

    # --- with the lock held ---

    def _close(self) -> None:
        self._draining = True
        for waiter in self._waiting:
            waiter.refusal = _draining()
        self._waiting.clear()
        self._changed.notify_all()

    def _end(self, job: Job) -> None:
        if self._jobs.pop(job.job_id, None) is None:
            return
        if job.lease is not None:
            job.lease.release()
        self._admit_waiting()
        self._changed.notify_all()

    def _drop_expired(self) -> None:
        now = self._clock()
        for job in list(self._jobs.values()):
            if not job.running and job.expires <= now:
                self._end(job)

    def _jobs_by_account(self) -> Counter[str]:
        return Counter(job.account for job in self._jobs.values())

    def _drop_disconnected(self) -> None:
        gone = [waiter for waiter in self._waiting if waiter.is_disconnected()]
        for waiter in gone:
            self._waiting.remove(waiter)
            waiter.refusal = client_disconnected_error()
        if gone:
            self._changed.notify_all()

    def _admit_waiting(self) -> None:
        self._drop_disconnected()
        num_jobs = self._jobs_by_account()
        while self._waiting and len(self._jobs) < self.limits.streams:
            allowed = [
                waiter
                for waiter in self._waiting
                if num_jobs[waiter.account] < self.limits.per_account
            ]
            if not allowed:
                return
            # Of equals, min() takes the one that came first.
            best = min(
                allowed,
                key=lambda w: num_jobs[w.account] / self._weight(w.account),
            )
            self._waiting.remove(best)
            best.job = Job(secrets.token_hex(16), best.request)
            self._jobs[best.job.job_id] = best.job
            num_jobs[best.account] += 1
            self._changed.notify_all()

    def _take_slow_place(self, waiter: _Waiter) -> None:
        num_jobs = self._jobs_by_account()
        if (
            num_jobs[waiter.account]
            or self._clock() - waiter.since < PATIENCE_SECONDS
        ):
            return
        slow = [
            job
            for job in self._jobs.values()
            if num_jobs[job.account] > 1
            and job.blocked_seconds() >= PATIENCE_SECONDS
        ]
        if slow:
            waiter.since = self._clock()
            last = max(slow, key=lambda job: num_jobs[job.account])
            last.abort(
                TooSlowError(
                    "too_slow",
                    f"the client took less than a piece of the answer in "
                    f"{PATIENCE_SECONDS:g} s, while an account waited that "
                    f"has no stream, and {last.account} has several",
                    retry_after=RETRY_SECONDS,
                )
            )

    def _refuse_excess(self) -> None:
        if len(self._waiting) > self.limits.waiting:
            self._refuse(last_of_busiest(self._waiting))

    def _refuse(self, waiter: _Waiter) -> None:
        self._waiting.remove(waiter)
        waiter.refusal = self._refusal(waiter.account)
        self._changed.notify_all()

    def _refusal(self, account: str) -> HapiError:
        share = self.limits.per_account
        if self._jobs_by_account()[account] >= share:
            return ShareError(
                "share_exceeded",
                f"account {account} has {share} streams already, which is "
                "its share of this worker",
                retry_after=RETRY_SECONDS,
            )
        return UnavailableError(
            "queue_full",
            f"all {self.limits.streams} streams of this worker are taken",
            retry_after=RETRY_SECONDS,
        )


def _draining() -> UnavailableError:
    return UnavailableError(
        "draining",
        "this worker is shutting down",
        retry_after=DRAIN_RETRY_SECONDS,
    )
