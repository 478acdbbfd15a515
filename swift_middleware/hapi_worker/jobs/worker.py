"""The worker without its sockets: its parts and the life of a job."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial

import torch

from hapi_protocol.errors import AnnotationError, HapiError
from hapi_protocol.feature_stream import feature_schema, index_schema
from hapi_protocol.job_messages import (
    KIND_INDEX,
    OUTCOME_FAILED,
    OUTCOME_GONE,
    JobGrant,
    JobRequest,
)
from hapi_protocol.shards import Limits
from hapi_protocol.summary import WorkerLoad
from hapi_protocol.transforms import parse_transform
from hapi_splitter.fork_server import ForkServer
from hapi_splitter.host_limits import allowed_cores
from hapi_splitter.numerics import enforce_exact, numerics_tag
from hapi_splitter.profiling.profiler import DEFAULT_BATCHES
from hapi_worker.config import WorkerConfig
from hapi_worker.execution.coalescing import Group, Groups
from hapi_worker.execution.decode import LargeDecoder, decoder_of
from hapi_worker.execution.device_executor import (
    Executor,
    PrefixCompute,
    executor_of,
)
from hapi_worker.execution.devices import (
    DevicePlan,
    allocated_bytes,
    plan_devices,
)
from hapi_worker.execution.quarantine import ModelQuarantine
from hapi_worker.jobs.admission import Admission, Job
from hapi_worker.jobs.arrow_response import JobStream
from hapi_worker.jobs.chunked_body import ChunkedBody
from hapi_worker.jobs.pipeline import Pipeline, PipelineLimits
from hapi_worker.jobs.profile_job import MAX_WAITING, Profiling
from hapi_worker.jobs.request_validation import (
    check_package,
    check_request,
    check_transform,
    medium_of,
)
from hapi_worker.jobs.sample_reader import (
    BodyStart,
    object_error,
    read_samples,
    read_start,
)
from hapi_worker.models.device_models import DeviceModels, Lease
from hapi_worker.models.memory_queue import MemoryQueue
from hapi_worker.models.package_loader import PackageLoad, load_fast
from hapi_worker.models.registry import Models
from hapi_worker.models.self_test import SelfTest
from hapi_worker.monitoring.accounting import (
    MAX_WAITING_QUERIES,
    JobAccounting,
    JobTotals,
    JobUsageMeter,
)
from hapi_worker.monitoring.load_meter import LoadMeter
from hapi_worker.monitoring.metrics import Metrics
from hapi_worker.peer import (
    ClientDisconnectedError,
    IsDisconnected,
    PeerConnection,
    always_connected,
    client_disconnected_error,
)
from hapi_worker.scheduling.batch_size import batch_size
from hapi_worker.scheduling.fair_pool import FairPool
from hapi_worker.scheduling.fair_queue import Ledger
from hapi_worker.wait_queue import QueueLimits

MAX_UPLOADS = 2
"""Packages that are received or loaded at a time."""
MAX_WAITING_UPLOADS = 8
"""Packages that wait to be received."""
HANGING_FACTOR = 5.0
"""A pass on a GPU hangs if it takes this many times the larger of
``pass_seconds`` and ``profile_seconds``."""
WAITING_PER_STREAM = 2
"""Requests that may wait, for each stream that may run."""


class Worker:
    """The parts of one worker process, without its sockets.

    Args:
        config: the operator's options.
        load: makes a model from package bytes.
        fork_server: forks the processes that decode large images.
        out_of_service: called when the last device has failed.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        load: PackageLoad,
        fork_server: ForkServer | None = None,
        out_of_service: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._out_of_service = out_of_service
        enforce_exact()
        torch.set_num_threads(config.torch_threads)
        self.cores = allowed_cores()
        self.ledger = Ledger(dict(config.account_weights))
        self.metrics = Metrics()
        self.accounting = JobAccounting()
        self.groups = Groups()
        self.quarantine = ModelQuarantine(config.pass_seconds)
        plans = plan_devices(config, self.cores)
        kind = plans[0].device.type
        self.numerics_tag = numerics_tag(kind)
        self.load_meter = LoadMeter(
            cores=self.cores,
            num_devices=sum(plan.forwards for plan in plans),
            weight=self.ledger.weight,
        )
        queue = MemoryQueue()
        self.executors = [self._executor(plan, queue) for plan in plans]
        self.decode_pool = self._decode_pool(kind)
        num_large = math.ceil(self.cores)
        self._large_pool = FairPool(
            "large images",
            # One account leaves a thread to the others.
            num_large + 1,
            self.ledger,
            share=num_large,
            meter=self.load_meter,
        )
        self._fork_server = fork_server or ForkServer()
        load_model = partial(
            load_fast,
            load,
            config.max_package_bytes,
            max(plan.limit_bytes for plan in plans),
        )
        self.self_test = SelfTest(load_model)
        self.models = Models(
            [executor.device_models for executor in self.executors],
            queue,
            max_identities=config.max_identities,
            wait_seconds=config.model_wait_seconds,
            max_waiting=config.max_streams,
            load=load_model,
            check_uploads=self.self_test.check,
        )
        self.admission = Admission(
            _job_limits(config),
            config.grant_seconds,
            queue_seconds=config.queue_seconds,
            weight=self.ledger.weight,
            on_admitted=self.metrics.slot_seconds.observe,
        )
        self.profiling = Profiling(
            self.models,
            self.executors,
            list(self.pools.values()),
            self.admission,
            self.metrics,
            batches=_profiled_batches(
                plans[0].largest_batch, DEFAULT_BATCHES[kind]
            ),
            cores=self.cores,
            budget_seconds=config.profile_seconds,
            wait_seconds=config.profile_seconds + config.model_wait_seconds,
        )
        self._add_gauges()
        self.started = time.monotonic()

    @property
    def num_server_threads(self) -> int:
        """Threads for all requests that may be open at the same time.

        These are streams, requests that wait (for admission, a model, a
        profile or a usage record), uploads, and four for short answers.
        """
        limits = self.admission.queue.limits
        waiting = limits.waiting + limits.slots + MAX_WAITING
        uploads = MAX_UPLOADS + MAX_WAITING_UPLOADS
        return limits.slots + waiting + MAX_WAITING_QUERIES + uploads + 4

    @property
    def state(self) -> str:
        """``ok``, ``draining``, or ``degraded``: it takes no packages."""
        if self.admission.draining:
            return "draining"
        return "degraded" if self.self_test.problem else "ok"

    @property
    def pools(self) -> dict[str, FairPool]:
        """The thread pools by name."""
        pools = {executor.name: executor.pool for executor in self.executors}
        pools["large"] = self._large_pool
        if self.decode_pool is not None:
            pools["decode"] = self.decode_pool
        return pools

    def close(self) -> bool:
        """Ends the pools; jobs that still run fail.

        Returns:
            True if all threads have ended.
        """
        self.models.close()
        self.profiling.close()
        self._fork_server.end()
        ended = [pool.close() for pool in self.pools.values()]
        return all(ended)

    def reload(self, config: WorkerConfig) -> None:
        """Takes over the options that may change at run time."""
        self.config = config
        self.ledger.set_weights(dict(config.account_weights))
        self.quarantine.limit_seconds = config.pass_seconds
        for executor in self.executors:
            executor.device_models.working_memory.pass_seconds = (
                config.pass_seconds
            )
        self.admission.queue_seconds = config.queue_seconds
        self.admission.queue.limits = _job_limits(config)

    def check_devices(self) -> None:
        """Takes devices that hang out of service."""
        config = self.config
        longest = max(config.pass_seconds, config.profile_seconds)
        for executor in self.executors:
            executor.check_hanging(HANGING_FACTOR * longest)

    def grant(
        self,
        request: JobRequest,
        is_disconnected: IsDisconnected = always_connected,
    ) -> JobGrant:
        """Answers ``POST /jobs``; may wait until a job may run.

        Args:
            request: the filter's request.
            is_disconnected: returns True if the filter waits no more.

        Raises:
            HapiError: the request is refused.
        """
        check_request(request, self.config)
        self.admission.check_open()
        if request.model is not None:
            check_package(request.model, self.config)
            # A request that waits for a model does not count as a job.
            digest = self.models.await_model(
                request.model,
                is_disconnected,
                self.config.queue_seconds,
                request.charged_account,
            )
            self.quarantine.check(digest)
        job = self.admission.enter(request, is_disconnected)
        lease = None
        try:
            if request.model is not None:
                # The end of the job releases it.
                job.lease = lease = self.models.acquire(
                    request.model,
                    request.cut,
                    request.encoding,
                    wait_seconds=self.config.queue_seconds,
                    is_disconnected=is_disconnected,
                    account=job.account,
                )
            if is_disconnected():
                raise client_disconnected_error()
            self.admission.grant(job, lease)
            check_transform(request, lease, self.config)
        except BaseException:
            self.admission.end(job)
            raise
        return JobGrant(
            job_id=job.job_id,
            grant_bytes=self.config.buffer_bytes,
            model_digest=lease.digest if lease else None,
            numerics_tag=self.numerics_tag,
            lifetime_seconds=self.config.grant_seconds,
            jobs=len(self.admission.jobs())
            + self.admission.queue.num_waiting(),
        )

    def stream(self, job_id: str, connection: PeerConnection) -> JobStream:
        """Answers ``POST /jobs/<id>``; returns at the first whole sample.

        Raises:
            HapiError: the job is unknown, or its object is unusable.
        """
        job = self.admission.start(job_id)
        length = job.request.source_length_bytes
        body = ChunkedBody(
            connection,
            length_bytes=self.config.max_object_bytes
            if length is None
            else length,
            idle_seconds=self.config.idle_seconds,
            is_upper_bound=length is None,
        )
        digest = job.lease.digest if job.lease else None
        meter = self.accounting.begin(job_id, job.request, digest)
        cleanup = ExitStack()
        end = partial(self._end_job, job, cleanup)
        job.abort = body.abort
        try:
            pipeline = self._pipeline(job, meter, body, connection, cleanup)
            job.abort = pipeline.abort
            job.buffered = pipeline.buffered_bytes
            pipeline.start()
            stream = JobStream(
                job.request,
                pipeline,
                body,
                _schema(job),
                self.metrics,
                lambda: self._load_report(job.account),
                end,
            )
            job.abort = stream.abort
            job.blocked_seconds = stream.blocked_seconds
            return stream
        except BaseException as error:
            totals = JobTotals(source_bytes=body.bytes_read)
            end(*self._count_early_end(job, error), totals)
            if isinstance(error, ClientDisconnectedError):
                raise AnnotationError(
                    "bad_request", f"the job's body: {error}"
                ) from error
            raise

    def _executor(self, plan: DevicePlan, queue: MemoryQueue) -> Executor:
        return Executor(
            plan.name,
            DeviceModels(
                plan.device,
                plan.limit_bytes,
                num_forwards=plan.forwards,
                preferred_batch=plan.largest_batch,
                wait_seconds=self.config.model_wait_seconds,
                pass_seconds=self.config.pass_seconds,
                queue=queue,
            ),
            FairPool(
                f"device {plan.name}",
                plan.forwards,
                self.ledger,
                torch_threads=self.config.torch_threads,
                meter=self.load_meter,
            ),
            self._device_failed,
        )

    def _decode_pool(self, kind: str) -> FairPool | None:
        """Returns None if the threads of each device decode for its jobs."""
        if kind == "cpu" and not self.config.decode_threads:
            return None
        threads = self.config.decode_threads or math.ceil(self.cores)
        return FairPool("decode", threads, self.ledger, meter=self.load_meter)

    def _decoding_pool(self, lease: Lease | None) -> FairPool:
        if self.decode_pool is not None:
            return self.decode_pool
        # An index job decodes nothing.
        executor = (
            executor_of(self.executors, lease) if lease else self.executors[0]
        )
        return executor.pool

    def _large_decoder(self, lease: Lease) -> LargeDecoder:
        models = lease.device_models
        return LargeDecoder(
            self._large_pool,
            self._fork_server,
            self.config.decode_seconds,
            # memory_limit is a GPU's own memory, and decoding takes the
            # host's.
            models.working_memory.decoding
            if models.device.type == "cpu"
            else lambda num_bytes: nullcontext(),
        )

    def _device_failed(self, executor: Executor) -> None:
        self.metrics.device_failures.labels(executor.name).inc()
        for job in self.admission.jobs():
            if job.lease and job.lease.device_models is executor.device_models:
                job.abort(executor.failure())
        if not any(executor.in_service for executor in self.executors):
            self._out_of_service()

    def _add_gauges(self) -> None:
        add_gauge = self.metrics.add_gauge
        add_gauge("resident_models", lambda: self.models.loaded_totals()[0])
        add_gauge("waiting_models", self.models.num_queued_loads)
        add_gauge("resident_bytes", lambda: self.models.loaded_totals()[1])
        add_gauge("jobs_running", self.admission.num_running)
        add_gauge("jobs_waiting", self.admission.queue.num_waiting)
        add_gauge("buffered_bytes", self._buffered_bytes)
        add_gauge("degraded", lambda: bool(self.self_test.problem))
        add_gauge("slow_passes", lambda: self.quarantine.total)
        for executor in self.executors:
            taken = partial(allocated_bytes, executor.device)
            reserved = executor.device_models.working_memory.reserved_bytes
            add_gauge("reserved_bytes", reserved, device=executor.name)
            add_gauge("allocated_bytes", taken, device=executor.name)
            longest = (
                executor.device_models.working_memory.longest_pass_seconds
            )
            add_gauge("longest_pass_seconds", longest, device=executor.name)
        for name, pool in self.pools.items():
            add_gauge("queue_length", pool.__len__, pool=name)

    def _buffered_bytes(self) -> int:
        return sum(job.buffered() for job in self.admission.jobs())

    def _join_group(
        self, job: Job, start: BodyStart, cleanup: ExitStack
    ) -> Group | None:
        if job.lease is None:
            return None
        lease = job.lease
        executor = executor_of(self.executors, lease)
        if not executor.in_service:
            raise executor.failure()
        size = batch_size(
            lease.batch_limit(lease.device_models.preferred_batch),
            start.num_samples(job.request),
        )
        transform = job.request.transform
        prefix = executor.name, lease.digest, lease.cut_dtype
        key = job.account, prefix, size, transform

        def make() -> Group:
            compute = PrefixCompute(
                lease,
                executor,
                self.quarantine,
                self.metrics.out_of_memory.inc,
                decoder_of(
                    lease.frozen,
                    max_pixels=self.config.max_pixels,
                    formats=self.config.image_formats,
                    training=parse_transform(transform),
                ),
            )
            return Group(
                job.account,
                compute,
                executor.pool,
                size,
                on_pass=self.metrics.batch_samples.observe,
            )

        group = self.groups.join(key, make)
        cleanup.callback(self.groups.leave, key)
        return group

    def _end_job(
        self,
        job: Job,
        cleanup: ExitStack,
        outcome: str,
        reason: str,
        totals: JobTotals,
    ) -> None:
        with ExitStack() as last:
            last.callback(self.admission.end, job)
            # Accounting ends first: the next job sees the usage record.
            last.callback(
                self.accounting.end, job.job_id, outcome, reason, totals
            )
            cleanup.close()

    def _load_report(self, account: str) -> WorkerLoad:
        admission = self.admission
        return self.load_meter.report(
            account,
            admission.num_running(account)
            + admission.queue.waiting_by_account()[account],
        )

    def _count_early_end(
        self, job: Job, error: BaseException
    ) -> tuple[str, str]:
        gone = isinstance(error, ClientDisconnectedError)
        outcome = OUTCOME_GONE if gone else OUTCOME_FAILED
        reason = error.code if isinstance(error, HapiError) else ""
        self.metrics.jobs.labels(job.request.kind, outcome, reason).inc()
        return outcome, reason

    def _pipeline(
        self,
        job: Job,
        meter: JobUsageMeter,
        body: ChunkedBody,
        connection: PeerConnection,
        cleanup: ExitStack,
    ) -> Pipeline:
        config = self.config
        start = read_start(body)
        samples = read_samples(
            start,
            body,
            job.request,
            medium=medium_of(job.lease),
            limits=Limits(
                max_member_bytes=config.max_sample_bytes,
                max_sample_bytes=config.max_sample_bytes,
            ),
            max_samples=config.max_samples,
        )
        pipeline = Pipeline(
            samples,
            body,
            connection,
            account=job.account,
            encoding=job.request.encoding,
            group=self._join_group(job, start, cleanup),
            decode_pool=self._decoding_pool(job.lease),
            large=self._large_decoder(job.lease) if job.lease else None,
            meter=meter,
            bounds=PipelineLimits(config.buffer_bytes, config.batch_seconds),
            describe=str if job.request.num_objects is None else object_error,
        )
        cleanup.callback(pipeline.cancel)
        return pipeline


def _job_limits(config: WorkerConfig) -> QueueLimits:
    return QueueLimits(
        config.max_streams,
        config.max_streams_per_account,
        WAITING_PER_STREAM * config.max_streams,
    )


def _profiled_batches(largest: int, usual: Sequence[int]) -> tuple[int, ...]:
    """The usual sizes below the largest micro-batch of jobs, and that one."""
    return (*(size for size in usual if size < largest), largest)


def _schema(job: Job) -> object:
    if job.request.kind == KIND_INDEX or job.lease is None:
        return index_schema()
    return feature_schema(job.lease.shape, job.request.encoding)
