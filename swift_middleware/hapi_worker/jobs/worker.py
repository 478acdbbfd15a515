"""What the worker is made of, and the life of a job in it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from hapi_protocol.summary import Load as LoadReport
from hapi_protocol.transforms import parse_transform
from hapi_splitter.host_limits import allowed_cores
from hapi_splitter.numerics import enforce_exact, numerics_tag
from hapi_splitter.profiling.profiler import DEFAULT_BATCHES
from hapi_worker.config import WorkerConfig
from hapi_worker.execution.coalescing import Group, Groups, group_key
from hapi_worker.execution.device_executor import Executor, PrefixCompute
from hapi_worker.execution.devices import (
    DevicePlan,
    allocated_bytes,
    plan_devices,
)
from hapi_worker.execution.quarantine import ModelQuarantine
from hapi_worker.jobs.admission import Admission, Job, JobLimits
from hapi_worker.jobs.arrow_response import JobStream
from hapi_worker.jobs.chunked_body import ChunkedBody
from hapi_worker.jobs.pipeline import Bounds, Pipeline
from hapi_worker.jobs.profile_job import MAX_WAITING, Profiling
from hapi_worker.jobs.request_validation import (
    check_package,
    check_request,
    check_transform,
    medium_of,
)
from hapi_worker.jobs.sample_reader import (
    Start,
    object_error,
    read_samples,
    read_start,
)
from hapi_worker.models.device_models import Lease, Residency
from hapi_worker.models.package_loader import Load, load_fast, load_validated
from hapi_worker.models.registry import Models
from hapi_worker.monitoring.accounting import (
    MAX_QUESTIONS,
    JobAccounting,
    Meter,
    Sent,
)
from hapi_worker.monitoring.load_meter import LoadMeter
from hapi_worker.monitoring.metrics import Metrics
from hapi_worker.peer import (
    Connection,
    IsGone,
    SenderGoneError,
    asker_gone,
    never_gone,
)
from hapi_worker.scheduling.batch_size import batch_size
from hapi_worker.scheduling.fair_pool import FairPool
from hapi_worker.scheduling.fair_queue import Ledger

MAX_UPLOADS = 2
"""Packages that are received or loaded at a time."""
HANGING_PASSES = 5.0
"""A pass on a GPU that takes so many times ``pass_seconds`` (or
``profile_seconds``, where they are more) will not return."""
WAITING_PER_STREAM = 2
"""Requests that may wait for a place, for each place."""


class Worker:
    """The parts of one worker process, without its sockets.

    Args:
        config: the operator's options.
        load: what makes a model of a package.
        out_of_service: called when the last device has failed.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        load: Load = load_validated,
        out_of_service: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._out_of_service = out_of_service
        enforce_exact()
        torch.set_num_threads(config.torch_threads)
        self.cores = allowed_cores()
        self.ledger = Ledger(dict(config.account_weights))
        self.metrics = Metrics()
        self.usages = JobAccounting()
        self.groups = Groups()
        self.overruns = ModelQuarantine(config.pass_seconds)
        plans = plan_devices(config, self.cores)
        kind = plans[0].device.type
        self.numerics_tag = numerics_tag(kind)
        self.load_meter = LoadMeter(
            cores=self.cores,
            num_devices=sum(plan.forwards for plan in plans),
            weight=self.ledger.weight,
        )
        changed = threading.Condition()
        self.executors = [self._executor(plan, changed) for plan in plans]
        self.decode_pool = self._decode_pool(kind)
        self.models = Models(
            [executor.residency for executor in self.executors],
            changed,
            max_identities=config.max_identities,
            wait_seconds=config.model_wait_seconds,
            max_waiting=config.max_streams,
            load=partial(load_fast, load, config.max_package_bytes),
        )
        self.admission = Admission(
            _places(config),
            config.grant_seconds,
            queue_seconds=config.queue_seconds,
            weight=self.ledger.weight,
            waited=self.metrics.place_seconds.observe,
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
        self._watch()
        self.started = time.monotonic()

    @property
    def num_server_threads(self) -> int:
        """Streams, those that wait for a place, a model, a profile or a
        job's usage, uploads, and a few."""
        places = self.admission.places
        waiting = places.waiting + places.streams + MAX_WAITING
        return places.streams + waiting + MAX_QUESTIONS + MAX_UPLOADS + 4

    @property
    def pools(self) -> dict[str, FairPool]:
        """By name, each once."""
        pools = {each.name: each.pool for each in self.executors}
        if self.decode_pool is not None:
            pools["decode"] = self.decode_pool
        return pools

    def close(self) -> bool:
        """Ends the pools, or tells that they are busy; jobs that still run
        fail."""
        self.models.close()
        self.profiling.close()
        ended = [pool.close() for pool in self.pools.values()]
        return all(ended)

    def reload(self, config: WorkerConfig) -> None:
        """Takes over options that may change while it runs."""
        self.config = config
        self.ledger.set_weights(dict(config.account_weights))
        self.overruns.limit_seconds = config.pass_seconds
        for each in self.executors:
            each.residency.pass_seconds = config.pass_seconds
        self.admission.reconfigure(_places(config), config.queue_seconds)

    def check_devices(self) -> None:
        """Takes devices out of service that hang."""
        config = self.config
        longest = max(config.pass_seconds, config.profile_seconds)
        for each in self.executors:
            each.check_hanging(HANGING_PASSES * longest)

    def grant(
        self, request: JobRequest, is_gone: IsGone = never_gone
    ) -> JobGrant:
        """Answers ``POST /jobs``; may wait for a place.

        Args:
            request: of the filter.
            is_gone: whether it waits no more for the answer.

        Raises:
            HapiError: any of the refusals of the exchange.
        """
        check_request(request, self.config)
        self.admission.check_open()
        if request.model is not None:
            check_package(request.model, self.config)
            # Whoever waits for a model takes nobody's place.
            digest = self.models.await_model(
                request.model,
                is_gone,
                self.config.queue_seconds,
                request.charged_account,
            )
            self.overruns.check(digest)
        job = self.admission.enter(request, is_gone)
        lease = None
        try:
            if request.model is not None:
                lease = self.models.acquire(
                    request.model,
                    request.cut,
                    request.encoding,
                    wait_seconds=self.config.queue_seconds,
                    is_gone=is_gone,
                    account=job.account,
                )
            if is_gone():
                raise asker_gone()
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
        )

    def stream(self, job_id: str, connection: Connection) -> JobStream:
        """Answers ``POST /jobs/<id>``; returns at the first whole sample.

        Raises:
            HapiError: what makes the object unfit, or is unknown.
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
        meter = self.usages.begin(job_id, job.request, digest)
        cleanup = ExitStack()
        end = partial(self._end, job, cleanup)
        job.abort = body.abort
        try:
            pipeline = self._pipeline(job, meter, body, connection, cleanup)
            job.abort = pipeline.abort
            job.buffered = pipeline.buffered_bytes
            pipeline.start()
            return JobStream(
                job.request,
                pipeline,
                body,
                _schema(job),
                self.metrics,
                lambda: self._load_for(job.account),
                end,
            )
        except BaseException as error:
            sent = Sent(source_bytes=body.bytes_read)
            end(*self._count_early_end(job, error), sent)
            if isinstance(error, SenderGoneError):
                raise AnnotationError(
                    "bad_request", f"the job's body: {error}"
                ) from error
            raise

    def _executor(
        self, plan: DevicePlan, changed: threading.Condition
    ) -> Executor:
        return Executor(
            plan.name,
            Residency(
                plan.device,
                plan.limit_bytes,
                num_forwards=plan.forwards,
                usual_batch=plan.largest_batch,
                wait_seconds=self.config.model_wait_seconds,
                pass_seconds=self.config.pass_seconds,
                changed=changed,
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
        """None where the threads of each device decode for its jobs."""
        if kind == "cpu" and not self.config.decode_threads:
            return None
        threads = self.config.decode_threads or math.ceil(self.cores)
        return FairPool("decode", threads, self.ledger, meter=self.load_meter)

    def _decoding_pool(self, lease: Lease | None) -> FairPool:
        if self.decode_pool is not None:
            return self.decode_pool
        # An index is not decoded.
        executor = self._executor_of(lease) if lease else self.executors[0]
        return executor.pool

    def _device_failed(self, executor: Executor) -> None:
        self.metrics.device_failures.labels(executor.name).inc()
        for job in self.admission.jobs():
            if job.lease and job.lease.residency is executor.residency:
                job.abort(executor.failure())
        if not any(each.in_service for each in self.executors):
            self._out_of_service()

    def _watch(self) -> None:
        watch = self.metrics.watch
        watch("resident_models", lambda: self.models.resident()[0])
        watch("waiting_models", self.models.num_claims)
        watch("resident_bytes", lambda: self.models.resident()[1])
        watch("jobs_running", self.admission.num_running)
        watch("jobs_waiting", self.admission.num_waiting)
        watch("buffered_bytes", self._buffered_bytes)
        watch("slow_passes", lambda: self.overruns.total)
        for each in self.executors:
            taken = partial(allocated_bytes, each.device)
            reserved = each.residency.reserved_bytes
            watch("reserved_bytes", reserved, device=each.name)
            watch("allocated_bytes", taken, device=each.name)
            longest = each.residency.longest_pass_seconds
            watch("longest_pass_seconds", longest, device=each.name)
        for name, pool in self.pools.items():
            watch("queue_length", pool.__len__, pool=name)

    def _buffered_bytes(self) -> int:
        return sum(job.buffered() for job in self.admission.jobs())

    def _join(
        self, job: Job, start: Start, cleanup: ExitStack
    ) -> Group | None:
        if job.lease is None:
            return None
        lease = job.lease
        executor = self._executor_of(lease)
        if not executor.in_service:
            raise executor.failure()
        size = batch_size(
            lease.batch_limit(lease.residency.usual_batch),
            start.num_samples(job.request),
        )
        transform = job.request.transform
        key = group_key(job.account, lease, size, executor.name, transform)

        def make() -> Group:
            compute = PrefixCompute(
                lease,
                executor,
                self.overruns,
                self.metrics.out_of_memory.inc,
                self.config.max_pixels,
                parse_transform(transform),
            )
            return Group(
                job.account,
                compute,
                executor.pool,
                size,
                passed=self.metrics.batch_samples.observe,
            )

        group = self.groups.join(key, make)
        cleanup.callback(self.groups.leave, key)
        return group

    def _executor_of(self, lease: Lease) -> Executor:
        return next(
            each
            for each in self.executors
            if each.residency is lease.residency
        )

    def _end(
        self,
        job: Job,
        cleanup: ExitStack,
        outcome: str,
        reason: str,
        sent: Sent,
    ) -> None:
        with ExitStack() as last:
            last.callback(self.admission.end, job)
            # Whoever is given the place finds the usage told.
            last.callback(self.usages.end, job.job_id, outcome, reason, sent)
            cleanup.close()

    def _load_for(self, account: str) -> LoadReport:
        admission = self.admission
        return self.load_meter.report(
            account,
            admission.num_running(account)
            + admission.waiting_by_account()[account],
        )

    def _count_early_end(
        self, job: Job, error: BaseException
    ) -> tuple[str, str]:
        gone = isinstance(error, SenderGoneError)
        outcome = OUTCOME_GONE if gone else OUTCOME_FAILED
        reason = error.code if isinstance(error, HapiError) else ""
        self.metrics.jobs.labels(job.request.kind, outcome, reason).inc()
        return outcome, reason

    def _pipeline(
        self,
        job: Job,
        meter: Meter,
        body: ChunkedBody,
        connection: Connection,
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
            group=self._join(job, start, cleanup),
            decode_pool=self._decoding_pool(job.lease),
            meter=meter,
            bounds=Bounds(config.buffer_bytes, config.batch_seconds),
            describe=str if job.request.num_objects is None else object_error,
        )
        cleanup.callback(pipeline.cancel)
        return pipeline


def _places(config: WorkerConfig) -> JobLimits:
    return JobLimits(
        config.max_streams,
        config.max_streams_per_account,
        WAITING_PER_STREAM * config.max_streams,
    )


def _profiled_batches(largest: int, usual: Sequence[int]) -> tuple[int, ...]:
    """The usual sizes, up to the largest micro-batch of jobs, and that."""
    return (*(size for size in usual if size < largest), largest)


def _schema(job: Job) -> object:
    if job.request.kind == KIND_INDEX or job.lease is None:
        return index_schema()
    return feature_schema(job.lease.shape, job.request.encoding)
