"""What the worker is made of, and the life of a job in it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Protocol

import torch

from hapi_protocol.errors import (
    AnnotationError,
    HapiError,
    PackageError,
    TooLargeError,
    UnsupportedError,
)
from hapi_protocol.features import feature_schema, index_schema
from hapi_protocol.headers import NUMERICS, TRANSFORMS
from hapi_protocol.messages import (
    KIND_INDEX,
    OUTCOME_FAILED,
    OUTCOME_GONE,
    JobGrant,
    JobRequest,
)
from hapi_protocol.shards import Limits
from hapi_protocol.summary import Load as LoadReport
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.host import allowed_cores
from hapi_splitter.numerics import enforce_exact, numerics_tag
from hapi_splitter.package import PackageLimits, load_package
from hapi_splitter.profile import DEFAULT_BATCHES
from hapi_splitter.validate import validate_package
from hapi_worker.admission import Admission, Job
from hapi_worker.body import ChunkedBody, Connection, SenderGoneError
from hapi_worker.config import WorkerConfig
from hapi_worker.decode import Decoder, image_decoder
from hapi_worker.executor import (
    FairPool,
    choose_device,
    device_memory_bytes,
)
from hapi_worker.forward import Computed, run_prefix
from hapi_worker.load import LoadMeter
from hapi_worker.metrics import Metrics
from hapi_worker.pipeline import Pipeline
from hapi_worker.profiling import MAX_WAITING, Profiling
from hapi_worker.residency import Lease, Residency
from hapi_worker.samples import read_samples
from hapi_worker.stream import JobStream
from hapi_worker.usage import (
    MAX_QUESTIONS,
    Meter,
    Metered,
    Sent,
    Usages,
)

MAX_BATCH: Mapping[str, int] = MappingProxyType({"cpu": 8, "cuda": 64})
"""Samples in a micro-batch by kind of device.  On a CPU larger ones compute
no faster, and their activations are mapped anew by the kernel each time."""
MAX_UPLOADS = 2
"""Packages that are received or loaded at a time."""


class Load(Protocol):
    """Package bytes → model, on the CPU."""

    def __call__(
        self, package: bytearray, /, *, limits: PackageLimits
    ) -> FrozenGraph: ...


def load_validated(
    package: bytearray, /, *, limits: PackageLimits
) -> FrozenGraph:
    """Loads a stranger's package, tried in a process of its own first.

    Raises:
        PackageError: naming what is wrong with it.
    """
    digest = validate_package(package, limits=limits)
    return load_package(package, limits=limits, digest=digest)


class Worker:
    """The parts of one worker process, without its sockets.

    Args:
        config: the operator's options.
        load: what makes a model of a package.
    """

    def __init__(
        self, config: WorkerConfig, *, load: Load = load_validated
    ) -> None:
        self.config = config
        enforce_exact()
        self.device = choose_device(config.device)
        self.numerics_tag = numerics_tag(self.device.type)
        cores = allowed_cores()
        threads = math.ceil(cores)
        torch.set_num_threads(config.torch_threads or threads)
        self.load_meter = LoadMeter(cores=cores)
        self.decode_pool = FairPool(
            "decode", config.decode_threads or threads, meter=self.load_meter
        )
        self.device_pool = FairPool(
            "device",
            1,
            torch_threads=config.torch_threads or threads,
            meter=self.load_meter,
            on_device=True,
        )
        self.residency = Residency(
            self.device,
            config.memory_limit or device_memory_bytes(self.device),
            max_identities=config.max_identities,
            wait_seconds=config.model_wait_seconds,
            max_waiting=config.max_streams,
            load=partial(
                load,
                limits=PackageLimits(package_bytes=config.max_package_bytes),
            ),
        )
        self.admission = Admission(
            config.max_streams,
            config.max_streams_per_account,
            config.grant_seconds,
        )
        self.usages = Usages()
        self.metrics = Metrics()
        self.metrics.watch(
            resident=self.residency.resident,
            jobs_running=self.admission.num_running,
            queues={
                "decode": self.decode_pool.__len__,
                "device": self.device_pool.__len__,
            },
        )
        self.profiling = Profiling(
            self.residency,
            self.device_pool,
            self.decode_pool,
            self.admission,
            self.metrics,
            batches=_profiled_batches(
                _largest_batch(config, self.device),
                DEFAULT_BATCHES[self.device.type],
            ),
            cores=cores,
            budget_seconds=config.profile_seconds,
            wait_seconds=config.profile_seconds + config.model_wait_seconds,
        )
        self.started = time.monotonic()

    @property
    def num_server_threads(self) -> int:
        """Streams, those that wait for a model, a profile or a job's
        usage, uploads, and a few."""
        waiting = self.config.max_streams + MAX_WAITING + MAX_QUESTIONS
        return self.config.max_streams + waiting + MAX_UPLOADS + 4

    def close(self) -> None:
        """Ends the pools; jobs that still run fail."""
        self.residency.close()
        self.profiling.close()
        self.decode_pool.close()
        self.device_pool.close()

    def grant(self, request: JobRequest) -> JobGrant:
        """Answers ``POST /jobs``.

        Raises:
            HapiError: any of the refusals of the exchange.
        """
        self._check_request(request)
        self.admission.check(request.charged_account)
        lease = None
        if request.model is not None:
            lease = self.residency.acquire(
                request.model, request.cut, request.encoding
            )
        try:
            _check_transform(lease)
            job = self.admission.grant(request, lease)
        except HapiError:
            if lease is not None:
                lease.release()
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
        body = ChunkedBody(
            connection,
            length_bytes=job.request.source_length_bytes,
            idle_seconds=self.config.idle_seconds,
        )
        digest = job.lease.digest if job.lease else None
        meter = self.usages.begin(job_id, job.request, digest)
        pipeline = self._pipeline(job, body, connection, meter)
        job.abort = pipeline.abort
        try:
            pipeline.start()
        except BaseException as error:
            pipeline.cancel()
            sent = Sent(
                source_bytes=body.bytes_read, cpu_seconds=pipeline.read_cpu
            )
            self._end(job, *self._count_early_end(job, error), sent)
            if isinstance(error, SenderGoneError):
                raise AnnotationError(
                    "bad_request", f"the job's body: {error}"
                ) from error
            raise
        return JobStream(
            job.request,
            pipeline,
            body,
            _schema(job),
            self.metrics,
            lambda: self._load_for(job.request.charged_account),
            partial(self._end, job),
        )

    def _end(self, job: Job, outcome: str, reason: str, sent: Sent) -> None:
        self.usages.end(job.job_id, outcome, reason, sent)
        self.admission.end(job)

    def _load_for(self, account: str) -> LoadReport:
        return self.load_meter.report(
            account, self.admission.num_running(account)
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
        body: ChunkedBody,
        connection: Connection,
        meter: Meter,
    ) -> Pipeline:
        config = self.config
        samples = read_samples(
            body,
            job.request,
            limits=Limits(
                max_member_bytes=config.max_sample_bytes,
                max_sample_bytes=config.max_sample_bytes,
            ),
            max_samples=config.max_samples,
        )
        compute = None
        if job.lease is not None:
            prefix = _Prefix(job.lease, job.request, self.device, config)
            compute = Metered(prefix, meter)
        return Pipeline(
            samples,
            body,
            connection,
            account=job.request.charged_account,
            compute=compute,
            decode_pool=self.decode_pool,
            device_pool=self.device_pool,
            buffer_bytes=config.buffer_bytes,
            step_seconds=config.batch_seconds,
        )

    def _check_request(self, request: JobRequest) -> None:
        if request.transform not in TRANSFORMS:
            raise AnnotationError(
                "unknown_transform",
                f"transform {request.transform!r}; this worker has "
                f"{', '.join(TRANSFORMS)}",
            )
        if request.numerics not in NUMERICS:
            raise UnsupportedError(
                "unsupported_numerics",
                f"numerics {request.numerics!r}; this worker has "
                f"{', '.join(NUMERICS)}",
            )
        limit = self.config.max_object_bytes
        if request.source_length_bytes > limit:
            raise TooLargeError(
                "object_too_large",
                f"object {request.source_name} has "
                f"{request.source_length_bytes} bytes; at most {limit}",
                object_name=request.source_name,
            )


def _largest_batch(config: WorkerConfig, device: torch.device) -> int:
    return config.max_batch or MAX_BATCH[device.type]


def _profiled_batches(largest: int, usual: Sequence[int]) -> tuple[int, ...]:
    """The usual sizes, up to the largest micro-batch of jobs, and that."""
    return (*(size for size in usual if size < largest), largest)


def _check_transform(lease: Lease | None) -> None:
    if lease is not None and lease.frozen.transform is None:
        raise PackageError(
            "bad_package",
            f"the package {lease.digest[:12]} has no input transform, so "
            "images cannot be made its input: write it with one",
        )


@dataclass
class _Prefix:
    """A job's way from sample to features; a ``pipeline.Compute``."""

    lease: Lease
    request: JobRequest
    device: torch.device
    config: WorkerConfig

    @cached_property
    def decoder(self) -> Decoder:
        transform = self.lease.frozen.transform
        assert transform is not None, "checked before the grant"
        return image_decoder(transform, self.config.max_pixels)

    @property
    def input_bytes(self) -> int:
        return 4 * math.prod(self.lease.frozen.input_shape)

    def batch_limit(self) -> int:
        return self.lease.batch_limit(_largest_batch(self.config, self.device))

    def run(self, images: torch.Tensor) -> Computed:
        return run_prefix(
            self.lease.prefix(),
            images,
            device=self.device,
            encoding=self.request.encoding,
        )


def _schema(job: Job) -> object:
    if job.request.kind == KIND_INDEX or job.lease is None:
        return index_schema()
    return feature_schema(job.lease.shape, job.request.encoding)
