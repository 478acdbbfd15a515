"""HTTP over a unix socket, for ``http.client``."""

from __future__ import annotations

import http.client
import os
import socket


class UnixConnection(http.client.HTTPConnection):
    """A connection to a server that listens on a unix socket.

    Args:
        path: path of the socket.
        timeout: timeout of each step, in seconds.
    """

    def __init__(self, path: str | os.PathLike[str], timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = os.fspath(path)

    def connect(self) -> None:
        """Connects to the socket; called by the first request.

        Raises:
            OSError: nobody listens there, or this process may not connect.
        """
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
