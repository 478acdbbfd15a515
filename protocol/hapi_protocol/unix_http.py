"""HTTP over a unix socket, as ``http.client`` speaks it."""

from __future__ import annotations

import http.client
import os
import socket


class UnixConnection(http.client.HTTPConnection):
    """A connection to a server that listens on a unix socket.

    Args:
        path: of the socket.
        timeout: seconds, of each step.
    """

    def __init__(self, path: str | os.PathLike[str], timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = os.fspath(path)

    def connect(self) -> None:
        """Called by the first request.

        Raises:
            OSError: nobody listens there, or one may not connect.
        """
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
