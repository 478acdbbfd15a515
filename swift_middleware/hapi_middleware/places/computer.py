"""A place that computes, and the proxy's own: the worker of this host."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from hapi_middleware.config import PLACE_PROXY
from hapi_middleware.metrics import FilterMetrics, StreamReporter
from hapi_middleware.requests.package import Package
from hapi_middleware.worker.feature_stream import JobBody, WorkerStream
from hapi_middleware.worker.package_upload import (
    PackageStore,
    PackageUploader,
    T,
)
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_protocol.backend import ModelInfo
from hapi_protocol.job_messages import (
    JobGrant,
    JobRequest,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.profiles import ModelProfile

USED_LIFETIME = 0.9
"""Fraction of a grant's lifetime after which another is requested."""

ELSEWHERE = frozenset(
    {
        "worker_unavailable",
        "service_unavailable",
        "source_damaged",
        "queue_full",
        "draining",
        "share_exceeded",
        "does_not_fit",
        "too_slow",
        "internal",
    }
)
"""Codes of errors after which the next place is asked."""
BUSY = frozenset({"queue_full", "share_exceeded", "draining"})
"""Codes of errors of a worker that has no place now."""
DAMAGED = frozenset({"damaged_shard", "empty_shard", "samples_out_of_range"})
"""Codes of errors after which one more place is asked: its replica may be
intact."""


@dataclass(frozen=True)
class AuthorisedJob:
    """An authorised job, and where its bytes are.

    Attributes:
        job: the job.
        open_source: opens the bytes that it reads by the caller's rights;
            called at most once for each place that is asked.
        is_repeatable: ``open_source`` may be called again.
        package: the model; None for a job without model.
        reporter: reports the stream's start and end.
    """

    job: JobRequest
    open_source: Callable[[], JobBody]
    is_repeatable: bool
    package: Package | None
    reporter: StreamReporter


@dataclass(frozen=True)
class Granted:
    """A job that a place has granted.

    Attributes:
        grant: the grant.
        get_usage: asks for the job's usage with a timeout in seconds.
    """

    grant: JobGrant
    get_usage: Callable[[float], Usage]


class Computer(ABC):
    """A place that computes.

    Args:
        store: keeps the packages of its worker.
        metrics: metrics of the filter.

    Attributes:
        KIND: ``proxy`` or ``object``.
        MAX_UPLOADS: uploads of a package for one request.  If the worker
            needs more, it does not keep the package.

    Raises:
        HapiError: from all methods: the place's own error, or that it does
            not answer.
    """

    KIND: ClassVar[str]
    MAX_UPLOADS: ClassVar[int] = 2

    def __init__(self, store: PackageStore, metrics: FilterMetrics) -> None:
        self._store = store
        self._metrics = metrics

    @abstractmethod
    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """Facts about a model; None if the place does not have it."""

    @abstractmethod
    def start(
        self, work: AuthorisedJob, is_answered: Callable[[Granted], bool]
    ) -> WorkerStream | None:
        """Starts a job and waits for its first features.

        Args:
            work: the job.
            is_answered: called when the job is granted; if True, nothing is
                computed.

        Returns:
            The stream; None if ``is_answered`` was True.
        """

    @abstractmethod
    def _profile(self, request: ProfileRequest) -> ModelProfile:
        """Profile of a package; raises ``model_needed``."""

    def get_profile(
        self, request: ProfileRequest, package: Package
    ) -> tuple[ModelIdentity, ModelProfile]:
        """Profile of a package, and the identity that was profiled."""

        def ask(identity: ModelIdentity) -> tuple[ModelIdentity, ModelProfile]:
            current = replace(request, model=identity)
            return identity, self._profile(current)

        return self._uploader(package, request.trans_id).ask(
            request.model, ask
        )

    def _with_package(
        self, work: AuthorisedJob, ask: Callable[[JobRequest], T]
    ) -> T:
        """Calls ``ask``; uploads the package first if the worker lacks it."""
        job = work.job
        if work.package is None or job.model is None:
            return ask(job)
        return self._uploader(work.package, job.trans_id).ask(
            job.model, lambda model: ask(replace(job, model=model))
        )

    def _uploader(self, package: Package, trans_id: str) -> PackageUploader:
        return PackageUploader(
            self._store, package, self._metrics, trans_id, self.MAX_UPLOADS
        )


class LocalComputer(Computer):
    """The worker of this host.

    Args:
        worker: its client.
        metrics: metrics of the filter.
    """

    KIND = PLACE_PROXY

    def __init__(self, worker: WorkerClient, metrics: FilterMetrics) -> None:
        super().__init__(worker, metrics)
        self._worker = worker

    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """Facts about a model, as :meth:`Computer.find_model`."""
        return self._worker.find_model(identity, trans_id)

    def start(
        self, work: AuthorisedJob, is_answered: Callable[[Granted], bool]
    ) -> WorkerStream | None:
        """Starts a job, as :meth:`Computer.start`."""
        granted, started = self._grant(work), time.monotonic()
        if is_answered(granted):
            # The unused grant lapses.
            return None
        body = work.open_source()
        waited = time.monotonic() - started
        try:
            if waited > USED_LIFETIME * granted.grant.lifetime_seconds:
                # Swift takes node_timeout to leave an object server that
                # hangs.
                granted = self._grant(work)
                if is_answered(granted):
                    body.close()
                    return None
        except BaseException:
            body.close()
            raise
        return self._worker.open_stream(
            granted.grant, body, work.job.trans_id, work.reporter
        )

    def _profile(self, request: ProfileRequest) -> ModelProfile:
        return self._worker.get_profile(request)

    def _grant(self, work: AuthorisedJob) -> Granted:
        def ask(job: JobRequest) -> JobGrant:
            with self._metrics.timed("grant"):
                return self._worker.create_job(job)

        grant = self._with_package(work, ask)
        return Granted(
            grant,
            partial(self._worker.get_usage, grant.job_id, work.job.trans_id),
        )
