"""The body of a job: HTTP/1.1 chunks, read strictly and with deadlines.

cheroot's own reader takes a cut-off last chunk for a clean end, holds a whole
chunk of any size in memory and cannot say how long it waited.  This one reads
from the same buffered connection, ends only at a complete last chunk, and is
woken by :meth:`Connection.stop_reading`.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any

from hapi_protocol.errors import (
    AnnotationError,
    HapiError,
)

POLL_SECONDS = 0.25
"""How soon a closed connection is noticed."""

IsGone = Callable[[], bool]
"""Whether who asked waits no more for the answer."""


def never_gone() -> bool:
    """Of an asker without a connection."""
    return False


class SenderGoneError(Exception):
    """The sender closed the connection before the end of the body."""


class Connection:
    """A request's socket, for the two things WSGI has no words for.

    Args:
        sock: of the connection.
        reader: the connection's buffered reader (a ``peek`` or ``read1``
            makes at most one system call).
    """

    def __init__(self, sock: socket.socket, reader: Any) -> None:
        self._socket = sock
        self.reader = reader

    def wait_readable(self, seconds: float) -> bool:
        """Whether a read will return at once; waits up to ``seconds``."""
        if self.reader.has_data():
            return True
        return bool(_poll(self._socket, select.POLLIN, seconds))

    def is_gone(self) -> bool:
        """Whether the other end is closed in both directions."""
        return bool(
            _poll(self._socket, 0, 0) & (select.POLLHUP | select.POLLERR)
        )

    def stop_reading(self) -> None:
        """Wakes a thread that reads, and stops the sender."""
        self._shut(socket.SHUT_RD)

    def break_off(self) -> None:
        """Wakes threads that read or write; the other end sees the end."""
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:  # the connection is closed already
            return


def _poll(sock: socket.socket, events: int, seconds: float) -> int:
    if sock.fileno() < 0:
        return select.POLLHUP
    poller = select.poll()
    poller.register(sock, events)
    found = poller.poll(seconds * 1000)
    return found[0][1] if found else 0


def asker_gone() -> HapiError:
    """What nobody reads, and the metrics count."""
    return AnnotationError(
        "bad_request", "the other end closed the connection while it waited"
    )
