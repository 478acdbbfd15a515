"""Publishes packages of pretrained models in a container of the account."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hapi_client.model.package_store import package_name, upload_package
from hapi_client.model.registry import Model, ModelSource, parse_freeze
from hapi_client.model.split_arguments import input_transform
from hapi_client.progress import Reporter
from hapi_client.swift.connection import Connection
from hapi_protocol.errors import ClientError
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import digest_of, write_package

TIMM = "timm:"
PUBLISHED, PRESENT, MISSING = "published", "present", "missing"
FAILED = "failed"


@dataclass(frozen=True)
class PublishedPackage:
    """The outcome for one model at one freeze point.

    Attributes:
        model: name of the model.
        freeze: last frozen module, as split or as given.
        state: ``published``; ``present`` if it was published before;
            ``missing`` in a dry run; ``failed``.
        digest: sha256 of the package, in hex; None if it failed.
        bytes: length of the package; 0 if it failed.
        problem: reason of the failure, or None.
    """

    model: str
    freeze: Any
    state: str
    digest: str | None = None
    bytes: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Publisher:
    """Publishes packages, as jobs with the same weights would store them.

    Attributes:
        connection: connection to the account of the container.
        container: an existing container, unless ``dry_run``.
        weights: name of torchvision's published weights.
        reporter: receives the steps.
        dry_run: True to publish nothing.
    """

    connection: Connection
    container: str
    weights: str
    reporter: Reporter
    dry_run: bool

    def publish(
        self, name: str, freezes: Sequence[str | None]
    ) -> Iterator[PublishedPackage]:
        """Publishes a model at each freeze point.

        Any error is an outcome, so that other models are published.

        Args:
            name: name of a torchvision model, or ``timm:NAME``.
            freezes: modules as in :func:`parse_freeze`.
        """
        try:
            model, transform = build_pretrained(name, self.weights)
        except Exception as error:  # of any library, or of a download
            yield from (_failed(name, freeze, error) for freeze in freezes)
            return
        for freeze in freezes:
            try:
                yield self._publish(name, model, transform, freeze)
            except Exception as error:  # of the model's own code, too
                yield _failed(name, freeze, error)

    def _publish(
        self, name: str, model: Model, transform: Any, freeze: str | None
    ) -> PublishedPackage:
        inputs = input_transform(transform)
        parts = split(
            model, parse_freeze(model, freeze, inputs), transform=inputs
        )
        with tempfile.TemporaryDirectory(prefix="hapi-package-") as folder:
            info = write_package(parts.frozen, Path(folder) / "model.hapi")
            stored = self.connection.head(
                self.container, package_name(info.digest)
            )
            md5 = digest_of(parts.frozen, "md5")
            if stored is not None and stored.etag == md5:
                state = PRESENT
            elif self.dry_run:
                state = MISSING
            else:
                upload_package(
                    self.connection,
                    self.container,
                    info.path,
                    info.digest,
                    self.reporter.reading,
                )
                state = PUBLISHED
        return PublishedPackage(
            name, parts.freeze, state, info.digest, info.length_bytes
        )


def _failed(
    name: str, freeze: str | None, error: Exception
) -> PublishedPackage:
    problem = str(error) or type(error).__name__
    return PublishedPackage(name, freeze, FAILED, problem=problem)


def build_pretrained(name: str, weights: str) -> tuple[Model, Any]:
    """Builds a model with published weights, and their transform.

    The library downloads weights that it has not cached.

    Args:
        name: name of a torchvision model, or ``timm:NAME``.
        weights: name of torchvision's weights; the tag of timm's is part of
            NAME.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
        Exception: of timm, for unknown names and failed downloads.
    """
    if not name.startswith(TIMM):
        return ModelSource(name, weights).build_with_transform()
    try:
        timm: Any = import_module("timm")
    except ImportError as error:
        raise ClientError(
            "bad_configuration", f"{name} needs timm: pip install timm"
        ) from error
    model = timm.create_model(name.removeprefix(TIMM), pretrained=True)
    data = timm.data.resolve_model_data_config(model)
    return model, timm.data.create_transform(**data, is_training=False)
