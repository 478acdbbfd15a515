"""The start of a granted job: from its body to the stream that answers it."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hapi_protocol.errors import AnnotationError, HapiError
from hapi_protocol.feature_stream import feature_schema, index_schema
from hapi_protocol.job_messages import (
    KIND_INDEX,
    OUTCOME_FAILED,
    OUTCOME_GONE,
)
from hapi_protocol.shards import Limits
from hapi_protocol.summary import WorkerLoad
from hapi_protocol.transforms import parse_transform
from hapi_splitter.numerics import batch_size
from hapi_worker.execution.coalescing import Group
from hapi_worker.execution.decode import LargeDecoder, decoder_of
from hapi_worker.execution.device_executor import PrefixCompute, executor_of
from hapi_worker.jobs.admission import Job
from hapi_worker.jobs.arrow_response import JobStream
from hapi_worker.jobs.chunked_body import ChunkedBody
from hapi_worker.jobs.pipeline import Pipeline
from hapi_worker.jobs.request_validation import medium_of
from hapi_worker.jobs.sample_queue import SampleQueue
from hapi_worker.jobs.sample_reader import (
    BodyStart,
    SampleReader,
    object_error,
    read_start,
)
from hapi_worker.models.device_models import Lease
from hapi_worker.monitoring.accounting import JobTotals, JobUsageMeter
from hapi_worker.peer import ClientDisconnectedError, PeerConnection
from hapi_worker.scheduling.fair_pool import FairPool

if TYPE_CHECKING:
    from hapi_worker.jobs.worker import Worker


@dataclass(eq=False)
class JobStart:
    """Starts the stream of one granted job.

    Args:
        worker: the worker, whose parts the job uses.
        job: the job.
        connection: connection of the request with the job's body.
    """

    worker: Worker
    job: Job
    connection: PeerConnection

    def __post_init__(self) -> None:
        length = self.job.request.source_length_bytes
        config = self.worker.config
        self._body = ChunkedBody(
            self.connection,
            length_bytes=config.max_object_bytes if length is None else length,
            idle_seconds=config.idle_seconds,
            is_upper_bound=length is None,
        )
        self._cleanup = ExitStack()

    def stream(self) -> JobStream:
        """Returns the stream at the first whole sample.

        Raises:
            HapiError: the object is unusable.
        """
        job, worker = self.job, self.worker
        job.abort = self._body.abort
        digest = job.lease.digest if job.lease else None
        meter = worker.accounting.begin(job.job_id, job.request, digest)
        try:
            pipeline = self._pipeline(meter)
            job.abort = pipeline.abort
            job.buffered = pipeline.buffered_bytes
            pipeline.start()
            stream = JobStream(
                job.request,
                pipeline,
                self._schema(),
                worker.metrics,
                self._load_report,
                self._end,
            )
            job.blocked_seconds = stream.blocked_seconds
            return stream
        except BaseException as error:
            gone = isinstance(error, ClientDisconnectedError)
            outcome = OUTCOME_GONE if gone else OUTCOME_FAILED
            reason = error.code if isinstance(error, HapiError) else ""
            kind = job.request.kind
            worker.metrics.jobs.labels(kind, outcome, reason).inc()
            totals = JobTotals(source_bytes=self._body.bytes_read)
            self._end(outcome, reason, totals)
            if gone:
                raise AnnotationError(
                    "bad_request", f"the job's body: {error}"
                ) from error
            raise

    def _schema(self) -> object:
        job = self.job
        if job.request.kind == KIND_INDEX or job.lease is None:
            return index_schema()
        return feature_schema(job.lease.shape, job.request.encoding)

    def _pipeline(self, meter: JobUsageMeter) -> Pipeline:
        config, job = self.worker.config, self.job
        start = read_start(self._body)
        reader = SampleReader(
            start,
            self._body,
            job.request,
            medium=medium_of(job.lease),
            limits=Limits(
                max_member_bytes=config.max_sample_bytes,
                max_sample_bytes=config.max_sample_bytes,
            ),
            max_samples=config.max_samples,
        )
        queue = SampleQueue(
            reader.samples(),
            self.connection,
            account=job.account,
            group=self._join_group(job.lease, start) if job.lease else None,
            decode_pool=self._decoding_pool(job.lease),
            large=self._large_decoder(job.lease) if job.lease else None,
            meter=meter,
            buffer_bytes=config.buffer_bytes,
            describe=str if job.request.num_objects is None else object_error,
        )
        encoding = job.request.encoding
        pipeline = Pipeline(queue, self._body, encoding, config.batch_seconds)
        self._cleanup.callback(pipeline.cancel)
        return pipeline

    def _join_group(self, lease: Lease, start: BodyStart) -> Group:
        worker, job = self.worker, self.job
        executor = executor_of(worker.executors, lease)
        if not executor.in_service:
            raise executor.failure()
        num_samples = start.num_samples(job.request)
        if num_samples is not None:
            num_samples = max(num_samples, job.request.span_samples)
        size = batch_size(
            lease.batch_limit(lease.device_models.largest_batch), num_samples
        )
        transform = job.request.transform

        def make() -> Group:
            compute = PrefixCompute(
                lease,
                executor,
                worker.quarantine,
                worker.metrics.out_of_memory.inc,
                decoder_of(
                    lease.frozen,
                    max_pixels=worker.config.max_pixels,
                    formats=worker.config.image_formats,
                    training=parse_transform(transform),
                ),
            )
            return Group(
                job.account,
                compute,
                executor.pool,
                size,
                on_pass=worker.metrics.batch_samples.observe,
            )

        prefix = executor.name, lease.digest, lease.cut_dtype
        key = job.account, prefix, size, transform
        group = worker.groups.join(key, make)
        self._cleanup.callback(worker.groups.leave, key)
        return group

    def _decoding_pool(self, lease: Lease | None) -> FairPool:
        worker = self.worker
        if worker.decode_pool is not None:
            return worker.decode_pool
        # An index job decodes nothing.
        executors = worker.executors
        executor = executor_of(executors, lease) if lease else executors[0]
        return executor.pool

    def _large_decoder(self, lease: Lease) -> LargeDecoder:
        models = lease.device_models
        return LargeDecoder(
            self.worker.large_pool,
            self.worker.fork_server,
            self.worker.config.decode_seconds,
            # memory_limit is a GPU's own memory, and decoding takes the
            # host's.
            models.working_memory.decoding
            if models.device.type == "cpu"
            else lambda num_bytes: nullcontext(),
        )

    def _load_report(self) -> WorkerLoad:
        admission, account = self.worker.admission, self.job.account
        return self.worker.load_meter.report(
            account,
            admission.num_running(account)
            + admission.queue.waiting_by_account()[account],
        )

    def _end(self, outcome: str, reason: str, totals: JobTotals) -> None:
        worker, job = self.worker, self.job
        with ExitStack() as last:
            last.callback(worker.admission.end, job)
            # Accounting ends first: the next job sees the usage record.
            last.callback(
                worker.accounting.end, job.job_id, outcome, reason, totals
            )
            self._cleanup.close()
