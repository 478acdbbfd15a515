"""Streams of one job: source bytes to the worker, features from it."""

from __future__ import annotations

import http.client
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from hapi_middleware.concurrency import Task
from hapi_middleware.metrics import (
    OUTCOME_BROKEN,
    OUTCOME_DONE,
    OUTCOME_GONE,
    StreamReporter,
)
from hapi_middleware.worker.worker_errors import (
    read_answer,
    socket_errors_as_hapi_errors,
)
from hapi_protocol.errors import HapiError, InternalError, TooSlowError

READ_BYTES = 256 * 1024
"""Larger than the worker's pieces, so that one read takes what is there."""


class JobBody(Protocol):
    """The body of a job: chunks that are not empty, iterated once.

    Raises:
        HapiError: while iterating, if it cannot be read to its end.
    """

    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class WorkerStream(ABC):
    """The features of a job; ends cleanly only if the worker's answer did.

    Otherwise the iterator raises, and the WSGI server breaks the client's
    connection.

    Attributes:
        worker: opaque name of the worker.
        content_type: content type of the worker's answer.
        is_closed: True after the end, a failure or :meth:`close`.
        sent_bytes: bytes of features that were taken.
    """

    worker: str
    content_type: str
    is_closed = False
    sent_bytes = 0

    @abstractmethod
    def _next(self) -> bytes | None:
        """Returns the next features; None at a clean end."""

    @abstractmethod
    def _end(self, outcome: str, error: HapiError | None) -> None:
        """Frees resources and reports the end; called once."""

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            data = None if self.is_closed else self._next()
        except HapiError as error:
            raise self.fail(error) from None
        except BaseException:
            self.close()
            raise
        if data is None:
            self._close(OUTCOME_DONE)
            raise StopIteration
        self.sent_bytes += len(data)
        return data

    def close(self) -> None:
        """Ends the job and frees its resources.  Idempotent."""
        self._close(OUTCOME_GONE)

    def fail(self, error: HapiError) -> HapiError:
        """Ends the stream as broken by ``error``, and returns the error."""
        self._close(OUTCOME_BROKEN, error)
        return error

    def _close(self, outcome: str, error: HapiError | None = None) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._end(outcome, error)


@dataclass(eq=False)
class FeatureStream(WorkerStream):
    """Sends source bytes to the worker while features are read from it.

    A green thread sends the source while the caller of this iterator reads
    the features; the first to end ends the other.

    Args:
        sock: connected to the worker, the job's request head sent.
        body: the source; owned by the stream.
        reporter: reports the stream's start and end.
        worker: opaque name of the worker.
        reason_of: finds out why the worker has closed the connection.
    """

    sock: Any
    body: JobBody
    reporter: StreamReporter
    worker: str = ""
    reason_of: Callable[[HapiError], HapiError] = lambda error: error

    def __post_init__(self) -> None:
        self._answer = http.client.HTTPResponse(self.sock, method="POST")
        self._send_error: HapiError | None = None
        self._first_chunk = b""
        self._has_started = False
        self._source_bytes = 0
        self._sender = Task(self._send)

    def start(self) -> None:
        """Waits for the worker's status and the first bytes of its answer.

        Raises:
            HapiError: the worker's error, or the failure to reach it.
        """
        try:
            with socket_errors_as_hapi_errors("begin its answer", None):
                self._answer.begin()
                if self._answer.status != 200:
                    read_answer(self._answer, 200)
                if not self._answer.chunked:
                    # Without chunks a break looks like the end.
                    raise InternalError(
                        "internal", "the worker's answer is not chunked"
                    )
                self._first_chunk = self._answer.read1(READ_BYTES)
                if not self._first_chunk:
                    raise InternalError(
                        "internal", "the worker's answer is empty"
                    )
        except HapiError as error:
            self.close()
            if self._send_error:
                # The worker's error is a consequence of the missing source.
                raise self._send_error from error
            raise self._cause(error) from error
        except BaseException:
            self.close()
            raise
        self.content_type = self._answer.getheader("Content-Type", "")
        self._has_started = True
        self.reporter.started()

    def _next(self) -> bytes | None:
        data, self._first_chunk = self._first_chunk, b""
        if not data:
            try:
                with socket_errors_as_hapi_errors(
                    "go on with its answer", None
                ):
                    data = self._answer.read1(READ_BYTES)
            except HapiError as error:
                raise self._send_error or self._cause(error) from None
            if not data and self._send_error:
                raise self._send_error
        return data or None

    def _end(self, outcome: str, error: HapiError | None) -> None:
        self._first_chunk = b""
        with ExitStack() as closing:
            if self._has_started:
                sizes = self._source_bytes, self.sent_bytes
                report = self.reporter.ended
                closing.callback(report, outcome, error, *sizes)
            closing.callback(self.body.close)
            closing.callback(self.sock.close)
            closing.callback(self._answer.close)
            # Runs first: a green thread that waits for a socket must not see
            # it closed, because its descriptor is soon reused.
            closing.callback(self._sender.cancel)

    def _cause(self, error: HapiError) -> HapiError:
        is_broken = error.code == "worker_unavailable"
        return self.reason_of(error) if is_broken else error

    def _send(self) -> None:
        self.reporter.adopt_thread()
        try:
            for chunk in self.body:
                self.sock.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self._source_bytes += len(chunk)
            self.sock.sendall(b"0\r\n\r\n")
        except TimeoutError as error:
            self._stop_sending(
                TooSlowError("too_slow", f"the worker reads no bytes: {error}")
            )
        except OSError:
            # The worker has closed: it has answered or ended.  The reading
            # side finds out which.
            return
        except HapiError as error:
            self._stop_sending(error)
        finally:
            self.body.close()

    def _stop_sending(self, error: HapiError) -> None:
        self._send_error = error
        try:
            # Without a last chunk, the worker sees a truncated source.
            self.sock.shutdown(1)
        except OSError:
            return
