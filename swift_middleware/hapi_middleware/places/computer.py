"""A place that computes, and the proxy's own: the worker of this host."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeVar

from hapi_middleware.config import PLACE_PROXY
from hapi_middleware.metrics import FilterMetrics, StreamReporter
from hapi_middleware.requests.package import Package
from hapi_middleware.requests.subrequests import ObjectBody
from hapi_middleware.worker.feature_stream import JobBody, WorkerStream
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_protocol.backend import ModelInfo
from hapi_protocol.errors import (
    PACKAGE_REFUSED,
    ConflictError,
    UnavailableError,
)
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
MAX_VERSIONS = 2
"""Versions of a package that one request looks at."""

_T = TypeVar("_T")


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

    def __init__(self, metrics: FilterMetrics) -> None:
        self._metrics = metrics

    @abstractmethod
    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """Facts about a model; None if the place does not have it."""

    @abstractmethod
    def put_model(
        self, identity: ModelIdentity, body: ObjectBody, trans_id: str
    ) -> None:
        """Uploads a package; the worker hashes it."""

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

        identity, trans_id = request.model, request.trans_id
        return self._with_package(package, identity, trans_id, ask)

    def _with_model(
        self, work: AuthorisedJob, ask: Callable[[JobRequest], _T]
    ) -> _T:
        """Calls ``ask`` as :meth:`_with_package`, if the job has a model."""
        job = work.job
        if work.package is None or job.model is None:
            return ask(job)
        return self._with_package(
            work.package,
            job.model,
            job.trans_id,
            lambda model: ask(replace(job, model=model)),
        )

    def _with_package(
        self,
        package: Package,
        identity: ModelIdentity,
        trans_id: str,
        ask: Callable[[ModelIdentity], _T],
    ) -> _T:
        """Calls ``ask``; uploads the package first if the worker lacks it.

        Args:
            package: a package that the caller may read.
            identity: identity of the package at its authorisation.
            trans_id: transaction id of the client's request.
            ask: called with the package's current identity; raises
                ``model_needed`` if the worker does not have it.

        Raises:
            ConflictError: ``model_changed``: the package keeps changing.
            UnavailableError: the worker does not keep the package.
            HapiError: errors of ``ask`` and of the upload.
        """
        for number in range(self.MAX_UPLOADS + 1):
            try:
                return ask(identity)
            except ConflictError as error:
                if error.code != "model_needed":
                    raise
            if number < self.MAX_UPLOADS:
                identity = self._upload(package, identity, trans_id)
        raise UnavailableError(
            "service_unavailable",
            "the worker does not keep the model; try again later",
            retry_after=5,
            details={PACKAGE_REFUSED: True},
        )

    def _upload(
        self, package: Package, identity: ModelIdentity, trans_id: str
    ) -> ModelIdentity:
        """Uploads the package and returns its current identity."""
        for _ in range(MAX_VERSIONS):
            body = package.open(identity)
            if body is None:
                identity = package.identify_again()
                continue
            self._metrics.count("model_uploads")
            with closing(body), self._metrics.timed("model_upload"):
                self.put_model(identity, body, trans_id)
            return identity
        raise ConflictError(
            "model_changed",
            f"the model {identity.path} changed while it was read; store "
            "each version under its own name",
            object_name=identity.path,
        )


class LocalComputer(Computer):
    """The worker of this host.

    Args:
        worker: its client.
        metrics: metrics of the filter.
    """

    KIND = PLACE_PROXY

    def __init__(self, worker: WorkerClient, metrics: FilterMetrics) -> None:
        super().__init__(metrics)
        self._worker = worker

    def find_model(
        self, identity: ModelIdentity, trans_id: str
    ) -> ModelInfo | None:
        """Facts about a model, as :meth:`Computer.find_model`."""
        return self._worker.find_model(identity, trans_id)

    def put_model(
        self, identity: ModelIdentity, body: ObjectBody, trans_id: str
    ) -> None:
        """Uploads a package, as :meth:`Computer.put_model`."""
        self._worker.put_model(identity, body, trans_id)

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

        grant = self._with_model(work, ask)
        return Granted(
            grant,
            partial(self._worker.get_usage, grant.job_id, work.job.trans_id),
        )
