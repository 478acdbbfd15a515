"""From a package's bytes to a model that a device can take."""

from __future__ import annotations

from typing import Protocol

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.package.reader import PackageLimits, load_package
from hapi_splitter.package.subprocess_validation import validate_package


class Load(Protocol):
    """Package bytes → model, on the CPU."""

    def __call__(
        self, package: bytearray, /, *, limits: PackageLimits
    ) -> FrozenGraph: ...


def load_validated(
    package: bytearray, /, *, limits: PackageLimits
) -> FrozenGraph:
    """Loads a package after validating it in a process of its own.

    Raises:
        PackageError: naming what is wrong with it.
    """
    found = validate_package(package, limits=limits)
    frozen = load_package(package, limits=limits, digest=found.digest)
    frozen.measured_memory = found.memory
    return frozen


def load_fast(
    load: Load, max_package_bytes: int, package: bytearray
) -> FrozenGraph:
    """The model with batch norms folded, on the CPU."""
    limits = PackageLimits(package_bytes=max_package_bytes)
    return load(package, limits=limits).to("cpu", fast=True)
