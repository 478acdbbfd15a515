"""The exchange with the worker: HTTP/1.1 over its unix socket.

Each request has a connection of its own: that costs 0.1 ms and leaves
nothing behind in a proxy that forks, reloads and outlives its workers.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from hapi_middleware.concurrency import Task, connect_unix
from hapi_middleware.metrics import (
    OUTCOME_BROKEN,
    OUTCOME_DONE,
    OUTCOME_GONE,
    StreamEnd,
    StreamWatch,
)
from hapi_middleware.objects import ObjectBody
from hapi_protocol.errors import (
    MAX_BODY_BYTES,
    AnnotationError,
    HapiError,
    InternalError,
    TooSlowError,
    UnavailableError,
    error_from_body,
)
from hapi_protocol.messages import (
    HEADER_IDENTITY,
    JobGrant,
    JobRequest,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.profiles import MAX_PROFILE_BYTES, ModelProfile

READ_BYTES = 256 * 1024
RETRY_SECONDS = 2.0

_MEANT_FOR_US = (401, 403, 404, 405)
"""Statuses between worker and filter that would mislead a client."""


class SourceBody(Protocol):
    """What a job is sent: chunks that are not empty, once.

    Raises:
        HapiError: while iterating, when it cannot be had to its end.
    """

    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ModelInfo:
    """What a worker knows of a model it has hashed."""

    digest: str
    num_cuts: int
    numerics_tag: str


class WorkerClient:
    """One host's worker, as a request of the proxy sees it.

    Args:
        socket_path: the worker's unix socket.
        connect_timeout: seconds for a connection.
        timeout: seconds for each further step.

    Raises:
        UnavailableError: from all methods, ``worker_unavailable``: nobody
            listens, or the worker ended in the middle.
        TooSlowError: from all methods, ``too_slow``.
        HapiError: from all methods, what the worker itself answered.
    """

    def __init__(
        self, socket_path: str, connect_timeout: float, timeout: float
    ) -> None:
        self._socket_path = socket_path
        self._connect_timeout = connect_timeout
        self._timeout = timeout

    def create_job(self, job: JobRequest) -> JobGrant:
        """Ask for a job; ``model_needed`` is raised as a ConflictError."""
        with self._exchange(job.trans_id) as connection:
            _send_head(
                connection, "POST", "/jobs", job.trans_id, job.to_body()
            )
            body = _read_answer(connection.getresponse(), 201)
        return JobGrant.from_body(body)

    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """What is known of a model, or None; asks for no upload."""
        with self._exchange(trans_id) as connection:
            _send_head(
                connection,
                "GET",
                "/models",
                trans_id,
                headers={HEADER_IDENTITY: identity.to_json()},
            )
            answer = connection.getresponse()
            if answer.status == 404:
                answer.close()
                return None
            body = _read_answer(answer, 200)
        return _model_info(body)

    def put_model(
        self, identity: ModelIdentity, body: ObjectBody, trans_id: str
    ) -> None:
        """Hand over a package; the worker hashes the bytes itself."""
        with self._exchange(trans_id) as connection:
            _send_head(
                connection,
                "PUT",
                "/models",
                trans_id,
                headers={
                    HEADER_IDENTITY: identity.to_json(),
                    "Content-Length": str(body.length_bytes),
                },
            )
            _send_chunks(connection, body)
            _read_answer(connection.getresponse(), 201)

    def get_profile(self, request: ProfileRequest) -> ModelProfile:
        """The model's profile; ``model_needed`` is a ConflictError."""
        with self._exchange(request.trans_id) as connection:
            _send_head(
                connection,
                "POST",
                "/profiles",
                request.trans_id,
                request.to_body(),
            )
            body = _read_answer(
                connection.getresponse(), 200, MAX_PROFILE_BYTES
            )
        try:
            return ModelProfile.from_body(body)
        except AnnotationError as error:
            raise InternalError(
                "internal", f"the worker's answer: {error.message}"
            ) from error

    def open_stream(
        self,
        grant: JobGrant,
        body: SourceBody,
        trans_id: str,
        watch: StreamWatch,
    ) -> FeatureStream:
        """Send the source and return the features once they begin to come.

        The stream owns ``body`` from here on, whether this returns or not.

        Args:
            watch: is told of the stream's life.
        """
        try:
            with self._exchange(trans_id) as connection:
                _send_head(
                    connection,
                    "POST",
                    _job_path(grant.job_id),
                    trans_id,
                    headers={"Transfer-Encoding": "chunked"},
                )
                # The stream takes the socket over; the exchange's end then
                # closes nothing.
                sock, connection.sock = connection.sock, None
        except BaseException:
            body.close()
            raise
        stream = FeatureStream(sock, body, watch)
        stream.begin()
        return stream

    def get_usage(self, job_id: str, trans_id: str, seconds: float) -> Usage:
        """What a job has used that was sent, or is ending.

        Args:
            seconds: for each step; less than those of other requests.
        """
        with self._exchange(trans_id, seconds) as connection:
            _send_head(connection, "GET", _job_path(job_id), trans_id)
            body = _read_answer(connection.getresponse(), 200)
        return Usage.from_body(body)

    @contextmanager
    def _exchange(
        self, trans_id: str, seconds: float | None = None
    ) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("hapi-worker")
        connection.sock = self._connect(trans_id, seconds or self._timeout)
        try:
            with _named_failures("answer", trans_id):
                yield connection
        finally:
            connection.close()

    def _connect(self, trans_id: str, seconds: float) -> Any:
        patience = min(self._connect_timeout, seconds)
        try:
            sock = connect_unix(self._socket_path, patience)
        except OSError as error:
            raise UnavailableError(
                "worker_unavailable",
                f"the worker of this host takes no connection ({error}): is "
                "hapi-worker running?",
                trans_id=trans_id,
                retry_after=RETRY_SECONDS,
            ) from error
        sock.settimeout(seconds)
        return sock


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
            with _named_failures("begin its answer", None):
                self._answer.begin()
                if self._answer.status != 200:
                    _read_answer(self._answer, 200)
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
            with _named_failures("go on with its answer", None):
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


