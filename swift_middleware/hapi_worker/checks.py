"""What is wrong with a request, before anything of it runs."""

from __future__ import annotations

from hapi_protocol.errors import (
    AnnotationError,
    PackageError,
    TooLargeError,
    UnsupportedError,
)
from hapi_protocol.headers import NUMERICS, TRANSFORMS
from hapi_protocol.messages import JobRequest, ModelIdentity
from hapi_worker.config import WorkerConfig
from hapi_worker.resident import Lease


def check_request(request: JobRequest, config: WorkerConfig) -> None:
    """
    Raises:
        AnnotationError: ``unknown_transform``.
        UnsupportedError: ``unsupported_numerics``.
        TooLargeError: ``object_too_large``.
    """
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
    length, limit = request.source_length_bytes, config.max_object_bytes
    if length is not None and length > limit:
        raise TooLargeError(
            "object_too_large",
            f"object {request.source_name} has {length} bytes; at most "
            f"{limit}",
            object_name=request.source_name,
        )


def check_transform(lease: Lease | None) -> None:
    """
    Raises:
        PackageError: images cannot be made the model's input.
    """
    if lease is not None and lease.frozen.transform is None:
        raise PackageError(
            "bad_package",
            f"the package {lease.digest[:12]} has no input transform, so "
            "images cannot be made its input: write it with one",
        )


def check_package(identity: ModelIdentity, config: WorkerConfig) -> None:
    """
    Raises:
        TooLargeError: ``package_too_large``.
    """
    limit = config.max_package_bytes
    if identity.length_bytes > limit:
        raise TooLargeError(
            "package_too_large",
            f"the package {identity.path} has {identity.length_bytes} "
            f"bytes; at most {limit}",
            object_name=identity.path,
        )
