"""The exchange with the worker: HTTP/1.1 over its unix socket.

Each request has a connection of its own: that costs 0.1 ms and leaves
nothing behind in a proxy that forks, reloads and outlives its workers.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hapi_middleware.concurrency import connect_unix
from hapi_middleware.metrics import StreamWatch
from hapi_middleware.requests.subrequests import ObjectBody
from hapi_middleware.worker.feature_stream import FeatureStream, SourceBody
from hapi_middleware.worker.worker_errors import (
    RETRY_SECONDS,
    named_failures,
    read_answer,
)
from hapi_protocol.errors import (
    AnnotationError,
    InternalError,
    UnavailableError,
)
from hapi_protocol.job_messages import (
    HEADER_IDENTITY,
    JobGrant,
    JobRequest,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.profiles import MAX_PROFILE_BYTES, ModelProfile


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
            body = read_answer(connection.getresponse(), 201)
        with _own_answers("job"):
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
            body = read_answer(answer, 200)
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
            read_answer(connection.getresponse(), 201)

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
            body = read_answer(
                connection.getresponse(), 200, MAX_PROFILE_BYTES
            )
        with _own_answers("profile"):
            return ModelProfile.from_body(body)

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
            body = read_answer(connection.getresponse(), 200)
        with _own_answers("usage"):
            return Usage.from_body(body)

    @contextmanager
    def _exchange(
        self, trans_id: str, seconds: float | None = None
    ) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("hapi-worker")
        connection.sock = self._connect(trans_id, seconds or self._timeout)
        try:
            with named_failures("answer", trans_id):
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


@contextmanager
def _own_answers(subject: str) -> Iterator[None]:
    """A wrong answer of the worker is no fault of the request."""
    try:
        yield
    except AnnotationError as error:
        raise InternalError(
            "internal", f"the worker's answer on a {subject}: {error.message}"
        ) from error


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