def _job_path(job_id: str) -> str:
    return f"/jobs/{quote(job_id, safe='')}"


def _send_head(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    trans_id: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> None:
    connection.putrequest(method, path, skip_accept_encoding=True)
    connection.putheader("Connection", "close")
    if trans_id:
        connection.putheader("X-Trans-Id", trans_id)
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    if body is not None:
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)


def _send_chunks(
    connection: http.client.HTTPConnection, chunks: Iterable[bytes]
) -> None:
    for chunk in chunks:
        try:
            connection.send(chunk)
        except TimeoutError:
            raise
        except OSError:
            # It has refused the rest; its answer says why.
            return


def _read_answer(
    answer: http.client.HTTPResponse,
    expected: int,
    max_bytes: int = MAX_BODY_BYTES,
) -> bytes:
    with answer:
        body = answer.read(max_bytes + 1)
        if answer.status == expected:
            return body
    error = error_from_body(
        answer.status, body, retry_after=_retry_after(answer)
    )
    if answer.status in _MEANT_FOR_US or answer.status < 400:
        raise UnavailableError(
            "worker_unavailable",
            f"the worker answers {answer.status}: {error.message}",
            retry_after=RETRY_SECONDS,
        )
    raise error


def _retry_after(answer: http.client.HTTPResponse) -> float | None:
    value = answer.getheader("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        return None


def _model_info(body: bytes) -> ModelInfo:
    try:
        fields = json.loads(body)
        return ModelInfo(
            digest=str(fields["digest"]),
            num_cuts=int(fields["num_cuts"]),
            numerics_tag=str(fields["numerics_tag"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InternalError(
            "internal", f"the worker's answer on a model: {error!r}"
        ) from error


@contextmanager
def _named_failures(step: str, trans_id: str | None) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TooSlowError(
            "too_slow",
            f"the worker did not {step} in time",
            trans_id=trans_id,
            retry_after=RETRY_SECONDS,
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(
            "worker_unavailable",
            f"the worker ended before it could {step}: {error!r}",
            trans_id=trans_id,
            retry_after=RETRY_SECONDS,
        ) from error
