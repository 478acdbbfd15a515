"""An object server as a place that computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

from hapi_middleware.concurrency import Timeout
from hapi_middleware.config import PLACE_OBJECT
from hapi_middleware.metrics import FilterMetrics, StreamReporter
from hapi_middleware.places.computer import (
    BUSY,
    ELSEWHERE,
    AuthorisedJob,
    Computer,
    Granted,
)
from hapi_middleware.places.node_client import NodeClient
from hapi_middleware.places.node_exchange import NodeExchange
from hapi_middleware.places.node_faults import (
    DEGRADED,
    Node,
    NodeError,
    is_degraded,
)
from hapi_middleware.requests.package import Package
from hapi_middleware.requests.stored_parts import StoredPart
from hapi_middleware.requests.subrequests import ObjectBody
from hapi_middleware.worker.feature_stream import WorkerStream
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
    ModelInfo,
    ModelOrder,
    ObjectsOrder,
    StatusQuery,
    StoredObject,
    StreamStart,
    WorkerStatus,
)
from hapi_protocol.errors import HapiError, TooSlowError
from hapi_protocol.frames import Kind
from hapi_protocol.job_messages import (
    JobGrant,
    JobRequest,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.json_messages import JsonMessage
from hapi_protocol.profiles import ModelProfile

M = TypeVar("M", bound=JsonMessage)


class NodeStream(WorkerStream):
    """The features that an object server computes.

    Args:
        exchange: the job's exchange; owned by the stream.
        start: the answer's beginning.
        reporter: reports the stream's start and end.
    """

    def __init__(
        self,
        exchange: NodeExchange,
        start: StreamStart,
        reporter: StreamReporter,
    ) -> None:
        self.content_type = start.content_type
        self.worker = start.worker
        self._exchange = exchange
        self._reporter = reporter
        reporter.started()

    def _next(self) -> bytes | None:
        kind, data = self._exchange.next()
        return None if kind is Kind.END else data

    def _end(self, outcome: str, error: HapiError | None) -> None:
        self._exchange.close()
        usage = self._exchange.usage
        source_bytes = usage.source_bytes if usage else 0
        self._reporter.ended(outcome, error, source_bytes, self.sent_bytes)


class NodeComputer(Computer):
    """The worker of an object server, behind its filter.

    Args:
        client: client of object servers.
        node: the object server, and the path of the requests to it.
        stored: bytes or objects that it has; None to send the bytes of jobs.
        metrics: metrics of the filter.
    """

    KIND = PLACE_OBJECT
    MAX_UPLOADS = 1

    def __init__(
        self,
        client: NodeClient,
        node: Node,
        stored: StoredPart | Sequence[StoredObject] | None,
        metrics: FilterMetrics,
    ) -> None:
        super().__init__(metrics)
        self._client = client
        self._node = node
        self._stored = stored
        self._has_refused = False

    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """Facts about a model, as :meth:`.Computer.find_model`."""
        order = ModelOrder(identity)
        return self._ask(STEP_FIND, order, trans_id, ModelFacts).model

    def get_status(self) -> WorkerStatus:
        """State of the object server's worker."""
        return self._ask(STEP_STATUS, StatusQuery(), "", WorkerStatus)

    def put_model(
        self, identity: ModelIdentity, body: ObjectBody, trans_id: str
    ) -> None:
        """Uploads a package; the object server's worker hashes it."""
        with self._open(STEP_MODEL, ModelOrder(identity), trans_id) as opened:
            try:
                opened.expect(Kind.READY)
                opened.send(body)
                opened.expect(Kind.ANSWER)
            finally:
                self._has_refused = opened.has_refused

    def start(
        self, work: AuthorisedJob, is_answered: Callable[[Granted], bool]
    ) -> WorkerStream | None:
        """Starts a job, as :meth:`.Computer.start`."""
        with self._giving(work.job.model):
            return self._with_model(
                work, lambda job: self._start(job, work, is_answered)
            )

    def get_profile(
        self, request: ProfileRequest, package: Package
    ) -> tuple[ModelIdentity, ModelProfile]:
        """Profile of a package, as :meth:`.Computer.get_profile`."""
        with self._giving(request.model):
            return super().get_profile(request, package)

    @contextmanager
    def _giving(self, model: ModelIdentity | None) -> Iterator[None]:
        """Brings a package once, and again only after a while if the worker
        does not take it."""
        if model is None:
            yield
            return
        table, name = self._client.table, f"{model.path} {model.etag}"
        fault = (*self._node.address, "model", name)
        if table.is_left_out(*fault):
            raise NodeError("does not take the model", model.path, DEGRADED)
        try:
            yield
        except HapiError as error:
            is_kept = error.code not in ELSEWHERE or error.code in BUSY
            if is_degraded(error) or (self._has_refused and not is_kept):
                self._client.faults.noted_degraded(self._node, name, error)
                reason = error.message
                raise NodeError(
                    "does not take the model", reason, DEGRADED
                ) from error
            raise
        table.forgive(*fault)

    def _start(
        self,
        job: JobRequest,
        work: AuthorisedJob,
        is_answered: Callable[[Granted], bool],
    ) -> WorkerStream | None:
        with ExitStack() as stack:
            exchange = stack.enter_context(
                self._open(*self._order(job), job.trans_id)
            )
            with self._metrics.timed("grant"):
                body = exchange.expect(Kind.READY)
            grant = exchange.read(JobGrant, body)
            exchange.granted(grant)

            def get_usage(timeout: float) -> Usage:
                return exchange.usage or self._ask_usage(
                    grant.job_id, job.trans_id, timeout
                )

            if is_answered(Granted(grant, get_usage)):
                return None
            if self._stored is None:
                exchange.send(work.open_source())
            start = exchange.read(StreamStart, exchange.expect(Kind.ANSWER))
            stack.pop_all()
        return NodeStream(exchange, start, work.reporter)

    def _order(self, job: JobRequest) -> tuple[str, JsonMessage]:
        """The step of a job, and its message."""
        stored = self._stored
        if stored is None:
            return STEP_BYTES, JobOrder(job)
        if isinstance(stored, StoredPart):
            return STEP_JOB, JobOrder(job, stored.etag, stored.part)
        return STEP_OBJECTS, ObjectsOrder(job, tuple(stored))

    def _profile(self, request: ProfileRequest) -> ModelProfile:
        return self._ask(STEP_PROFILE, request, request.trans_id, ModelProfile)

    def _ask_usage(self, job_id: str, trans_id: str, timeout: float) -> Usage:
        try:
            with Timeout(timeout):
                return self._ask(STEP_USAGE, JobId(job_id), trans_id, Usage)
        except Timeout as error:
            raise TooSlowError(
                "too_slow", f"the usage of a job is not known: {error}"
            ) from error

    def _ask(
        self, step: str, message: JsonMessage, trans_id: str, kind: type[M]
    ) -> M:
        """Answer of a step without bytes."""
        with self._open(step, message, trans_id) as exchange:
            return exchange.read(kind, exchange.expect(Kind.ANSWER))

    def _open(
        self, step: str, message: JsonMessage, trans_id: str
    ) -> closing[NodeExchange]:
        return closing(self._client.open(self._node, step, message, trans_id))
