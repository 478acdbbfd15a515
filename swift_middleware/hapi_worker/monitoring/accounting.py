"""What each job has used, for the bill: however it ended, sent or not.

A job's seconds are taken where they are spent, on the threads that decode and
compute, and not from what was sent: a reader that leaves has had its work
done all the same.  Work may outlast its job by the micro-batch on the device,
so that a job's usage is told once its last piece of work has ended.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hapi_protocol.errors import RightsError, TooSlowError, UnavailableError
from hapi_protocol.job_messages import JobRequest, Usage

MAX_ENDED = 1024
"""Jobs that have ended and are remembered."""
KEEP_SECONDS = 60.0
WAIT_SECONDS = 2.0
"""Longest wait of a question for a job that is still ending."""
MAX_QUESTIONS = 8
"""Questions that wait at a time; each holds a thread of the server."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Sent:
    """What a job's reader was sent, and what the job itself has counted.

    Attributes:
        cpu_seconds: of the job's own threads, pools apart.
    """

    samples: int = 0
    errors: int = 0
    sent_bytes: int = 0
    source_bytes: int = 0
    cpu_seconds: float = 0.0


class Meter:
    """One job's seconds on the pools; thread-safe.

    Args:
        request: the job's.
        digest: of its model; None for an index.
        changed: guards the numbers; notified when no work is left.
    """

    def __init__(
        self,
        request: JobRequest,
        digest: str | None,
        changed: threading.Condition,
    ) -> None:
        self._request = request
        self._digest = digest
        self._changed = changed
        self._num_working = 0
        self._device_seconds = 0.0
        self._decode_seconds = 0.0
        self._cpu_seconds = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no thread works for the job now."""
        return not self._num_working

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """What runs inside is decoding for this job."""
        with self._changed:
            self._num_working += 1
        started, cpu = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            with self._changed:
                self._decode_seconds += time.monotonic() - started
                self._cpu_seconds += time.thread_time() - cpu
                self._left()

    def pass_begun(self) -> None:
        """The job takes part in a pass; :meth:`pass_ended` will follow."""
        with self._changed:
            self._num_working += 1

    def pass_ended(self, device_seconds: float, cpu_seconds: float) -> None:
        """What the job's part of the pass took."""
        with self._changed:
            self._device_seconds += device_seconds
            self._cpu_seconds += cpu_seconds
            self._left()

    def usage(self, outcome: str, reason: str, sent: Sent) -> Usage:
        """All of it."""
        request = self._request
        return Usage(
            kind=request.kind,
            charged_account=request.charged_account,
            model_digest=self._digest,
            cut=request.cut,
            encoding=request.encoding,
            samples=sent.samples,
            errors=sent.errors,
            device_seconds=self._device_seconds,
            decode_seconds=self._decode_seconds,
            cpu_seconds=self._cpu_seconds + sent.cpu_seconds,
            source_bytes=sent.source_bytes,
            sent_bytes=sent.sent_bytes,
            outcome=outcome,
            reason=reason,
        )

    def _left(self) -> None:
        self._num_working -= 1
        if not self._num_working:
            self._changed.notify_all()


@dataclass
class _Ended:
    """How a job ended; its seconds stay with the meter."""

    moment: float
    meter: Meter
    outcome: str
    reason: str
    sent: Sent


class JobAccounting:
    """The jobs that run, and the last that ended; thread-safe.

    Args:
        max_ended: jobs remembered after their end.
        keep_seconds: for which they are.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_ended: int = MAX_ENDED,
        keep_seconds: float = KEEP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_ended = max_ended
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._running: dict[str, Meter] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._num_waiting = 0

    def begin(
        self, job_id: str, request: JobRequest, digest: str | None
    ) -> Meter:
        """The meter of a job that starts."""
        meter = Meter(request, digest, self._changed)
        with self._changed:
            self._running[job_id] = meter
        return meter

    def end(self, job_id: str, outcome: str, reason: str, sent: Sent) -> None:
        """A job ended, by one of ``hapi_protocol.job_messages.OUTCOMES``."""
        with self._changed:
            meter = self._running.pop(job_id)
            self._ended[job_id] = _Ended(
                self._clock(), meter, outcome, reason, sent
            )
            self._forget()
            self._changed.notify_all()

    def find(self, job_id: str, seconds: float = WAIT_SECONDS) -> Usage:
        """What a job used; waits for one that runs or is ending.

        Raises:
            RightsError: ``not_found``, for a job that has not begun or is
                forgotten.
            TooSlowError: it did not end in ``seconds``.
            UnavailableError: too many wait already.
        """
        with self._changed:
            self._forget()
            if not self._is_known(job_id):
                raise _unknown(job_id)
            if not self._is_settled(job_id):
                self._await(job_id, seconds)
            ended = self._ended.get(job_id)
            if ended is None:
                raise _unknown(job_id)
            return ended.meter.usage(ended.outcome, ended.reason, ended.sent)

    def _await(self, job_id: str, seconds: float) -> None:
        if self._num_waiting >= MAX_QUESTIONS:
            raise UnavailableError(
                "queue_full",
                f"job {job_id[:64]} has not ended, and {MAX_QUESTIONS} wait "
                "for the usage of others already",
                retry_after=RETRY_SECONDS,
            )
        self._num_waiting += 1
        try:
            settled = self._changed.wait_for(
                lambda: self._is_settled(job_id), seconds
            )
        finally:
            self._num_waiting -= 1
        if not settled:
            raise TooSlowError(
                "too_slow",
                f"job {job_id[:64]} did not end in {seconds:g} s",
                retry_after=RETRY_SECONDS,
            )

    def _is_known(self, job_id: str) -> bool:
        return job_id in self._running or job_id in self._ended

    def _is_settled(self, job_id: str) -> bool:
        if job_id in self._running:
            return False
        ended = self._ended.get(job_id)
        return ended is None or ended.meter.is_idle

    def _forget(self) -> None:
        oldest = self._clock() - self._keep_seconds
        while self._ended and (
            len(self._ended) > self._max_ended
            or next(iter(self._ended.values())).moment <= oldest
        ):
            self._ended.popitem(last=False)


def _unknown(job_id: str) -> RightsError:
    return RightsError(
        "not_found",
        f"no usage of a job {job_id[:64]!r} is known: it never started, or "
        f"ended more than {KEEP_SECONDS:g} s or {MAX_ENDED} jobs ago",
    )
