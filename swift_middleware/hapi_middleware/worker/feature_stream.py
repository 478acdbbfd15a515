"""Streams of one job: source bytes to the worker, features from it."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from hapi_middleware.concurrency import Task
from hapi_middleware.metrics import (
    OUTCOME_BROKEN,
    OUTCOME_DONE,
    OUTCOME_GONE,
    StreamEnd,
    StreamReporter,
)
from hapi_middleware.worker.worker_errors import (
    read_answer,
    socket_errors_as_hapi_errors,
)
from hapi_protocol.errors import HapiError, InternalError, TooSlowError

READ_BYTES = 256 * 1024


class JobBody(Protocol):
    """The body of a job: chunks that are not empty, iterated once.

    Raises:
        HapiError: while iterating, if it cannot be read to its end.
    """

    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class WorkerStream(Protocol):
    """The features of a job; ends cleanly only if the worker's answer did."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __next__(self) -> bytes: ...

    @property
    def worker(self) -> str:
        """Opaque name of the worker."""

    @property
    def content_type(self) -> str:
        """Content type of the worker's answer."""

    @property
    def is_closed(self) -> bool:
        """True after the end, a failure or :meth:`close`."""

    def close(self) -> None:
        """Ends the job and frees its resources.  Idempotent."""

    def fail(self, error: HapiError) -> HapiError:
        """Ends the stream as broken by ``error``, and returns the error."""


@dataclass(eq=False)
class FeatureStream:
    """Sends source bytes to the worker while features are read from it.

    A green thread sends the source while the caller of this iterator reads
    the features; the first to end ends the other.  The iterator ends cleanly
    only if the worker's answer did: otherwise it raises, and the WSGI server
    breaks the client's connection.

    Args:
        sock: connected to the worker, the job's request head sent.
        body: the source; owned by the stream.
        reporter: reports the stream's start and end.
        worker: opaque name of the worker.
        reason_of: finds out why the worker has closed the connection.

    Attributes:
        worker: as given.
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
        self._closed = False
        self._outcome = OUTCOME_GONE
        self._error: HapiError | None = None
        self._source_bytes = 0
        self._sent_bytes = 0
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
        self._has_started = True
        self.reporter.started()

    def __iter__(self) -> FeatureStream:
        return self

    def __next__(self) -> bytes:
        data, self._first_chunk = self._first_chunk, b""
        if not data and not self._closed:
            data = self._read()
        if data:
            self._sent_bytes += len(data)
            return data
        self._outcome = OUTCOME_DONE
        self.close()
        raise StopIteration

    @property
    def content_type(self) -> str:
        """Content type of the worker's answer, once it has started."""
        return self._answer.getheader("Content-Type", "")

    @property
    def is_closed(self) -> bool:
        """True after the end, a failure or :meth:`close`."""
        return self._closed

    def close(self) -> None:
        """Ends both directions and frees their resources.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._first_chunk = b""
        with ExitStack() as closing:
            closing.callback(self._report_end)
            closing.callback(self.body.close)
            closing.callback(self.sock.close)
            closing.callback(self._answer.close)
            # Runs first: a green thread that waits for a socket must not see
            # it closed, because its descriptor is soon reused.
            closing.callback(self._sender.cancel)

    def _report_end(self) -> None:
        if self._has_started:
            end = StreamEnd(
                self._outcome,
                self._error,
                self._source_bytes,
                self._sent_bytes,
            )
            self.reporter.ended(end)

    def _read(self) -> bytes:
        try:
            with socket_errors_as_hapi_errors("go on with its answer", None):
                data = self._answer.read1(READ_BYTES)
        except HapiError as error:
            raise self.fail(self._send_error or self._cause(error)) from None
        except BaseException:
            self.close()
            raise
        if not data and self._send_error:
            raise self.fail(self._send_error)
        return data

    def _cause(self, error: HapiError) -> HapiError:
        is_broken = error.code == "worker_unavailable"
        return self.reason_of(error) if is_broken else error

    def fail(self, error: HapiError) -> HapiError:
        """Ends the stream as broken by ``error``, and returns the error."""
        self._outcome = OUTCOME_BROKEN
        self._error = error
        self.close()
        return error

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
