"""The worker's HTTP interface, a WSGI application.

``POST /jobs``, ``POST /jobs/<id>``, ``GET /jobs/<id>``, ``PUT /models``,
``GET /models``, ``POST /profiles``, ``GET /healthz`` (``?test`` tries a
package first), ``GET /metrics``, ``GET /status``.  Every refusal is an error
of :mod:`hapi_protocol.errors` as JSON; every response repeats ``X-Trans-Id``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from webob import Request, Response

from hapi_protocol.errors import (
    AnnotationError,
    HapiError,
    InternalError,
    MethodError,
    NotFoundError,
    RightsError,
)
from hapi_protocol.job_messages import (
    HEADER_IDENTITY,
    JobRequest,
    ModelIdentity,
    ProfileRequest,
)
from hapi_protocol.json_messages import MAX_MESSAGE_BYTES
from hapi_worker.jobs.request_validation import check_package
from hapi_worker.jobs.worker import MAX_UPLOADS, MAX_WAITING_UPLOADS, Worker
from hapi_worker.models.registry import KnownModel
from hapi_worker.models.uploads import too_busy_error
from hapi_worker.monitoring.metrics import CONTENT_TYPE as METRICS_CONTENT_TYPE
from hapi_worker.peer import PeerConnection
from hapi_worker.server.status import health_of, status_of
from hapi_worker.wait_queue import QueueLimits, WaitQueue

ENVIRON_CONNECTION = "hapi_worker.connection"
"""WSGI key of the :class:`PeerConnection` of a request with chunked body."""
ENVIRON_IS_DISCONNECTED = "hapi_worker.is_disconnected"
"""WSGI key of a function that returns True if the caller disconnected."""
ENVIRON_BROKEN_BODY = "hapi_worker.broken_body"
"""WSGI key that makes the server close the connection with the body unread."""
ENVIRON_PEER_UID = "X_REMOTE_UID"

READ_BYTES = 1024 * 1024
"""Packages are large; each read leaves Python's lock to the other threads."""
UPLOAD_LIMITS = QueueLimits(MAX_UPLOADS, MAX_UPLOADS - 1, MAX_WAITING_UPLOADS)
"""A package can take minutes to validate: no account may hold all slots."""
UPLOAD_WAIT_SECONDS = 20.0
"""Longest wait of an upload for its slot; Swift holds the package open."""
LASTING_STATUSES = (409, 413, 422)
"""Statuses of refusals that depend on the package's bytes only."""

logger = logging.getLogger(__name__)

StartResponse = Callable[..., Any]
Handler = Callable[[Any], Any]
"""A function from WebOb request to response."""


