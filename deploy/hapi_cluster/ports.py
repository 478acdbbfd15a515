"""Reservation of a cluster's ports.

The supervisor reserves each port with a bound socket that never listens.
With SO_REUSEPORT a server can bind the same port, and no other program can
take it before.
"""

from __future__ import annotations

import errno
import socket

from hapi_cluster.errors import PortBusyError


class PortReservation:
    """One reserved port."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.port = int(sock.getsockname()[1])

    @classmethod
    def take(cls, host: str, port: int) -> PortReservation:
        """Reserves ``port``, or a free one if it is 0.

        Raises:
            PortBusyError: another program has it, even one that would share
                it (SO_REUSEPORT is set only after binding).
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            sock.close()
            raise _busy(host, port, error) from error
        # SO_REUSEADDR was needed for lingering connections of the last run.
        # If kept, others could bind the port while no server listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return cls(sock)

    @classmethod
    def prefer(cls, host: str, port: int) -> PortReservation:
        """Reserves ``port`` if it is free, else another one."""
        try:
            return cls.take(host, port)
        except PortBusyError:
            return cls.take(host, 0)

    def close(self) -> None:
        self._sock.close()


def _busy(host: str, port: int, error: OSError) -> PortBusyError:
    if error.errno == errno.EADDRINUSE:
        return PortBusyError(
            f"port {port} on {host} is taken by another program.",
            "Choose another port, or none for a free one.",
        )
    return PortBusyError(
        f"cannot bind port {port} on {host}: {error.strerror}.",
        "Choose an address of this machine and a port above 1023.",
    )
