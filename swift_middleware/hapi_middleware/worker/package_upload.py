"""Uploads a model package to the worker if a request needs it there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.requests.package import Package
from hapi_middleware.requests.subrequests import ObjectBody
from hapi_protocol.errors import (
    PACKAGE_REFUSED,
    ConflictError,
    UnavailableError,
)
from hapi_protocol.job_messages import ModelIdentity

MAX_VERSIONS = 2
"""Versions of a package that one request looks at."""

T = TypeVar("T")


class PackageStore(Protocol):
    """Keeps the packages of a worker."""

    def put_model(
        self, identity: ModelIdentity, body: ObjectBody, trans_id: str
    ) -> None:
        """Uploads a package."""


@dataclass(eq=False)
class PackageUploader:
    """Asks the worker, and uploads the package if it is missing.

    Args:
        worker: where the package is missing.
        package: a package that the caller may read.
        metrics: metrics of the filter.
        trans_id: transaction id of the client's request.
        max_uploads: uploads after which the worker does not keep the package.
    """

    worker: PackageStore
    package: Package
    metrics: FilterMetrics
    trans_id: str
    max_uploads: int

    def ask(
        self, identity: ModelIdentity, ask: Callable[[ModelIdentity], T]
    ) -> T:
        """Calls ``ask``, after uploads of the package if it needs them.

        Args:
            identity: identity of the package at its authorisation.
            ask: called with the package's current identity; raises
                ``model_needed`` if the worker does not have it.

        Returns:
            The result of ``ask``.

        Raises:
            ConflictError: ``model_changed``: the package keeps changing.
            UnavailableError: the worker does not keep the package.
            HapiError: errors of ``ask`` and of the upload.
        """
        for number in range(self.max_uploads + 1):
            try:
                return ask(identity)
            except ConflictError as error:
                if error.code != "model_needed":
                    raise
            if number < self.max_uploads:
                identity = self._upload(identity)
        raise UnavailableError(
            "service_unavailable",
            "the worker does not keep the model; try again later",
            retry_after=5,
            details={PACKAGE_REFUSED: True},
        )

    def _upload(self, identity: ModelIdentity) -> ModelIdentity:
        """Uploads the package and returns its current identity."""
        for _ in range(MAX_VERSIONS):
            body = self.package.open(identity)
            if body is None:
                identity = self.package.identify_again()
                continue
            self.metrics.count("model_uploads")
            try:
                with self.metrics.timed("model_upload"):
                    self.worker.put_model(identity, body, self.trans_id)
            finally:
                body.close()
            return identity
        raise ConflictError(
            "model_changed",
            f"the model {identity.path} changed while it was read; store "
            "each version under its own name",
            object_name=identity.path,
        )
