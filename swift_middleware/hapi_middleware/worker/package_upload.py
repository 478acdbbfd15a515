"""Requests to the worker that need a package there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from hapi_middleware.metrics import Metrics
from hapi_middleware.requests.subrequests import Package
from hapi_middleware.worker.worker_client import WorkerClient
from hapi_protocol.errors import ConflictError, UnavailableError
from hapi_protocol.job_messages import JobGrant, JobRequest, ModelIdentity

MAX_UPLOADS = 2
"""Uploads of a package for one request; more means the worker drops it."""

T = TypeVar("T")


def granted(
    worker: WorkerClient,
    metrics: Metrics,
    job: JobRequest,
    package: Package | None,
) -> JobGrant:
    """The worker's grant, the package handed over where it is missing.

    Args:
        worker: that is asked.
        metrics: of the filter.
        job: whose model is the package, if it has one.
        package: the caller may read it; None for a job without model.

    Raises:
        HapiError: as :meth:`PackageSender.ask`.
    """

    def ask(model: ModelIdentity | None) -> JobGrant:
        with metrics.timed("grant"):
            return worker.create_job(replace(job, model=model))

    if package is None or job.model is None:
        return ask(None)
    return PackageSender(worker, package, metrics, job.trans_id).ask(
        job.model, ask
    )


class PackageSender:
    """Asks the worker, and hands over the package where it is missing.

    Args:
        worker: that is asked.
        package: the caller may read it.
        metrics: of the filter.
        trans_id: of the client's request.
    """

    def __init__(
        self,
        worker: WorkerClient,
        package: Package,
        metrics: Metrics,
        trans_id: str,
    ) -> None:
        self._worker = worker
        self._package = package
        self._metrics = metrics
        self._trans_id = trans_id

    def ask(
        self, identity: ModelIdentity, ask: Callable[[ModelIdentity], T]
    ) -> T:
        """What ``ask`` returns, once it does not need the package.

        Args:
            identity: who the package was when it was looked at.
            ask: called with who it is now.

        Raises:
            ConflictError: ``model_changed``: it changes all the time.
            UnavailableError: the worker does not keep it.
            HapiError: what ``ask`` and the upload raise.
        """
        for _ in range(MAX_UPLOADS + 1):
            try:
                return ask(identity)
            except ConflictError as error:
                if error.code != "model_needed":
                    raise
            identity = self._upload(identity)
        raise UnavailableError(
            "service_unavailable",
            "the worker does not keep the model; try again later",
            retry_after=5,
        )

    def _upload(self, identity: ModelIdentity) -> ModelIdentity:
        """Hand the package to the worker; return who it now is."""
        for _ in range(MAX_UPLOADS):
            body = self._package.open(identity)
            if body is None:
                identity = self._package.identify()
                continue
            self._metrics.count("model_uploads")
            try:
                with self._metrics.timed("model_upload"):
                    self._worker.put_model(identity, body, self._trans_id)
            finally:
                body.close()
            return identity
        raise ConflictError(
            "model_changed",
            f"the model {identity.path} changes while it is read; store "
            "each version under a name of its own",
            object_name=identity.path,
        )
