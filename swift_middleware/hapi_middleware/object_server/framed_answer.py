"""The body of an answer: frames of a task, and beats while it is silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hapi_middleware.concurrency import Empty, LightQueue, Task, Timeout
from hapi_protocol.errors import HapiError, InternalError
from hapi_protocol.frames import Kind, error_payload, frame

Send = Callable[[Kind, bytes], None]


class FramedAnswer:
    """Iterates over the frames that a task sends.

    The first frame is a beat, with which the proxy gets the status at once.

    Args:
        work: called in a green thread with a function that sends a frame,
            and waits until it is taken; an error becomes an ``ERROR`` frame.
        beat_seconds: silence after which a beat is sent.
        logger: Swift's.
    """

    def __init__(
        self, work: Callable[[Send], None], beat_seconds: float, logger: Any
    ) -> None:
        self._work = work
        self._beat_seconds = beat_seconds
        self._logger = logger
        self._thread_locals = logger.thread_locals
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
            kind, payload = self._queue.get(timeout=self._beat_seconds)
        except Empty:
            return frame(Kind.BEAT)
        self._has_ended = kind in (Kind.ERROR, Kind.END)
        return frame(kind, payload)

    def close(self) -> None:
        """Ends the task if it runs.  Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _run(self) -> None:
        self._logger.thread_locals = self._thread_locals
        try:
            self._work(self._send)
            self._send(Kind.END, b"")
        except HapiError as error:
            self._send(Kind.ERROR, error_payload(error))
        except (Exception, Timeout):
            self._logger.exception("hapi_object: unexpected failure")
            failure = InternalError(
                "internal", "the filter failed; see the object server's log"
            )
            self._send(Kind.ERROR, error_payload(failure))

    def _send(self, kind: Kind, payload: bytes) -> None:
        self._queue.put((kind, payload))
