"""How many jobs there are at a time, and the grants not yet used."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hapi_protocol.errors import (
    HapiError,
    RightsError,
    ShareError,
    UnavailableError,
)
from hapi_protocol.messages import JobRequest
from hapi_worker.residency import Lease

RETRY_SECONDS = 2.0
DRAIN_RETRY_SECONDS = 10.0


@dataclass
class Job:
    """A granted job; ``lease`` is None for an index."""

    job_id: str
    request: JobRequest
    lease: Lease | None
    expires: float
    running: bool = False
    abort: Callable[[HapiError], None] = lambda error: None


class Admission:
    """The jobs of one worker, granted or running.

    Args:
        max_streams: of them at a time.
        max_per_account: of them charged to one account.
        grant_seconds: after which an unused grant lapses.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_streams: int,
        max_per_account: int,
        grant_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_streams = max_streams
        self._max_per_account = max_per_account
        self._grant_seconds = grant_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    def check(self, account: str) -> None:
        """
        Raises:
            UnavailableError: ``draining``, ``queue_full``.
            ShareError: the account has its share of streams already.
        """
        self.drop_lapsed()
        with self._changed:
            self._check(account)

    def grant(self, request: JobRequest, lease: Lease | None) -> Job:
        """Takes a place; raises as :meth:`check`, and keeps no lease then."""
        job = Job(
            job_id=secrets.token_hex(16),
            request=request,
            lease=lease,
            expires=self._clock() + self._grant_seconds,
        )
        with self._changed:
            self._check(request.charged_account)
            self._jobs[job.job_id] = job
        return job

    def start(self, job_id: str) -> Job:
        """The granted job; each can be started once.

        Raises:
            RightsError: ``not_found`` for unknown, lapsed, started jobs.
        """
        self.drop_lapsed()
        with self._changed:
            job = self._jobs.get(job_id)
            if job is None or job.running:
                raise RightsError(
                    "not_found",
                    f"there is no job {job_id[:64]!r} to start: a grant "
                    f"lapses after {self._grant_seconds:g} s and starts "
                    "one stream",
                )
            job.running = True
            return job

    def end(self, job: Job) -> None:
        """Gives the place and the model free."""
        with self._changed:
            self._jobs.pop(job.job_id, None)
            self._changed.notify_all()
        if job.lease is not None:
            job.lease.release()

    def drop_lapsed(self) -> None:
        """Ends grants that were not used in time."""
        now = self._clock()
        with self._changed:
            lapsed = [
                job
                for job in self._jobs.values()
                if not job.running and job.expires <= now
            ]
        for job in lapsed:
            self.end(job)

    def num_running(self, account: str | None = None) -> int:
        """Streams that run now; None counts those of all accounts."""
        with self._changed:
            return sum(
                job.running and account in (None, job.request.charged_account)
                for job in self._jobs.values()
            )

    def drain(self, seconds: float) -> bool:
        """Grants nothing more; waits until no job is left.

        Returns:
            Whether all ended within ``seconds``.
        """
        deadline = self._clock() + seconds
        with self._changed:
            self._draining = True
        while True:
            self.drop_lapsed()
            with self._changed:
                left = deadline - self._clock()
                if not self._jobs or left <= 0:
                    return not self._jobs
                self._changed.wait(min(left, 0.5))

    def abort_all(self) -> None:
        """Breaks off what outlasted the drain."""
        with self._changed:
            self._draining = True
            jobs = list(self._jobs.values())
        for job in jobs:
            job.abort(_draining())

    def _check(self, account: str) -> None:
        if self._draining:
            raise _draining()
        if len(self._jobs) >= self._max_streams:
            raise UnavailableError(
                "queue_full",
                f"all {self._max_streams} streams of this worker are taken",
                retry_after=RETRY_SECONDS,
            )
        mine = Counter(
            job.request.charged_account for job in self._jobs.values()
        )
        if mine[account] >= self._max_per_account:
            raise ShareError(
                "share_exceeded",
                f"account {account} has {self._max_per_account} streams "
                "already, which is its share of this worker",
                retry_after=RETRY_SECONDS,
            )


def _draining() -> UnavailableError:
    return UnavailableError(
        "draining",
        "this worker is shutting down",
        retry_after=DRAIN_RETRY_SECONDS,
    )
