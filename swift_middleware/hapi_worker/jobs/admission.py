"""How many jobs there are at a time, who waits, and the grants not yet used.

A request for a job waits for a place.  When one becomes free, the account
with the fewest places (by its weight) is next, then who came first; so a
newcomer does not stand behind all that a greedy account has asked for.  When
too many wait, the last one of the account that has most waiting is turned
away.  Who has gone while it waited is given nothing.
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
    RightsError,
    ShareError,
    UnavailableError,
)
from hapi_protocol.job_messages import JobRequest
from hapi_worker.models.device_models import Lease
from hapi_worker.peer import POLL_SECONDS, IsGone, asker_gone, never_gone
from hapi_worker.scheduling.fair_queue import last_of_most

RETRY_SECONDS = 2.0
DRAIN_RETRY_SECONDS = 10.0


@dataclass(eq=False)
class Job:
    """A job that has a place; ``lease`` is None for an index.

    Attributes:
        expires: when the grant lapses; never before it is given.
        abort: makes a running job fail.
        buffered: bytes of samples and features that it holds.
    """

    job_id: str
    request: JobRequest
    lease: Lease | None = None
    expires: float = math.inf
    running: bool = False
    abort: Callable[[HapiError], None] = lambda error: None
    buffered: Callable[[], int] = lambda: 0

    @property
    def account(self) -> str:
        return self.request.charged_account


@dataclass(eq=False)
class _Waiter:
    """A request that waits for a place; has one of both at the end."""

    request: JobRequest
    is_gone: IsGone
    job: Job | None = None
    refusal: HapiError | None = None

    @property
    def account(self) -> str:
        return self.request.charged_account


@dataclass(frozen=True)
class JobLimits:
    """What an operator allows.

    Args:
        streams: jobs at a time.
        per_account: of them charged to one account.
        waiting: requests that wait for a place.
    """

    streams: int
    per_account: int
    waiting: int = 0


class Admission:
    """The jobs of one worker, granted or running.

    Args:
        places: how many.
        grant_seconds: after which an unused grant lapses.
        queue_seconds: how long a request waits for a place.
        weight: of an account.
        waited: told of the seconds of each request that got a place.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        places: JobLimits,
        grant_seconds: float,
        *,
        queue_seconds: float = 0.0,
        weight: Callable[[str], float] = lambda account: 1.0,
        waited: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.places = places
        self.queue_seconds = queue_seconds
        self._grant_seconds = grant_seconds
        self._weight = weight
        self._waited = waited
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

    def enter(self, request: JobRequest, is_gone: IsGone = never_gone) -> Job:
        """Takes a place, after a while if there is none.

        Args:
            request: that is to have it.
            is_gone: whether its sender waits no more.

        Raises:
            AnnotationError: ``bad_request``: the sender has gone.
            UnavailableError: ``draining``, ``queue_full``.
            ShareError: the account has its share of streams already.
        """
        asked = self._clock()
        deadline = asked + self.queue_seconds
        waiter = _Waiter(request, is_gone)
        with self._changed:
            self._drop_lapsed()
            if self._draining:
                raise _draining()
            self._waiting.append(waiter)
            self._serve_waiting()
            self._turn_away()
            while waiter.job is None and waiter.refusal is None:
                left = deadline - self._clock()
                if left <= 0:
                    self._refuse(waiter)
                else:
                    # Grants that lapse meanwhile make room as well.
                    self._changed.wait(
                        min(left, self._grant_seconds, POLL_SECONDS)
                    )
                    self._drop_lapsed()
                    self._drop_gone()
        if waiter.refusal is not None:
            raise waiter.refusal
        assert waiter.job is not None, "refused or served"
        self._waited(self._clock() - asked)
        return waiter.job

    def grant(self, job: Job, lease: Lease | None) -> None:
        """The job may start; its grant lapses if it does not."""
        with self._changed:
            job.lease = lease
            job.expires = self._clock() + self._grant_seconds

    def start(self, job_id: str) -> Job:
        """The granted job; each can be started once.

        Raises:
            RightsError: ``not_found`` for unknown, lapsed, started jobs.
        """
        with self._changed:
            self._drop_lapsed()
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
            self._end(job)

    def drop_lapsed(self) -> None:
        """Ends grants that were not used in time."""
        with self._changed:
            self._drop_lapsed()

    def num_running(self, account: str | None = None) -> int:
        """Streams that run now; None counts those of all accounts."""
        with self._changed:
            return sum(
                job.running and account in (None, job.account)
                for job in self._jobs.values()
            )

    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        with self._changed:
            return len(self._waiting)

    def waiting_by_account(self) -> Counter[str]:
        """Requests that wait for a place."""
        with self._changed:
            return Counter(waiter.account for waiter in self._waiting)

    def jobs(self) -> list[Job]:
        """Those that have a place now."""
        with self._changed:
            return list(self._jobs.values())

    def reconfigure(self, places: JobLimits, queue_seconds: float) -> None:
        """New limits; jobs that have a place keep it."""
        with self._changed:
            self.places = places
            self.queue_seconds = queue_seconds
            self._serve_waiting()

    def drain(self, seconds: float) -> bool:
        """Grants nothing more; waits until no job is left.

        Returns:
            Whether all ended within ``seconds``.
        """
        deadline = self._clock() + seconds
        with self._changed:
            self._close()
            while self._jobs:
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
                self._drop_lapsed()
            return True

    def abort_all(self) -> None:
        """Breaks off what outlasted the drain."""
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
        self._serve_waiting()
        self._changed.notify_all()

    def _drop_lapsed(self) -> None:
        now = self._clock()
        for job in list(self._jobs.values()):
            if not job.running and job.expires <= now:
                self._end(job)

    def _taken(self) -> Counter[str]:
        return Counter(job.account for job in self._jobs.values())

    def _drop_gone(self) -> None:
        gone = [waiter for waiter in self._waiting if waiter.is_gone()]
        for waiter in gone:
            self._waiting.remove(waiter)
            waiter.refusal = asker_gone()
        if gone:
            self._changed.notify_all()

    def _serve_waiting(self) -> None:
        self._drop_gone()
        taken = self._taken()
        while self._waiting and len(self._jobs) < self.places.streams:
            allowed = [
                waiter
                for waiter in self._waiting
                if taken[waiter.account] < self.places.per_account
            ]
            if not allowed:
                return
            # The first of equals: who came first.
            best = min(
                allowed,
                key=lambda w: taken[w.account] / self._weight(w.account),
            )
            self._waiting.remove(best)
            best.job = Job(secrets.token_hex(16), best.request)
            self._jobs[best.job.job_id] = best.job
            taken[best.account] += 1
            self._changed.notify_all()

    def _turn_away(self) -> None:
        """The last of those who have most waiting, when too many do."""
        if len(self._waiting) <= self.places.waiting:
            return
        self._refuse(last_of_most(self._waiting))

    def _refuse(self, waiter: _Waiter) -> None:
        self._waiting.remove(waiter)
        waiter.refusal = self._refusal(waiter.account)
        self._changed.notify_all()

    def _refusal(self, account: str) -> HapiError:
        share = self.places.per_account
        if self._taken()[account] >= share:
            return ShareError(
                "share_exceeded",
                f"account {account} has {share} streams already, which is "
                "its share of this worker",
                retry_after=RETRY_SECONDS,
            )
        return UnavailableError(
            "queue_full",
            f"all {self.places.streams} streams of this worker are taken",
            retry_after=RETRY_SECONDS,
        )


def _draining() -> UnavailableError:
    return UnavailableError(
        "draining",
        "this worker is shutting down",
        retry_after=DRAIN_RETRY_SECONDS,
    )
