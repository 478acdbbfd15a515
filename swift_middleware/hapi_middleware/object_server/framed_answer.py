"""The body of an answer: frames of a task, and beats while it is silent.

A beat says that the worker answers, not only this filter: else a worker that
hangs would keep the proxy from the next replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hapi_middleware.concurrency import Empty, LightQueue, Task, Timeout
from hapi_protocol.errors import HapiError, InternalError
from hapi_protocol.frames import Kind, error_payload, frame

Send = Callable[[Kind, bytes], None]

MAX_SILENT_PINGS = 3
"""Pings in a row that a worker may miss after its first frame: a busy host is
slow, and another replica would start at the beginning."""


@dataclass(eq=False)
class FramedAnswer:
    """Iterates over the frames that a task sends.

    The first frame is a beat, with which the proxy gets the status at once.

    Args:
        work: called in a green thread with a function that sends a frame,
            and waits until it is taken; an error becomes an ``ERROR`` frame.
        beat_seconds: silence after which a beat is sent.
        logger: Swift's.
        ping: raises an error if the worker does not answer.
        failed: told each error that is sent.
    """

    work: Callable[[Send], None]
    beat_seconds: float
    logger: Any
    ping: Callable[[], None]
    failed: Callable[[HapiError], None]

    def __post_init__(self) -> None:
        self._missed_pings = 0
        self._has_frames = False
        self._thread_locals = self.logger.thread_locals
        self._queue = LightQueue(1)
        self._has_begun = False
        self._has_ended = False
        self._task: Task | None = Task(self._run)

    def __iter__(self) -> FramedAnswer:
        return self

    def __next__(self) -> bytes:
        if self._has_ended:
            self.close()
            raise StopIteration
        if not self._has_begun:
            self._has_begun = True
            return frame(Kind.BEAT)
        try:
            kind, payload = self._queue.get(timeout=self.beat_seconds)
        except Empty:
            return self._beat()
        self._has_frames = True
        self._has_ended = kind in (Kind.ERROR, Kind.END)
        return frame(kind, payload)

    def _beat(self) -> bytes:
        try:
            self.ping()
        except HapiError as error:
            self._missed_pings += 1
            if self._has_frames and self._missed_pings < MAX_SILENT_PINGS:
                return frame(Kind.BEAT)
            self._has_ended = True
            self.failed(error)
            return frame(Kind.ERROR, error_payload(error))
        self._missed_pings = 0
        return frame(Kind.BEAT)

    def close(self) -> None:
        """Ends the task if it runs.  Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _run(self) -> None:
        self.logger.thread_locals = self._thread_locals
        try:
            self.work(self._send)
            self._send(Kind.END, b"")
        except HapiError as error:
            self.failed(error)
            self._send(Kind.ERROR, error_payload(error))
        except (Exception, Timeout):
            self.logger.exception("hapi_object: unexpected failure")
            failure = InternalError(
                "internal", "the filter failed; see the object server's log"
            )
            self._send(Kind.ERROR, error_payload(failure))

    def _send(self, kind: Kind, payload: bytes) -> None:
        self._queue.put((kind, payload))
