"""The worker with its two sockets, as a service."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from hapi_worker.jobs.worker import Worker
from hapi_worker.server.app import WorkerApp
from hapi_worker.server.unix_server import SocketInUseError, UnixServer

ADMIN_SUFFIX = ".admin"
ADMIN_THREADS = 2
"""One for metrics and one for health, also while the other hangs."""


@dataclass(eq=False)
class Service:
    """A worker and its two sockets.

    Args:
        worker: the worker; its option ``socket`` names both sockets.
        listeners: sockets that are open already, by path.
    """

    worker: Worker
    listeners: Mapping[str, socket.socket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.worker.config
        self._servers = [
            UnixServer(
                path,
                config.socket_mode,
                WorkerApp(self.worker, admin_only=is_admin),
                num_threads=num_threads,
                timeout_seconds=config.stall_seconds,
                listener=self.listeners.get(path),
            )
            for path, is_admin, num_threads in (
                (config.socket, False, self.worker.num_server_threads),
                (config.socket + ADMIN_SUFFIX, True, ADMIN_THREADS),
            )
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