@dataclass(eq=False)
class WorkerApp:
    """The application of the main socket.

    Args:
        worker: the worker.
        admin_only: answer only health, metrics and status.
    """

    worker: Worker
    _: KW_ONLY
    admin_only: bool = False

    def __post_init__(self) -> None:
        self._uploads = WaitQueue(UPLOAD_LIMITS, self._too_many_uploads)
        self._allowed_uids = {
            0,
            os.getuid(),
            *self.worker.config.allowed_users,
        }

    def __call__(
        self, environ: dict[str, Any], start_response: StartResponse
    ) -> Iterable[bytes]:
        request = Request(environ)
        trans_id = request.headers.get("X-Trans-Id", "")
        try:
            with self._counted():
                self._check_peer(environ)
                handler = self._handler(request)
            response = handler(request)
        except HapiError as error:
            response = _error_response(error, trans_id)
        except Exception:
            logger.exception(
                "a defect: %s %s (%s)", request.method, request.path, trans_id
            )
            self.worker.metrics.refusals.labels("internal").inc()
            response = _error_response(
                InternalError("internal", "the worker failed; see its log"),
                trans_id,
            )
        if trans_id:
            response.headers["X-Trans-Id"] = trans_id
        body: Iterable[bytes] = response(environ, start_response)
        return body

    def _check_peer(self, environ: dict[str, Any]) -> None:
        uid = environ.get(ENVIRON_PEER_UID)
        if uid is None or int(uid) not in self._allowed_uids:
            raise RightsError(
                "forbidden",
                f"user id {uid} may not use this worker: add it to the "
                "option allowed_users",
            )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts refusals that no job, upload or profile is counted for."""
        try:
            yield
        except HapiError as error:
            self.worker.metrics.refusals.labels(error.code).inc()
            raise

    def _handler(self, request: Any) -> Handler:
        path = request.path
        if path == "/healthz":
            return self._route(request, GET=self._health)
        if path == "/metrics":
            return self._route(request, GET=self._metrics)
        if path == "/status":
            return self._route(request, GET=self._status)
        if not self.admin_only:
            if path == "/jobs":
                return self._route(request, POST=self._grant)
            if path == "/profiles":
                return self._route(request, POST=self._profile)
            if path == "/models":
                return self._route(request, GET=self._model, PUT=self._put)
            if path.startswith("/jobs/"):
                return self._route(request, POST=self._stream, GET=self._usage)
        raise NotFoundError("not_found", f"there is no path {path[:100]!r}")

    def _route(self, request: Any, **methods: Handler) -> Handler:
        method = methods.get(request.method)
        if method is None:
            raise MethodError(
                "method_not_allowed",
                f"{request.method} {request.path[:100]}: allowed are "
                f"{', '.join(sorted(methods))}",
            )
        return method

    def _health(self, request: Any) -> Any:
        if "test" in request.GET:
            self.worker.self_test.run()
        return _json_response(200, health_of(self.worker))

    def _status(self, request: Any) -> Any:
        uid = int(request.environ[ENVIRON_PEER_UID])
        trusted = uid in (0, os.getuid())
        return _json_response(200, status_of(self.worker, with_names=trusted))

    def _metrics(self, request: Any) -> Any:
        return Response(
            body=self.worker.metrics.render(),
            headerlist=[("Content-Type", METRICS_CONTENT_TYPE)],
        )

    def _grant(self, request: Any) -> Any:
        with self._counted():
            body = _read_body(request, MAX_MESSAGE_BYTES)
            grant = self.worker.grant(
                JobRequest.from_body(bytes(body)),
                request.environ[ENVIRON_IS_DISCONNECTED],
            )
        return _json_body(201, grant.to_body())

    def _profile(self, request: Any) -> Any:
        with self._counted():
            body = _read_body(request, MAX_MESSAGE_BYTES)
            profile_request = ProfileRequest.from_body(bytes(body))
        profile = self.worker.profiling.profile(profile_request)
        return _json_body(200, profile.to_body())

    def _stream(self, request: Any) -> Any:
        with self._counted():
            connection = _connection(request)
        try:
            stream = self.worker.stream(_job_id(request), connection)
        except RightsError as error:  # no job is counted for it
            self.worker.metrics.refusals.labels(error.code).inc()
            raise
        return Response(
            app_iter=stream,
            headerlist=[
                ("Content-Type", stream.content_type),
                ("Connection", "close"),
            ],
        )

    def _usage(self, request: Any) -> Any:
        usage = self.worker.accounting.find(_job_id(request))
        return _json_body(200, usage.to_body())

    def _model(self, request: Any) -> Any:
        with self._counted():
            identity = _identity(request)
        known = self.worker.models.known(identity)
        if known is None:
            raise NotFoundError(
                "not_found",
                f"the model {identity.path} is not known to this worker",
                object_name=identity.path,
            )
        return _json_response(
            200,
            {
                "digest": known.digest,
                "num_cuts": known.num_cuts,
                "numerics_tag": self.worker.numerics_tag,
            },
        )

    def _put(self, request: Any) -> Any:
        uploads = self.worker.metrics.uploads
        try:
            known = self._upload(request, _identity(request))
        except HapiError as error:
            uploads.labels("refused", error.code).inc()
            raise
        uploads.labels("done", "").inc()
        return _json_response(
            201, {"digest": known.digest, "num_cuts": known.num_cuts}
        )

    def _upload(self, request: Any, identity: ModelIdentity) -> KnownModel:
        models = self.worker.models
        models.uploads.check(identity)
        lasting: HapiError | None = None
        try:
            self._check_upload(request, identity)
            account = models.begin_upload(identity)
            is_disconnected = request.environ[ENVIRON_IS_DISCONNECTED]
            self._uploads.take(account, UPLOAD_WAIT_SECONDS, is_disconnected)
            try:
                limit = self.worker.config.max_package_bytes
                package = _read_body(request, limit)
                return models.put(identity, package)
            finally:
                self._uploads.leave(account)
        except HapiError as error:
            lasting = error if error.status in LASTING_STATUSES else None
            if error.code == "worker_unavailable":
                self.worker.self_test.begin()
            raise
        finally:
            models.end_upload(identity, lasting)

    def _too_many_uploads(self, account: str) -> HapiError:
        return too_busy_error(
            "queue_full",
            f"{self._uploads.taken.total()} models are being uploaded, and "
            f"{self._uploads.num_waiting()} wait for that; an account may "
            f"upload {UPLOAD_LIMITS.per_account} at a time",
        )

    def _check_upload(self, request: Any, identity: ModelIdentity) -> None:
        check_package(identity, self.worker.config)
        self.worker.models.check_length(identity)
        if request.content_length != identity.length_bytes:
            raise AnnotationError(
                "bad_request",
                f"Content-Length is {request.content_length}, and "
                f"{HEADER_IDENTITY} says {identity.length_bytes}",
            )


def _job_id(request: Any) -> str:
    return str(request.path.removeprefix("/jobs/"))


def _connection(request: Any) -> PeerConnection:
    connection = request.environ.get(ENVIRON_CONNECTION)
    if not isinstance(connection, PeerConnection):
        raise AnnotationError(
            "bad_request", "the body of a job must be chunked"
        )
    return connection


def _identity(request: Any) -> ModelIdentity:
    return ModelIdentity.from_json(request.headers.get(HEADER_IDENTITY, ""))


def _read_body(request: Any, limit: int) -> bytearray:
    length = request.content_length
    if length is None or length > limit:
        raise AnnotationError(
            "bad_request",
            f"Content-Length is {length}; it must be at most {limit}",
        )
    body = bytearray()
    stream = request.environ["wsgi.input"]
    while len(body) < length:
        try:
            piece = stream.read(min(READ_BYTES, length - len(body)))
        except OSError as error:
            request.environ[ENVIRON_BROKEN_BODY] = True
            raise AnnotationError(
                "bad_request", f"the body could not be read: {error}"
            ) from error
        if not piece:
            raise AnnotationError(
                "bad_request",
                f"the body ends after {len(body)} of {length} bytes",
            )
        body += piece
    return body


def _json_response(status: int, fields: dict[str, Any]) -> Any:
    return _json_body(status, json.dumps(fields).encode() + b"\n")


def _json_body(status: int, body: bytes) -> Any:
    return Response(
        status=status,
        body=body,
        headerlist=[("Content-Type", "application/json")],
    )


def _error_response(error: HapiError, trans_id: str) -> Any:
    error.trans_id = error.trans_id or trans_id or None
    response = _json_body(error.status, error.to_body())
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    return response
