"""A job's stream: the source to the worker, and features from it."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from hapi_middleware.concurrency import Task
from hapi_middleware.metrics import (
    OUTCOME_BROKEN,
    OUTCOME_DONE,
    OUTCOME_GONE,
    StreamEnd,
    StreamWatch,
)
from hapi_middleware.worker.worker_errors import named_failures, read_answer
from hapi_protocol.errors import HapiError, InternalError, TooSlowError

READ_BYTES = 256 * 1024


class SourceBody(Protocol):
    """What a job is sent: chunks that are not empty, once.

    Raises:
        HapiError: while iterating, when it cannot be had to its end.
    """

    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class FeatureStream:
    """Source bytes to the worker, feature bytes from it, both at once.

    A green thread sends the source while the caller of this iterator reads
    the features; whichever ends first ends the other.  The iterator ends
    cleanly only where the worker's answer did: else it raises, and the WSGI
    server breaks the client's connection.
    """

    def __init__(
        self, sock: Any, body: SourceBody, watch: StreamWatch
    ) -> None:
        self._sock = sock
        self._body = body
        self._watch = watch
        self._answer = http.client.HTTPResponse(sock, method="POST")
        self._failure: HapiError | None = None
        self._first = b""
        self._has_begun = False
        self._closed = False
        self._outcome = OUTCOME_GONE
        self._error: HapiError | None = None
        self._source_bytes = 0
        self._sent_bytes = 0
        self._sender = Task(self._send)

    def begin(self) -> None:
        """Wait for the worker's status and the first bytes of its answer.

        Raises:
            HapiError: what the worker answered, or why it could not.
        """
        try:
            with named_failures("begin its answer", None):
                self._answer.begin()
                if self._answer.status != 200:
                    read_answer(self._answer, 200)
                if not self._answer.chunked:
                    # Its end could not be told from a break.
                    raise InternalError(
                        "internal", "the worker's answer is not chunked"
                    )
                self._first = self._answer.read1(READ_BYTES)
                if not self._first:
                    raise InternalError(
                        "internal", "the worker's answer is empty"
                    )
        except HapiError as error:
            self.close()
            if self._failure:
                # The worker only complains of what we did not send.
                raise self._failure from error
            raise
        except BaseException:
            self.close()
            raise
        self._has_begun = True
        self._watch.begun()

    def __iter__(self) -> FeatureStream:
        return self

    def __next__(self) -> bytes:
        data, self._first = self._first, b""
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
        """Of the worker's answer, once it has begun."""
        return self._answer.getheader("Content-Type", "")

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, broken or been closed."""
        return self._closed

    def close(self) -> None:
        """End both directions and free all they hold.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._first = b""
        with ExitStack() as closing:
            closing.callback(self._tell_end)
            closing.callback(self._body.close)
            closing.callback(self._sock.close)
            closing.callback(self._answer.close)
            # This one runs first: a green thread that waits for a socket
            # must not see it closed, since its number is soon another's.
            closing.callback(self._sender.cancel)

    def _tell_end(self) -> None:
        if self._has_begun:
            end = StreamEnd(
                self._outcome,
                self._error,
                self._source_bytes,
                self._sent_bytes,
            )
            self._watch.ended(end)

    def _read(self) -> bytes:
        try:
            with named_failures("go on with its answer", None):
                data = self._answer.read1(READ_BYTES)
        except HapiError as error:
            raise self.broken(self._failure or error) from None
        except BaseException:
            self.close()
            raise
        if not data and self._failure:
            raise self.broken(self._failure)
        return data

    def broken(self, error: HapiError) -> HapiError:
        """Ends it as one that broke off, by that error."""
        self._outcome = OUTCOME_BROKEN
        self._error = error
        self.close()
        return error

    def _send(self) -> None:
        self._watch.sending()
        try:
            for chunk in self._body:
                self._sock.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self._source_bytes += len(chunk)
            self._sock.sendall(b"0\r\n\r\n")
        except TimeoutError as error:
            self._stop_sending(
                TooSlowError("too_slow", f"the worker takes no bytes: {error}")
            )
        except OSError:
            # The worker has closed: it has answered, or it is gone.  The
            # reading side finds out which.
            return
        except HapiError as error:
            self._stop_sending(error)
        finally:
            self._body.close()

    def _stop_sending(self, failure: HapiError) -> None:
        self._failure = failure
        try:
            # No last chunk: to the worker the source is cut off.
            self._sock.shutdown(1)
        except OSError:
            return
