"""Client of the worker: HTTP/1.1 over its unix socket.

Each request has its own connection.  That costs 0.1 ms and leaves no state in
a proxy that forks, reloads and outlives its workers.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from swift.common import utils

from hapi_middleware.concurrency import connect_unix
from hapi_middleware.config import WorkerOptions
from hapi_middleware.metrics import StreamReporter
from hapi_middleware.worker.feature_stream import FeatureStream, JobBody
from hapi_middleware.worker.worker_errors import (
    RETRY_SECONDS,
    read_answer,
    socket_errors_as_hapi_errors,
)
from hapi_protocol.backend import ModelInfo, WorkerStatus
from hapi_protocol.errors import (
    MAX_BODY_BYTES,
    AnnotationError,
    HapiError,
    InternalError,
    TooSlowError,
    UnavailableError,
    make_error,
)
from hapi_protocol.job_messages import (
    HEADER_IDENTITY,
    JobGrant,
    JobRequest,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.json_messages import parse_object, read_message_fields
from hapi_protocol.profiles import MAX_PROFILE_BYTES, ModelProfile

HANGS = "hangs"
"""Detail of an error: the worker does not answer at all."""
REASON_SECONDS = 1.0
"""Longest wait for the reason of a broken answer."""


@dataclass(eq=False)
class WorkerClient:
    """Client of the worker on this host.

    Args:
        options: socket of the worker, and timeouts.

    Raises:
        UnavailableError: from all methods, ``worker_unavailable``: nobody
            listens, or the worker ended during the exchange.
        TooSlowError: from all methods, ``too_slow``.
        HapiError: from all methods, the worker's own error.
    """

    options: WorkerOptions

    def create_job(self, job: JobRequest) -> JobGrant:
        """Requests a job; raises ConflictError for ``model_needed``."""
        message = job.to_body()
        body = self._ask("POST", "/jobs", job.trans_id, message, status=201)
        with _answer_errors("job"):
            return JobGrant.from_body(body)

    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """Facts about a model; None if the worker does not have it."""
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
        with _answer_errors("model"):
            fields = parse_object(body, "facts of a model")
            return read_message_fields(ModelInfo, fields, "facts of a model")

    def get_status(self, trans_id: str) -> WorkerStatus:
        """State of the worker, which tries to take a package."""
        body = self._ask("GET", "/healthz?test", trans_id)
        try:
            fields = json.loads(body)
            return WorkerStatus(
                worker=self._opaque_name(),
                state=str(fields["status"]),
                problem=str(fields.get("problem", "")),  # earlier releases
                release=str(fields["version"]),
                devices=tuple(
                    name for name, used in fields["devices"].items() if used
                ),
                jobs_running=int(fields["jobs_running"]),
                jobs_waiting=int(fields["jobs_waiting"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InternalError(
                "internal", f"the worker's answer on its state: {error!r}"
            ) from error

    def ping(self, seconds: float) -> None:
        """Asks the worker whether it goes on.

        Args:
            seconds: longest time for the answer.

        Raises:
            UnavailableError: it does not answer: it is stopped, or hangs.
        """
        try:
            with self._exchange("", seconds) as connection:
                _send_head(connection, "GET", "/healthz", "")
                connection.getresponse().read()
        except TooSlowError as error:
            raise UnavailableError(
                "worker_unavailable",
                "the worker of this host has not answered for "
                f"{seconds:g} s: it is stopped, or hangs; see hapi-worker's "
                "log, and restart it",
                retry_after=RETRY_SECONDS,
                details={HANGS: True},
            ) from error

    def put_model(
        self, identity: ModelIdentity, body: Iterable[bytes], trans_id: str
    ) -> None:
        """Uploads a package; the worker hashes the bytes itself."""
        with self._exchange(trans_id) as connection:
            _send_head(
                connection,
                "PUT",
                "/models",
                trans_id,
                headers={
                    HEADER_IDENTITY: identity.to_json(),
                    "Content-Length": str(identity.length_bytes),
                },
            )
            _send_chunks(connection, body)
            read_answer(connection.getresponse(), 201)

    def get_profile(self, request: ProfileRequest) -> ModelProfile:
        """Requests a profile; raises ConflictError for ``model_needed``."""
        body = self._ask(
            "POST",
            "/profiles",
            request.trans_id,
            request.to_body(),
            max_bytes=MAX_PROFILE_BYTES,
        )
        with _answer_errors("profile"):
            return ModelProfile.from_body(body)

    def open_stream(
        self,
        grant: JobGrant,
        body: JobBody,
        trans_id: str,
        reporter: StreamReporter,
    ) -> FeatureStream:
        """Starts a job's stream and waits for its first features.

        Args:
            grant: the job's grant.
            body: the source; closed by the stream, or if this raises.
            trans_id: transaction id of the client's request.
            reporter: reports the stream's start and end.
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
                # The stream takes over the socket, so that the exchange's
                # end does not close it.
                sock, connection.sock = connection.sock, None
        except BaseException:
            body.close()
            raise
        stream = FeatureStream(
            sock,
            body,
            reporter,
            self._opaque_name(),
            lambda error: self._reason(grant, trans_id, error),
        )
        stream.start()
        return stream

    def _reason(
        self, grant: JobGrant, trans_id: str, error: HapiError
    ) -> HapiError:
        """Why the worker broke off an answer that had begun; ``error`` if it
        does not say."""
        try:
            usage = self.get_usage(grant.job_id, trans_id, REASON_SECONDS)
        except HapiError:
            return error
        if not usage.reason:
            return error
        reason = make_error(
            usage.reason,
            f"the worker broke off its answer: {usage.reason}",
            trans_id=trans_id,
            retry_after=RETRY_SECONDS,
        )
        if reason.status >= 500:
            return reason
        # The text is in the worker's log alone.  Clients read the object
        # themselves after this error, and find out more.
        return UnavailableError(
            "service_unavailable",
            f"{reason.message}; read the object itself to see why",
            trans_id=trans_id,
            retry_after=RETRY_SECONDS,
        )

    def _opaque_name(self) -> str:
        """A name by which callers count workers, and learn nothing else."""
        place = f"{os.uname().nodename} {self.options.worker_socket}"
        secret = utils.HASH_PATH_PREFIX + utils.HASH_PATH_SUFFIX
        return hashlib.sha256(secret + place.encode()).hexdigest()[:12]

    def get_usage(self, job_id: str, trans_id: str, timeout: float) -> Usage:
        """The resource use of a job that has ended or is ending.

        Args:
            job_id: id from the job's grant.
            trans_id: transaction id of the client's request.
            timeout: timeout of each step, in seconds.
        """
        path = _job_path(job_id)
        body = self._ask("GET", path, trans_id, timeout=timeout)
        with _answer_errors("usage"):
            return Usage.from_body(body)

    def _ask(
        self,
        method: str,
        path: str,
        trans_id: str,
        message: bytes | None = None,
        *,
        status: int = 200,
        timeout: float | None = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> bytes:
        """Body of the answer, which must have the status."""
        with self._exchange(trans_id, timeout) as connection:
            _send_head(connection, method, path, trans_id, message)
            return read_answer(connection.getresponse(), status, max_bytes)

    @contextmanager
    def _exchange(
        self, trans_id: str, timeout: float | None = None
    ) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("hapi-worker")
        connection.sock = self._connect(
            trans_id, timeout or self.options.worker_timeout
        )
        try:
            with socket_errors_as_hapi_errors("answer", trans_id):
                yield connection
        finally:
            connection.close()

    def _connect(self, trans_id: str, timeout: float) -> Any:
        connect_timeout = min(self.options.worker_connect_timeout, timeout)
        try:
            sock = connect_unix(self.options.worker_socket, connect_timeout)
        except OSError as error:
            raise UnavailableError(
                "worker_unavailable",
                f"cannot connect to the worker of this host ({error}): is "
                "hapi-worker running?",
                trans_id=trans_id,
                retry_after=RETRY_SECONDS,
            ) from error
        sock.settimeout(timeout)
        return sock


@contextmanager
def _answer_errors(subject: str) -> Iterator[None]:
    """Turns a malformed answer of the worker into an internal error."""
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
            # The worker has refused the rest; its answer has the reason.
            return
