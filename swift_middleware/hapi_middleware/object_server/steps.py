"""The steps that the filter of an object server answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from hapi_middleware.concurrency import Task, Timeout
from hapi_middleware.config import ObjectFilterConfig
from hapi_middleware.metrics import FilterMetrics, StreamReporter
from hapi_middleware.object_server.framed_answer import Send
from hapi_middleware.object_server.local_object import (
    LocalObject,
    LocalObjects,
    Wanted,
    read_whole,
)
from hapi_middleware.object_server.worker_watch import WorkerWatch
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.subrequests import ObjectBody
from hapi_middleware.shared_table import shared_table
from hapi_middleware.worker.feature_stream import READ_BYTES, JobBody
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_protocol.backend import (
    STEP_BYTES,
    STEP_FIND,
    STEP_JOB,
    STEP_MODEL,
    STEP_OBJECTS,
    STEP_PROFILE,
    STEP_STATUS,
    STEP_USAGE,
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
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.json_messages import JsonMessage
from hapi_protocol.printable import printable
from hapi_protocol.signatures import address_text

PREFIX = "hapi_object"
"""First word of the filter's metrics and log lines."""
USAGE_TIMEOUT_SECONDS = 1.0
"""The job has ended, so that the worker knows its usage."""
AUDIT_BUCKETS = 64
"""Room for 512 objects: one is read at a time, and each is a damaged file."""
AUDIT_SECONDS = 600.0
"""Shortest time between two reads of one object to find its damage."""


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


@dataclass(eq=False)
class Steps:
    """Answers the requests of proxies that have been checked.

    Args:
        app: the object server.
        config: options of the filter.
        logger: Swift's logger, with statsd.
        metrics: metrics of the filter.
        worker: client of this host's worker.
        watch: notes what the worker answers.
    """

    app: Any
    config: ObjectFilterConfig
    logger: Any
    metrics: FilterMetrics
    worker: WorkerClient
    watch: WorkerWatch

    def __post_init__(self) -> None:
        self._auditing = False
        self._audits = shared_table("audits", AUDIT_BUCKETS)

    def work(
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
        if step == STEP_MODEL:
            model = ModelOrder.from_body(message).model
            return lambda send: self._store(env, model, trans_id, send)
        answer = self._answer(step, message, trans_id)
        return lambda send: send(Kind.ANSWER, answer().to_body())

    def _answer(
        self, step: str, message: bytes, trans_id: str
    ) -> Callable[[], JsonMessage]:
        """The function that makes the answer of a step without bytes."""
        worker = self.worker
        if step == STEP_PROFILE:
            request = ProfileRequest.from_body(message)
            return partial(worker.get_profile, request)
        if step == STEP_STATUS:
            return partial(worker.get_status, trans_id)
        if step == STEP_USAGE:
            job_id = JobId.from_body(message).job_id
            timeout = self.config.worker_timeout
            return partial(worker.get_usage, job_id, trans_id, timeout)
        assert step == STEP_FIND
        model = ModelOrder.from_body(message).model
        return lambda: ModelFacts(worker.find_model(model, trans_id))

    def _store(
        self, env: Env, model: ModelIdentity, trans_id: str, send: Send
    ) -> None:
        self.metrics.count("models")
        send(Kind.READY, b"")
        package = ObjectBody(
            RequestBytes(env["wsgi.input"]),
            model.length_bytes,
            model.path,
            # The proxy has signed it.
            model.etag,
        )
        self.worker.put_model(model, package, trans_id)
        send(Kind.ANSWER, b"")

    def _job(
        self, env: Env, step: str, message: bytes
    ) -> tuple[JobRequest, JobBody]:
        """A job and its bytes; raises as :meth:`work`."""
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
        self.metrics.count("jobs")
        started = time.monotonic()
        try:
            if isinstance(body, LocalObjects):
                body.open()
            grant = self.worker.create_job(job)
            self.watch.works(own_address(env))
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
                self.logger.exception("hapi_object: a damaged object")
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
        reporter = StreamReporter(job.source_name, self.logger, PREFIX)
        stream = self.worker.open_stream(grant, body, job.trans_id, reporter)
        try:
            start = StreamStart(stream.content_type, stream.worker)
            send(Kind.ANSWER, start.to_body())
            for data in stream:
                send(Kind.DATA, data)
        finally:
            stream.close()

    def _usage(self, job_id: str, trans_id: str) -> Usage | None:
        try:
            return self.worker.get_usage(
                job_id, trans_id, USAGE_TIMEOUT_SECONDS
            )
        except HapiError as error:
            self.logger.debug(
                "hapi_object: a job's usage is unknown: %s", error
            )
            return None

    def _log(
        self, job: JobRequest, usage: Usage | None, seconds: float
    ) -> None:
        facts = {} if usage is None else vars(usage)
        shown = ("samples", "errors", "outcome", "source_bytes", "sent_bytes")
        self.logger.info(
            "hapi_object: %s in %.3f s: %s (txn: %s)",
            printable(job.source_name),
            seconds,
            json.dumps({key: facts.get(key) for key in shown}),
            job.trans_id,
        )


def own_address(env: Env) -> str:
    """Address at which a request has arrived, as proxies sign it."""
    return address_text(env["SERVER_NAME"], env["SERVER_PORT"])
