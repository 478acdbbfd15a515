"""A link of known speed in front of a cluster, on this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from waiting import SECONDS

PIECE_BYTES = 2048


class SlowLink:
    """Passes connections on; their answers share so many bytes a second.

    Attributes:
        port: where it listens.
        answer_bytes: bytes of the answers so far.
    """

    def __init__(self, far: tuple[str, int], bytes_per_second: float) -> None:
        self._far = far
        self._rate = bytes_per_second
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.answer_bytes = 0
        self._lock = threading.Lock()
        self._free_at = time.monotonic()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for each in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SECONDS)
        for each in (self._server, *self._sockets):
            each.close()

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was shut down
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._far, SECONDS)
                far.settimeout(None)
                self._sockets += [near, far]
                self._start(self._copy, near, far, False)
                self._start(self._copy, far, near, True)

    def _copy(
        self, source: socket.socket, sink: socket.socket, slowly: bool
    ) -> None:
        with contextlib.suppress(OSError):  # either end has closed
            while data := source.recv(PIECE_BYTES):
                if slowly:
                    self._wait(len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _wait(self, num_bytes: int) -> None:
        with self._lock:
            self.answer_bytes += num_bytes
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self._rate
            wait = self._free_at - now
        time.sleep(wait)


@contextlib.contextmanager
def slow_link(url: str, bytes_per_second: float) -> Iterator[str]:
    """A URL of the same server, whose answers come that slowly."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    link = SlowLink((parts.hostname, parts.port), bytes_per_second)
    try:
        yield url.replace(f":{parts.port}", f":{link.port}", 1)
    finally:
        link.close()
