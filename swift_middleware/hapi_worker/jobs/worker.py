"""The worker without its sockets: its parts and the life of a job."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hapi_protocol.job_messages import (
    JobGrant,
    JobRequest,
)
from hapi_splitter.fork_server import ForkServer
from hapi_splitter.host_limits import allowed_cores
from hapi_splitter.numerics import enforce_exact, numerics_tag
from hapi_splitter.profiling.profiler import DEFAULT_BATCHES
from hapi_worker.config import WorkerConfig
from hapi_worker.execution.coalescing import Groups
from hapi_worker.execution.device_executor import (
    Executor,
)
from hapi_worker.execution.devices import (
    DevicePlan,
    allocated_bytes,
    plan_devices,
)
from hapi_worker.execution.quarantine import ModelQuarantine
from hapi_worker.jobs.admission import Admission
from hapi_worker.jobs.arrow_response import JobStream
from hapi_worker.jobs.job_start import JobStart
from hapi_worker.jobs.profile_job import MAX_WAITING, Profiling
from hapi_worker.jobs.profile_runner import ProfileRunner
from hapi_worker.jobs.request_validation import (
    check_package,
    check_request,
    check_transform,
)
from hapi_worker.models.device_models import DeviceModels
from hapi_worker.models.memory_queue import MemoryQueue
from hapi_worker.models.package_loader import PackageLoad, load_fast
from hapi_worker.models.registry import Models
from hapi_worker.models.self_test import SelfTest
from hapi_worker.monitoring.accounting import (
    MAX_WAITING_QUERIES,
    JobAccounting,
)
from hapi_worker.monitoring.load_meter import LoadMeter
from hapi_worker.monitoring.metrics import Metrics
from hapi_worker.peer import (
    IsDisconnected,
    PeerConnection,
    always_connected,
    client_disconnected_error,
)
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
        self.large_pool = FairPool(
            "large images",
            # One account leaves a thread to the others.
            num_large + 1,
            self.ledger,
            share=num_large,
            meter=self.load_meter,
        )
        self.fork_server = fork_server or ForkServer()
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
            ProfileRunner(
                self.executors,
                list(self.pools.values()),
                _profiled_batches(
                    plans[0].largest_batch, DEFAULT_BATCHES[kind]
                ),
                self.cores,
                config.profile_seconds,
            ),
            self.admission,
            self.metrics,
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
        pools["large"] = self.large_pool
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
        self.fork_server.end()
        ended = [pool.close() for pool in self.pools.values()]
        return all(ended)

    def reload(self, config: WorkerConfig) -> None:
        """Takes over the options that may change at run time."""
        self.config = config
        self.ledger.set_weights(dict(config.account_weights))
        self.quarantine.limit_seconds = config.pass_seconds
        for executor in self.executors:
            executor.device_models.pass_seconds = config.pass_seconds
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
        return JobStart(self, job, connection).stream()

    def _executor(self, plan: DevicePlan, queue: MemoryQueue) -> Executor:
        return Executor(
            plan.name,
            DeviceModels(
                plan.device,
                plan.limit_bytes,
                num_forwards=plan.forwards,
                largest_batch=plan.largest_batch,
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


def _job_limits(config: WorkerConfig) -> QueueLimits:
    return QueueLimits(
        config.max_streams,
        config.max_streams_per_account,
        WAITING_PER_STREAM * config.max_streams,
    )


def _profiled_batches(largest: int, usual: Sequence[int]) -> tuple[int, ...]:
    """The usual sizes below the largest micro-batch of jobs, and that one."""
    return (*(size for size in usual if size < largest), largest)
