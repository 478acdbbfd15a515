"""Reservation of a cluster's ports.

The supervisor reserves each port with a bound socket that never listens.
With SO_REUSEPORT a server can bind the same port, and no other program can
take it before.
"""

from __future__ import annotations

import errno
import socket

from hapi_cluster.errors import PortBusyError


def reserve(host: str, port: int) -> socket.socket:
    """Reserves ``port``, or a free one if it is 0, until the socket is closed.

    Raises:
        PortBusyError: another program has it, even one that would share it
            (SO_REUSEPORT is set only after binding).
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
    return sock


def reserve_preferred(host: str, port: int) -> socket.socket:
    """Reserves ``port`` if it is free, else another one."""
    try:
        return reserve(host, port)
    except PortBusyError:
        return reserve(host, 0)


def port_of(reservation: socket.socket) -> int:
    """Returns the reserved port."""
    return int(reservation.getsockname()[1])


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
