"""Checks of a request before any part of it runs."""

from __future__ import annotations

from hapi_protocol.errors import PackageError, TooLargeError, UnsupportedError
from hapi_protocol.headers import NUMERICS
from hapi_protocol.job_messages import JobRequest, ModelIdentity
from hapi_protocol.samples import Medium
from hapi_protocol.transforms import EVAL, parse_transform
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_worker.config import WorkerConfig
from hapi_worker.models.device_models import Lease


def check_request(request: JobRequest, config: WorkerConfig) -> None:
    """Checks the fields that need no model.

    Raises:
        AnnotationError: ``unknown_transform``.
        UnsupportedError: ``unsupported_numerics``.
        TooLargeError: ``object_too_large``.
    """
    parse_transform(request.transform)
    if request.numerics not in NUMERICS:
        raise UnsupportedError(
            "unsupported_numerics",
            f"numerics {request.numerics!r} is not supported; allowed: "
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


def check_transform(
    request: JobRequest, lease: Lease | None, config: WorkerConfig
) -> None:
    """Checks that samples can be converted to the leased model's input.

    Raises:
        PackageError: the package has no input transform.
        UnsupportedError: ``unsupported_transform``: the package has no
            augmentation; ``limit_exceeded``: its arrays are too large.
    """
    if lease is None:
        return
    transform = lease.frozen.transform
    if transform is None:
        raise PackageError(
            "bad_package",
            f"the package {lease.digest[:12]} has no input transform, so "
            "samples cannot be converted to its input: build the package "
            "with one",
        )
    length, limit = lease.frozen.form.num_bytes, config.max_sample_bytes
    # Images are bounded by their pixels.
    if isinstance(transform, ArrayTransform) and length > limit:
        raise UnsupportedError(
            "limit_exceeded",
            f"the package {lease.digest[:12]} takes arrays of {length} bytes; "
            f"at most {limit}",
        )
    if parse_transform(request.transform) and transform.augmentation is None:
        raise UnsupportedError(
            "unsupported_transform",
            f"the package {lease.digest[:12]} has no augmentation, so "
            f"{request.transform} has no meaning for it: write the package "
            f"with one, or ask for {EVAL}",
            details={"value": request.transform, "allowed": [EVAL]},
        )


def medium_of(lease: Lease | None) -> Medium | None:
    """Returns the medium of the model's samples; None for an index job."""
    transform = lease.frozen.transform if lease else None
    return transform.medium if transform else None


def check_package(identity: ModelIdentity, config: WorkerConfig) -> None:
    """Checks the length of a package.

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
