"""Connection to the peer of a request: readiness, disconnection, shutdown."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hapi_protocol.errors import (
    AnnotationError,
    HapiError,
)

POLL_SECONDS = 0.25
"""Interval of the checks for a closed connection."""

IsDisconnected = Callable[[], bool]
"""Returns True if the caller waits no more for the response."""


def always_connected() -> bool:
    """The :data:`IsDisconnected` of a caller without a connection."""
    return False


class ClientDisconnectedError(Exception):
    """The peer closed the connection before the end of the body."""


@dataclass(eq=False)
class PeerConnection:
    """A request's socket, for what WSGI does not offer.

    Args:
        sock: the socket.
        reader: the connection's buffered reader (a ``peek`` or ``read1``
            makes at most one system call).
    """

    sock: socket.socket
    reader: Any

    def wait_readable(self, seconds: float) -> bool:
        """Returns True once a read does not block; waits up to ``seconds``."""
        if self.reader.has_data():
            return True
        return bool(_poll(self.sock, select.POLLIN, seconds))

    def is_disconnected(self) -> bool:
        """Returns True if the peer closed both directions."""
        return bool(_poll(self.sock, 0, 0) & (select.POLLHUP | select.POLLERR))

    def stop_reading(self) -> None:
        """Wakes a thread that reads, and stops the peer from sending."""
        self._shut(socket.SHUT_RD)

    def break_off(self) -> None:
        """Closes both directions; wakes threads that read or write."""
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        try:
            self.sock.shutdown(how)
        except OSError:  # the connection is closed already
            return


def _poll(sock: socket.socket, events: int, seconds: float) -> int:
    if sock.fileno() < 0:
        return select.POLLHUP
    poller = select.poll()
    poller.register(sock, events)
    polled = poller.poll(seconds * 1000)
    return polled[0][1] if polled else 0


def client_disconnected_error() -> HapiError:
    """The refusal of a caller that disconnected; only metrics see it."""
    return AnnotationError(
        "bad_request", "the caller closed the connection while it waited"
    )
