"""The worker with its two sockets, as a service."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hapi_splitter.fork_server import ForkServer
from hapi_worker.config import WorkerConfig
from hapi_worker.jobs.worker import Worker
from hapi_worker.models.package_loader import PackageLoad
from hapi_worker.server.app import WorkerApp
from hapi_worker.server.unix_server import SocketInUseError, UnixServer

ADMIN_SUFFIX = ".admin"
ADMIN_THREADS = 2
"""One for metrics and one for health, also while the other hangs."""
NO_LISTENERS: Mapping[str, socket.socket] = MappingProxyType({})


class Service:
    """A worker and its two sockets.

    Args:
        config: the operator's options; ``socket`` names both sockets.
        load: makes a model from package bytes.
        fork_server: forks the processes that decode large images.
        out_of_service: called when the last device has failed.
        listeners: sockets that are open already, by path.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        load: PackageLoad,
        fork_server: ForkServer | None = None,
        out_of_service: Callable[[], None] = lambda: None,
        listeners: Mapping[str, socket.socket] = NO_LISTENERS,
    ) -> None:
        self.worker = Worker(
            config,
            load=load,
            fork_server=fork_server,
            out_of_service=out_of_service,
        )
        timeout = config.stall_seconds
        self._servers = [
            UnixServer(
                config.socket,
                config.socket_mode,
                WorkerApp(self.worker),
                num_threads=self.worker.num_server_threads,
                timeout_seconds=timeout,
                listener=listeners.get(config.socket),
            ),
            UnixServer(
                config.socket + ADMIN_SUFFIX,
                config.socket_mode,
                WorkerApp(self.worker, admin_only=True),
                num_threads=ADMIN_THREADS,
                timeout_seconds=timeout,
                listener=listeners.get(config.socket + ADMIN_SUFFIX),
            ),
        ]
        self._begun: list[UnixServer] = []
        self.ended = False
        """True once :meth:`end` has ended all threads."""

    def begin(self) -> None:
        """Listens on both sockets.

        Raises:
            SocketInUseError: another worker uses a socket.
            OSError: a socket cannot be opened; then both are closed.
        """
        try:
            for server in self._servers:
                server.begin()
                self._begun.append(server)
        except (SocketInUseError, OSError):
            self.end()
            raise

    def drain(self) -> bool:
        """Refuses new jobs; returns True if all running ones end in time."""
        return self.worker.admission.drain(self.worker.config.drain_seconds)

    def end(self) -> None:
        """Closes the sockets, aborts running jobs, ends all threads."""
        self.worker.models.close()
        self.worker.profiling.close()
        self.worker.admission.abort_all()
        for server in self._begun:
            server.end()
        self._begun.clear()
        self.ended = self.worker.close()
