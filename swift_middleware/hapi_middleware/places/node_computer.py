"""An object server as a place that computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hapi_middleware.concurrency import Timeout
from hapi_middleware.config import PLACE_OBJECT
from hapi_middleware.metrics import (
    OUTCOME_BROKEN,
    OUTCOME_DONE,
    OUTCOME_GONE,
    Metrics,
    StreamEnd,
    StreamReporter,
)
from hapi_middleware.places.computer import Granted, Work
from hapi_middleware.places.node_client import Node, NodeClient, NodeExchange
from hapi_middleware.requests.subrequests import ObjectBody, Package
from hapi_middleware.worker.feature_stream import WorkerStream
from hapi_middleware.worker.package_upload import PackageUploader
from hapi_protocol.backend import (
    STEP_BYTES,
    STEP_FIND,
    STEP_JOB,
    STEP_MODEL,
    STEP_PROFILE,
    STEP_USAGE,
    JobId,
    JobOrder,
    ModelFacts,
    ModelInfo,
    ModelOrder,
    StreamStart,
)
from hapi_protocol.errors import HapiError, TooSlowError
from hapi_protocol.frames import Kind
from hapi_protocol.job_messages import (
    JobGrant,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.profiles import ModelProfile


class NodeStream:
    """The features that an object server computes.

    Args:
        exchange: the job's exchange; owned by the stream.
        start: the answer's beginning.
        reporter: reports the stream's start and end.

    Attributes:
        content_type: content type of the worker's answer.
        worker: opaque name of the worker.
        is_closed: True after the end, a failure or :meth:`close`.
    """

    def __init__(
        self,
        exchange: NodeExchange,
        start: StreamStart,
        reporter: StreamReporter,
    ) -> None:
        self.content_type = start.content_type
        self.worker = start.worker
        self.is_closed = False
        self._exchange = exchange
        self._reporter = reporter
        self._outcome = OUTCOME_GONE
        self._error: HapiError | None = None
        self._sent_bytes = 0
        reporter.started()

    def __iter__(self) -> NodeStream:
        return self

    def __next__(self) -> bytes:
        if self.is_closed:
            raise StopIteration
        try:
            kind, data = self._exchange.next()
        except HapiError as error:
            raise self.fail(error) from None
        except BaseException:
            self.close()
            raise
        if kind is Kind.END:
            self._outcome = OUTCOME_DONE
            self.close()
            raise StopIteration
        self._sent_bytes += len(data)
        return data

    def close(self) -> None:
        """Ends the exchange, and with it the job.  Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._exchange.close()
        usage = self._exchange.usage
        self._reporter.ended(
            StreamEnd(
                self._outcome,
                self._error,
                usage.source_bytes if usage else 0,
                self._sent_bytes,
            )
        )

    def fail(self, error: HapiError) -> HapiError:
        """Ends the stream as broken by ``error``, and returns the error."""
        self._outcome = OUTCOME_BROKEN
        self._error = error
        self.close()
        return error


class NodeComputer:
    """The worker of an object server, behind its filter.

    Args:
        client: client of object servers.
        node: the object server, and the path that a job reads.
        reads_locally: the object server reads the object itself; otherwise
            its bytes are sent.
        metrics: metrics of the filter.

    Attributes:
        kind: ``object``.
    """

    def __init__(
        self,
        client: NodeClient,
        node: Node,
        reads_locally: bool,
        metrics: Metrics,
    ) -> None:
        self.kind = PLACE_OBJECT
        self._client = client
        self._node = node
        self._reads_locally = reads_locally
        self._metrics = metrics

    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """Facts about a model; None if the object server lacks it."""
        exchange = self._client.open(
            self._node, STEP_FIND, ModelOrder(identity), trans_id
        )
        try:
            body = exchange.expect(Kind.ANSWER)
            return exchange.read(ModelFacts, body).model
        finally:
            exchange.close()

    def put_model(
        self, identity: ModelIdentity, body: ObjectBody, trans_id: str
    ) -> None:
        """Uploads a package; the object server's worker hashes it."""
        exchange = self._client.open(
            self._node, STEP_MODEL, ModelOrder(identity), trans_id
        )
        try:
            exchange.expect(Kind.READY)
            exchange.send(body)
            exchange.expect(Kind.ANSWER)
        finally:
            exchange.close()

    def get_profile(
        self, request: ProfileRequest, package: Package
    ) -> tuple[ModelIdentity, ModelProfile]:
        """Profile of a package, as :meth:`.Computer.get_profile`."""

        def ask(identity: ModelIdentity) -> tuple[ModelIdentity, ModelProfile]:
            exchange = self._client.open(
                self._node,
                STEP_PROFILE,
                replace(request, model=identity),
                request.trans_id,
            )
            try:
                body = exchange.expect(Kind.ANSWER)
                return identity, exchange.read(ModelProfile, body)
            finally:
                exchange.close()

        return self._uploader(package, request.trans_id).ask(
            request.model, ask
        )

    def start(
        self, work: Work, is_answered: Callable[[Granted], bool]
    ) -> WorkerStream | None:
        """Starts a job, as :meth:`.Computer.start`."""

        def ask(model: ModelIdentity | None) -> WorkerStream | None:
            return self._start(
                replace(work, job=replace(work.job, model=model)), is_answered
            )

        if work.package is None or work.job.model is None:
            return ask(None)
        return self._uploader(work.package, work.job.trans_id).ask(
            work.job.model, ask
        )

    def _start(
        self, work: Work, is_answered: Callable[[Granted], bool]
    ) -> WorkerStream | None:
        job = work.job
        step = STEP_JOB if self._reads_locally else STEP_BYTES
        part = work.part if self._reads_locally else None
        exchange = self._client.open(
            self._node, step, JobOrder(job, part), job.trans_id
        )
        try:
            with self._metrics.timed("grant"):
                body = exchange.expect(Kind.READY)
            grant = exchange.read(JobGrant, body)

            def get_usage(timeout: float) -> Usage:
                return exchange.usage or self._ask_usage(
                    grant.job_id, job.trans_id, timeout
                )

            if is_answered(Granted(grant, get_usage)):
                exchange.close()
                return None
            if not self._reads_locally:
                exchange.send(work.open_source())
            start = exchange.read(StreamStart, exchange.expect(Kind.ANSWER))
        except BaseException:
            exchange.close()
            raise
        return NodeStream(exchange, start, work.reporter)

    def _ask_usage(self, job_id: str, trans_id: str, timeout: float) -> Usage:
        try:
            with Timeout(timeout):
                exchange = self._client.open(
                    self._node, STEP_USAGE, JobId(job_id), trans_id
                )
                try:
                    return exchange.read(Usage, exchange.expect(Kind.ANSWER))
                finally:
                    exchange.close()
        except Timeout as error:
            raise TooSlowError(
                "too_slow", f"the usage of a job is not known: {error}"
            ) from error

    def _uploader(self, package: Package, trans_id: str) -> PackageUploader:
        return PackageUploader(self, package, self._metrics, trans_id)
