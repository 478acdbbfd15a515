"""From a package's bytes to a model that a device can take."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.fork_server import ForkServer
from hapi_splitter.graph.shapes import warm_up
from hapi_splitter.package.reader import PackageLimits, load_package
from hapi_splitter.package.subprocess_validation import validate_package

logger = logging.getLogger(__name__)


class PackageLoad(Protocol):
    """Package bytes → model, on the CPU."""

    def __call__(
        self, package: bytearray, /, *, limits: PackageLimits
    ) -> FrozenGraph: ...


class ValidatingLoader:
    """Loads packages after validating them in processes of their own.

    Args:
        server: forks those processes; it is ended with the loader.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        self._server = server or ForkServer()
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
        validated = validate_package(
            package, limits=limits, server=self._server
        )
        frozen = load_package(package, limits=limits, digest=validated.digest)
        frozen.measured_memory = validated.memory
        return frozen

    def begin(self) -> None:
        """Prepares the first load in the background."""
        self._warm_up.start()
        try:
            self._server.begin()
        except OSError as error:
            logger.warning(
                "cannot start the process that validates packages, and try "
                "again with the first of them: %s",
                error,
            )

    def end(self) -> bool:
        """Ends the server, and what it validates.

        Returns:
            True if no thread is left.
        """
        self._server.end()
        return not self._warm_up.is_alive()


def load_fast(
    load: PackageLoad,
    max_package_bytes: int,
    max_bytes: int,
    package: bytearray,
) -> FrozenGraph:
    """The model with batch norms folded, on the CPU.

    Args:
        load: validates and loads it.
        max_package_bytes: longest package.
        max_bytes: memory of the largest device.
        package: the bytes.
    """
    limits = PackageLimits(
        package_bytes=max_package_bytes, loaded_bytes=max_bytes
    )
    return load(package, limits=limits).to("cpu", fast=True)
