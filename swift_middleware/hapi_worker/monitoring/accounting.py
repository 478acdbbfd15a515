"""Accounting: the usage record of each job, however it ended.

Seconds are measured on the threads that decode and compute, not taken from
what was sent: a client that disconnects has used them too.  A micro-batch on
the device may outlast its job, so a usage record is complete once the job's
last piece of work has ended.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from hapi_protocol.errors import NotFoundError, TooSlowError, UnavailableError
from hapi_protocol.job_messages import JobRequest, Usage
from hapi_worker.wait_queue import QueueLimits, WaitQueue

MAX_ENDED = 1024
"""Ended jobs that are remembered."""
KEEP_SECONDS = 60.0
"""The filter asks when the answer ends, at most seconds after the job."""
WAIT_SECONDS = 2.0
"""Longest wait of a query for a job that is still ending."""
MAX_WAITING_QUERIES = 8
"""Queries that wait at a time; each occupies a thread of the server."""
RETRY_SECONDS = 1.0
"""A job that is still ending ends with its micro-batch."""


@dataclass(frozen=True)
class JobTotals:
    """Totals that a job itself counts.

    Attributes:
        samples: rows sent.
        errors: rows sent with an error.
        sent_bytes: bytes of the stream.
        source_bytes: bytes of the body read.
        cpu_seconds: CPU seconds of the job's own threads, without pools.
    """

    samples: int = 0
    errors: int = 0
    sent_bytes: int = 0
    source_bytes: int = 0
    cpu_seconds: float = 0.0


@dataclass(eq=False)
class JobUsageMeter:
    """Measures one job's seconds on the pools; thread-safe.

    Args:
        request: the job's request.
        digest: digest of its model; None for an index job.
        changed: guards the numbers; notified when no work is left.
    """

    request: JobRequest
    digest: str | None
    changed: threading.Condition

    def __post_init__(self) -> None:
        self._num_working = 0
        self._device_seconds = 0.0
        self._decode_seconds = 0.0
        self._cpu_seconds = 0.0

    @property
    def is_idle(self) -> bool:
        """True if no thread works for the job now."""
        return not self._num_working

    @contextmanager
    def decoding(self) -> Iterator[Callable[[float], None]]:
        """Measures its block as decoding for this job.

        Yields a function that adds CPU seconds of other processes.
        """
        others: list[float] = []
        with self.changed:
            self._num_working += 1
        started, cpu = time.monotonic(), time.thread_time()
        try:
            yield others.append
        finally:
            with self.changed:
                self._decode_seconds += time.monotonic() - started
                self._cpu_seconds += time.thread_time() - cpu + sum(others)
                self._left()

    def pass_started(self) -> None:
        """Records that the job takes part in a pass."""
        with self.changed:
            self._num_working += 1

    def pass_ended(self, device_seconds: float, cpu_seconds: float) -> None:
        """Adds the job's part of a pass that has ended."""
        with self.changed:
            self._device_seconds += device_seconds
            self._cpu_seconds += cpu_seconds
            self._left()

    def usage(self, outcome: str, reason: str, totals: JobTotals) -> Usage:
        """Makes the usage record."""
        request = self.request
        return Usage(
            kind=request.kind,
            charged_account=request.charged_account,
            model_digest=self.digest,
            cut=request.cut,
            encoding=request.encoding,
            samples=totals.samples,
            errors=totals.errors,
            device_seconds=self._device_seconds,
            decode_seconds=self._decode_seconds,
            cpu_seconds=self._cpu_seconds + totals.cpu_seconds,
            source_bytes=totals.source_bytes,
            sent_bytes=totals.sent_bytes,
            outcome=outcome,
            reason=reason,
        )

    def _left(self) -> None:
        self._num_working -= 1
        if not self._num_working:
            self.changed.notify_all()


@dataclass
class _Ended:
    """An ended job; its meter has the seconds."""

    moment: float
    meter: JobUsageMeter
    outcome: str
    reason: str
    totals: JobTotals


@dataclass(eq=False)
class JobAccounting:
    """Usage of the running jobs and of the last ended ones; thread-safe.

    Args:
        max_ended: number of ended jobs that are remembered.
        keep_seconds: time for which they are remembered.
        clock: monotonic seconds.
    """

    _: KW_ONLY
    max_ended: int = MAX_ENDED
    keep_seconds: float = KEEP_SECONDS
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._queries = WaitQueue(
            QueueLimits(waiting=MAX_WAITING_QUERIES),
            _too_many_queries,
            changed=self._changed,
        )
        self._running: dict[str, JobUsageMeter] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()

    def begin(
        self, job_id: str, request: JobRequest, digest: str | None
    ) -> JobUsageMeter:
        """Returns the meter of a job that starts."""
        meter = JobUsageMeter(request, digest, self._changed)
        with self._changed:
            self._running[job_id] = meter
        return meter

    def end(
        self, job_id: str, outcome: str, reason: str, totals: JobTotals
    ) -> None:
        """Records the end of a job.

        Args:
            job_id: the job.
            outcome: one of ``hapi_protocol.job_messages.OUTCOMES``.
            reason: an error code, or empty.
            totals: the job's totals.
        """
        with self._changed:
            meter = self._running.pop(job_id)
            self._ended[job_id] = _Ended(
                self.clock(), meter, outcome, reason, totals
            )
            self._forget()
            self._changed.notify_all()

    def find(self, job_id: str, seconds: float = WAIT_SECONDS) -> Usage:
        """Returns the usage record of a job; waits for its end.

        Raises:
            NotFoundError: the job has not started or is forgotten.
            TooSlowError: the job did not end in ``seconds``.
            UnavailableError: too many queries wait already.
        """
        with self._changed:
            self._forget()
            if not self._is_known(job_id):
                raise _unknown(job_id)
            if not self._queries.wait(
                lambda waiter: self._is_settled(job_id), seconds
            ):
                raise TooSlowError(
                    "too_slow",
                    f"job {job_id[:64]} did not end in {seconds:g} s",
                    retry_after=RETRY_SECONDS,
                )
            ended = self._ended.get(job_id)
            if ended is None:
                raise _unknown(job_id)
            return ended.meter.usage(ended.outcome, ended.reason, ended.totals)

    def _is_known(self, job_id: str) -> bool:
        return job_id in self._running or job_id in self._ended

    def _is_settled(self, job_id: str) -> bool:
        if job_id in self._running:
            return False
        ended = self._ended.get(job_id)
        return ended is None or ended.meter.is_idle

    def _forget(self) -> None:
        oldest = self.clock() - self.keep_seconds
        while self._ended and (
            len(self._ended) > self.max_ended
            or next(iter(self._ended.values())).moment <= oldest
        ):
            self._ended.popitem(last=False)


def _too_many_queries(account: str) -> UnavailableError:
    return UnavailableError(
        "queue_full",
        f"the job has not ended, and {MAX_WAITING_QUERIES} requests wait for "
        "the usage of jobs already",
        retry_after=RETRY_SECONDS,
    )


def _unknown(job_id: str) -> NotFoundError:
    return NotFoundError(
        "not_found",
        f"the usage of job {job_id[:64]!r} is unknown: the job never started, "
        f"or ended more than {KEEP_SECONDS:g} s or {MAX_ENDED} jobs ago",
    )
