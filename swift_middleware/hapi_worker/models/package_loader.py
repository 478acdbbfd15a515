"""From a package's bytes to a model that a device can take."""

from __future__ import annotations

import threading
from typing import Protocol

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.graph.shapes import warm_up
from hapi_splitter.package.reader import PackageLimits, load_package
from hapi_splitter.package.subprocess_validation import validate_package
from hapi_splitter.package.validation_server import ValidationServer


class Load(Protocol):
    """Package bytes → model, on the CPU."""

    def __call__(
        self, package: bytearray, /, *, limits: PackageLimits
    ) -> FrozenGraph: ...


class ValidatingLoader:
    """Loads packages after validating them in processes of their own.

    Args:
        server: forks those processes; it is ended with the loader.
    """

    def __init__(self, server: ValidationServer | None = None) -> None:
        self._server = server or ValidationServer()
        self._warm_up = threading.Thread(
            target=warm_up, name="warm-up", daemon=True
        )

    def __call__(
        self, package: bytearray, /, *, limits: PackageLimits
    ) -> FrozenGraph:
        """Validates and loads a package.

        Raises:
            PackageError: naming what is wrong with it.
            UnavailableError: the validation was killed, see
                :func:`validate_package`.
        """
        found = validate_package(package, limits=limits, server=self._server)
        frozen = load_package(package, limits=limits, digest=found.digest)
        frozen.measured_memory = found.memory
        return frozen

    def begin(self) -> None:
        """Prepares the first load in the background.

        Raises:
            OSError: a process cannot be started.
        """
        self._server.begin()
        self._warm_up.start()

    def end(self) -> bool:
        """Ends the server; returns True if no thread is left."""
        self._server.end()
        return not self._warm_up.is_alive()


def load_fast(
    load: Load, max_package_bytes: int, package: bytearray
) -> FrozenGraph:
    """The model with batch norms folded, on the CPU."""
    limits = PackageLimits(package_bytes=max_package_bytes)
    return load(package, limits=limits).to("cpu", fast=True)
