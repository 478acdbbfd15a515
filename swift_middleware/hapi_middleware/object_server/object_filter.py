"""The paste filter of object servers: answers the verb ``HAPI``.

It belongs directly left of ``object-server``.  All other requests pass
unchanged.  A request is refused before the object is opened and before the
worker is asked, unless a proxy with the cluster's key has signed it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from swift.common.swob import Response, wsgi_to_str
from swift.common.utils import get_logger

from hapi_middleware.concurrency import Task, Timeout
from hapi_middleware.config import ObjectFilterConfig
from hapi_middleware.metrics import FilterMetrics, StreamReporter
from hapi_middleware.object_server.framed_answer import FramedAnswer, Send
from hapi_middleware.object_server.local_object import (
    LocalObject,
    LocalObjects,
    NotHereError,
    Wanted,
    read_whole,
)
from hapi_middleware.object_server.worker_watch import WorkerWatch
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.subrequests import ObjectBody
from hapi_middleware.shared_table import shared_table
from hapi_middleware.worker.feature_stream import JobBody
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_protocol.backend import (
    BACKEND_VERSION,
    HEADER_MESSAGE_BYTES,
    HEADER_SIGNATURE,
    HEADER_VERSION,
    METHOD,
    STEP_BYTES,
    STEP_FIND,
    STEP_JOB,
    STEP_MODEL,
    STEP_OBJECTS,
    STEP_PROFILE,
    STEP_STATUS,
    STEP_USAGE,
    STEPS,
    JobId,
    JobOrder,
    ModelFacts,
    ModelOrder,
    ObjectsOrder,
    StreamStart,
)
from hapi_protocol.errors import HapiError, UnavailableError
from hapi_protocol.frames import Kind
from hapi_protocol.job_messages import (
    JobGrant,
    JobRequest,
    ProfileRequest,
    Usage,
)
from hapi_protocol.json_messages import MAX_MESSAGE_BYTES
from hapi_protocol.printable import printable
from hapi_protocol.signatures import (
    SignedRequest,
    Verifier,
    address_text,
    read_keys,
)

READ_BYTES = 256 * 1024
USAGE_TIMEOUT_SECONDS = 1.0
PING_SECONDS = 2.0
"""Longest answer of a worker to a ping: with ``beat_seconds`` less than the
proxy's ``object_silence_seconds``."""
SEEN_BUCKETS = 1 << 17
"""Room for a million signatures, of 25 MB: those of a minute at 5,000 requests
per second take a third of it."""
AUDIT_BUCKETS = 64
AUDIT_SECONDS = 600.0
"""Shortest time between two reads of one object to find its damage."""
_PREFIX = "hapi_object"

StartResponse = Callable[..., Any]


