"""Admission of jobs: their slots, and grants not yet used.

A slot lasts as long as its client reads.  If an account without a slot waits
for ``PATIENCE_SECONDS``, it gets one of an account with several, whose client
is slower than a piece of the answer in that time.

Only numbers of jobs count here; :mod:`hapi_worker.models.device_memory`
refuses for lack of memory.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass

from hapi_protocol.errors import (
    HapiError,
    NotFoundError,
    ShareError,
    TooSlowError,
    UnavailableError,
)
from hapi_protocol.job_messages import JobRequest
from hapi_worker.models.device_models import Lease
from hapi_worker.peer import IsDisconnected, always_connected
from hapi_worker.wait_queue import QueueLimits, WaitQueue, wait_until

PATIENCE_SECONDS = 5.0
"""A quarter of the default of ``queue_seconds``, so that the waiting account
gets a slot in time.  A client that takes 128 KiB in it reads 26 kB/s."""
RETRY_SECONDS = 2.0
"""A job of a span lasts some seconds."""
DRAIN_RETRY_SECONDS = 10.0
"""A worker that is restarted has loaded torch by then."""


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
class Admission:
    """The jobs of one worker, granted or running.

    Args:
        limits: numbers of jobs, and of requests that wait for admission.
        grant_seconds: lifetime of an unused grant.
        queue_seconds: longest wait of a request for admission.
        weight: returns the weight of an account.
        on_admitted: called with the waiting time of each admitted request.
        clock: monotonic seconds.
    """

    limits: InitVar[QueueLimits]
    grant_seconds: float
    _: KW_ONLY
    queue_seconds: float = 0.0
    weight: Callable[[str], float] = lambda account: 1.0
    on_admitted: Callable[[float], None] = lambda seconds: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, limits: QueueLimits) -> None:
        self.queue = WaitQueue(
            limits, self._refusal, weight=self.weight, clock=self.clock
        )
        self._changed = self.queue.changed
        self._jobs: dict[str, Job] = {}
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
            UnavailableError: ``draining``; ``queue_full`` if no stream became
                free in time, or too many requests wait already (503).
            ShareError: the same, if the account has its share of streams
                (429).
        """
        started = self.clock()
        account = request.charged_account
        patient_until = started + PATIENCE_SECONDS

        def check() -> None:
            nonlocal patient_until
            self.check_open()
            self._drop_expired()
            is_patient = self.clock() < patient_until
            has_slot = self.queue.taken[account] > 0
            if not (is_patient or has_slot) and self._abort_slow_job():
                patient_until = self.clock() + PATIENCE_SECONDS

        with self._changed:
            self.queue.take(
                account, self.queue_seconds, is_disconnected, check
            )
            job = Job(secrets.token_hex(16), request)
            self._jobs[job.job_id] = job
        self.on_admitted(self.clock() - started)
        return job

    def grant(self, job: Job, lease: Lease | None) -> None:
        """Starts the lifetime of the job's grant."""
        with self._changed:
            job.lease = lease
            job.expires = self.clock() + self.grant_seconds

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
                    f"expires after {self.grant_seconds:g} s and starts "
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

    def jobs(self) -> list[Job]:
        """The admitted jobs."""
        with self._changed:
            return list(self._jobs.values())

    def drain(self, seconds: float) -> bool:
        """Refuses new jobs and waits until no job is left.

        Returns:
            True if all jobs ended within ``seconds``.
        """

        def has_ended() -> bool:
            self._drop_expired()
            return not self._jobs

        with self._changed:
            self._close()
            return wait_until(
                self._changed, has_ended, seconds, clock=self.clock
            )

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
        self._changed.notify_all()

    def _end(self, job: Job) -> None:
        if self._jobs.pop(job.job_id, None) is None:
            return
        if job.lease is not None:
            job.lease.release()
        self.queue.leave(job.account)

    def _drop_expired(self) -> None:
        now = self.clock()
        for job in list(self._jobs.values()):
            if not job.running and job.expires <= now:
                self._end(job)

    def _abort_slow_job(self) -> bool:
        """Aborts a job with a slow client of an account with several."""
        num_jobs = self.queue.taken
        slow = [
            job
            for job in self._jobs.values()
            if num_jobs[job.account] > 1
            and job.blocked_seconds() >= PATIENCE_SECONDS
        ]
        if not slow:
            return False
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
        return True

    def _refusal(self, account: str) -> HapiError:
        limits = self.queue.limits
        if self.queue.taken[account] >= limits.per_account:
            return ShareError(
                "share_exceeded",
                f"account {account} has {limits.per_account} streams already, "
                "which is its share of this worker",
                retry_after=RETRY_SECONDS,
            )
        return UnavailableError(
            "queue_full",
            f"all {limits.slots} streams of this worker are taken",
            retry_after=RETRY_SECONDS,
        )


def _draining() -> UnavailableError:
    return UnavailableError(
        "draining",
        "this worker is shutting down",
        retry_after=DRAIN_RETRY_SECONDS,
    )