class RequestBytes:
    """The bytes after a request's message; iterated once.

    Args:
        stream: ``wsgi.input``, of which the message has been read.

    Raises:
        UnavailableError: while iterating, if they break off.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        try:
            while chunk := self._stream.read(READ_BYTES):
                yield chunk
        except (OSError, ValueError) as error:
            # eventlet's ChunkReadError is a ValueError.
            raise _broken_off(repr(error)) from error

    def close(self) -> None:
        """Does nothing: the server reads or drops the rest."""


def _broken_off(reason: str) -> UnavailableError:
    return UnavailableError(
        "service_unavailable", f"the proxy's bytes break off: {reason}"
    )


class ObjectMiddleware:
    """The WSGI filter.  It holds configuration and no state of a request.

    Args:
        app: the object server.
        config: options of the filter.
        verifier: checks signatures.
        logger: Swift's logger, with statsd.
    """

    def __init__(
        self,
        app: Any,
        config: ObjectFilterConfig,
        verifier: Verifier,
        logger: Any,
    ) -> None:
        self.app = app
        self._config = config
        self._verifier = verifier
        self._logger = logger
        self._metrics = FilterMetrics(logger, _PREFIX)
        self._watch = WorkerWatch(self._metrics, logger)
        self._auditing = False
        self._audits = shared_table("audits", AUDIT_BUCKETS)
        self._worker = WorkerClient(
            config.worker_socket,
            config.worker_connect_timeout,
            config.worker_timeout,
        )

    def __call__(self, env: Env, start_response: StartResponse) -> Any:
        if env["REQUEST_METHOD"] != METHOD:
            return self.app(env, start_response)
        self._logger.txn_id = env.get("HTTP_X_TRANS_ID")
        return self._answer(env)(env, start_response)

    def _answer(self, env: Env) -> Response:
        version = _header(env, HEADER_VERSION)
        if version != str(BACKEND_VERSION):
            return self._refuse(
                env,
                400,
                f"version {version!r:.20} of the protocol between filters; "
                f"this host has {BACKEND_VERSION}: install one release",
            )
        message = self._message(env)
        if message is None:
            return self._refuse(env, 400, "it has no message")
        request = SignedRequest.received(
            wsgi_to_str(env["PATH_INFO"]),
            lambda name: _header(env, name),
            message,
        )
        problem = self._verifier.problem(
            request,
            _header(env, HEADER_SIGNATURE),
            _address(env),
        )
        if problem is not None:
            return self._refuse(env, 403, problem)
        if request.step not in STEPS:
            return self._refuse(env, 400, f"step {request.step!r:.20}")
        try:
            work = self._work(env, request.step, message)
        except NotHereError as error:
            self._metrics.count("not_here")
            self._logger.debug("hapi_object: %s", error)
            return Response(status=error.status)
        except HapiError as error:
            return self._refuse(env, 400, str(error))
        # Each frame is sent at once.
        env["eventlet.minimum_write_chunk_size"] = 0
        answer = FramedAnswer(
            work,
            self._config.beat_seconds,
            self._logger,
            ping=lambda: self._worker.ping(PING_SECONDS),
            failed=partial(self._watch.failed, _address(env), request.step),
        )
        return Response(
            status=200,
            headers={"Content-Type": "application/octet-stream"},
            app_iter=answer,
        )

    def _message(self, env: Env) -> bytes | None:
        length = _header(env, HEADER_MESSAGE_BYTES)
        if not (length.isascii() and length.isdigit() and len(length) < 6):
            return None
        if not 0 < int(length) <= MAX_MESSAGE_BYTES:
            return None
        try:
            message = env["wsgi.input"].read(int(length))
        except (OSError, ValueError):
            return None
        return message if len(message) == int(length) else None

    def _refuse(self, env: Env, status: int, reason: str) -> Response:
        self._metrics.count("refused")
        self._logger.warning(
            "hapi_object: refused a request of %s: %s",
            env.get("REMOTE_ADDR", "an unknown host"),
            printable(reason),
        )
        return Response(status=status, body=reason.encode())

    def _work(
        self, env: Env, step: str, message: bytes
    ) -> Callable[[Send], None]:
        """The function that answers a step.

        Raises:
            NotHereError: the step reads an object that is not here.
            HapiError: the message is damaged.
        """
        trans_id = env.get("HTTP_X_TRANS_ID", "")
        if step in (STEP_JOB, STEP_BYTES, STEP_OBJECTS):
            job, body = self._job(env, step, message)
            return lambda send: self._compute(env, job, body, send)
        if step == STEP_PROFILE:
            request = ProfileRequest.from_body(message)
            return lambda send: send(
                Kind.ANSWER, self._worker.get_profile(request).to_body()
            )
        if step == STEP_STATUS:
            return lambda send: send(
                Kind.ANSWER, self._worker.get_status(trans_id).to_body()
            )
        if step == STEP_USAGE:
            job_id = JobId.from_body(message).job_id
            return lambda send: send(
                Kind.ANSWER,
                self._worker.get_usage(
                    job_id, trans_id, self._config.worker_timeout
                ).to_body(),
            )
        model = ModelOrder.from_body(message).model
        if step == STEP_FIND:
            return lambda send: send(
                Kind.ANSWER,
                ModelFacts(self._worker.find_model(model, trans_id)).to_body(),
            )
        assert step == STEP_MODEL

        def store(send: Send) -> None:
            self._metrics.count("models")
            send(Kind.READY, b"")
            package = ObjectBody(
                RequestBytes(env["wsgi.input"]),
                model.length_bytes,
                model.path,
                # The proxy has signed it.
                model.etag,
            )
            self._worker.put_model(model, package, trans_id)
            send(Kind.ANSWER, b"")

        return store

    def _job(
        self, env: Env, step: str, message: bytes
    ) -> tuple[JobRequest, JobBody]:
        """A job and its bytes; raises as :meth:`_work`."""
        if step == STEP_OBJECTS:
            many = ObjectsOrder.from_body(message)
            return many.job, LocalObjects(self.app, env, many)
        order = JobOrder.from_body(message)
        if step == STEP_BYTES:
            return order.job, RequestBytes(env["wsgi.input"])
        wanted = Wanted.by_job(env, order)
        return order.job, LocalObject(self.app, env, wanted)

    def _compute(
        self, env: Env, job: JobRequest, body: JobBody, send: Send
    ) -> None:
        self._metrics.count("jobs")
        started = time.monotonic()
        try:
            if isinstance(body, LocalObjects):
                body.open()
            grant = self._worker.create_job(job)
            self._watch.works(_address(env))
            send(Kind.READY, grant.to_body())
        except BaseException:
            body.close()
            raise
        failure: HapiError | None = None
        try:
            self._send_features(job, grant, body, send)
        except HapiError as error:
            failure = error
        usage = self._usage(grant.job_id, job.trans_id)
        self._log(job, usage, time.monotonic() - started)
        if usage is not None:
            send(Kind.USAGE, usage.to_body())
        if failure is not None:
            if failure.code == "source_damaged" and job.ranged:
                self._begin_audit(env)
            raise failure

    def _begin_audit(self, env: Env) -> None:
        """Reads a damaged object to its end, so that the object server puts
        it aside; one object at a time.

        A job that reads a part never comes to the end.
        """

        def audit() -> None:
            try:
                read_whole(self.app, env)
            except (Exception, Timeout):
                self._logger.exception("hapi_object: a damaged object")
            finally:
                self._auditing = False

        # A client's own checksums may be wrong, and an object may be large.
        now = time.monotonic()
        if not self._auditing and self._audits.put_new(
            env["PATH_INFO"], now + AUDIT_SECONDS, now
        ):
            self._auditing = True
            Task(audit)

    def _send_features(
        self, job: JobRequest, grant: JobGrant, body: JobBody, send: Send
    ) -> None:
        reporter = StreamReporter(job.source_name, self._logger, _PREFIX)
        stream = self._worker.open_stream(grant, body, job.trans_id, reporter)
        try:
            start = StreamStart(stream.content_type, stream.worker)
            send(Kind.ANSWER, start.to_body())
            for data in stream:
                send(Kind.DATA, data)
        finally:
            stream.close()

    def _usage(self, job_id: str, trans_id: str) -> Usage | None:
        try:
            return self._worker.get_usage(
                job_id, trans_id, USAGE_TIMEOUT_SECONDS
            )
        except HapiError as error:
            self._logger.debug(
                "hapi_object: a job's usage is unknown: %s", error
            )
            return None

    def _log(
        self, job: JobRequest, usage: Usage | None, seconds: float
    ) -> None:
        facts = {} if usage is None else vars(usage)
        shown = ("samples", "errors", "outcome", "source_bytes", "sent_bytes")
        self._logger.info(
            "hapi_object: %s in %.3f s: %s (txn: %s)",
            printable(job.source_name),
            seconds,
            json.dumps({key: facts.get(key) for key in shown}),
            job.trans_id,
        )


def _address(env: Env) -> str:
    """Address at which a request has arrived, as proxies sign it."""
    return address_text(env["SERVER_NAME"], env["SERVER_PORT"])


def _header(env: Env, name: str) -> str:
    return str(env.get("HTTP_" + name.upper().replace("-", "_"), ""))


def filter_factory(
    global_conf: Mapping[str, str], **local_conf: str
) -> Callable[[Any], ObjectMiddleware]:
    """Paste's entry point (``use = egg:swift-hapi#hapi_object``).

    Raises:
        ValueError: an unknown option, a bad value or a bad key; from the
            returned factory: a wrong position in the pipeline.
    """
    config = ObjectFilterConfig.from_conf(global_conf, local_conf)
    keys = read_keys(Path(config.backend_key_file))
    logger = get_logger({**global_conf, **local_conf}, log_route=_PREFIX)

    def factory(app: Any) -> ObjectMiddleware:
        if getattr(app, "app", None) is not None:
            raise ValueError(
                "[filter:hapi_object] must be the last filter, directly left "
                f"of object-server; {type(app).__name__} is right of it"
            )
        is_new = shared_table("seen", SEEN_BUCKETS).put_new
        verifier = Verifier(keys, time.time, is_new, config.addresses)
        return ObjectMiddleware(app, config, verifier, logger)

    return factory
