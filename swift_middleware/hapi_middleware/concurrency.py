"""Green threads and green sockets: the only module that knows eventlet.

Swift is leaving eventlet and collects what it uses of it in
``swift.common.concurrency`` (since 2.38); older releases have eventlet only.
The sockets made here are green whether or not the process is monkey-patched,
so that waiting for the worker never stalls the other requests of a proxy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

try:
    from swift.common.concurrency import (
        GreenletExit,
        Timeout,
        sleep,
        socket,
        spawn,
    )
except ImportError:  # Swift before 2.38
    from eventlet import Timeout, sleep, spawn
    from eventlet.green import socket
    from eventlet.support.greenlets import GreenletExit

__all__ = ["Task", "Timeout", "connect_unix"]

CANCEL_SECONDS = 10.0
_BACKLOG_WAIT_SECONDS = 0.01


class Task:
    """A function that runs in a green thread of its own."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._thread = spawn(function)

    def cancel(self) -> None:
        """End the function where it waits; return when it has ended.

        Harmless after its end.  A function that has not begun never runs.
        """
        self._thread.kill()
        with Timeout(CANCEL_SECONDS, False):
            try:
                self._thread.wait()
            except GreenletExit:
                return


def connect_unix(path: str, timeout_seconds: float) -> Any:
    """A green socket connected to the unix socket at ``path``.

    A full backlog makes a non-blocking connect fail at once with EAGAIN,
    which is not a state that can be polled for: so we ask again.

    Raises:
        TimeoutError: the backlog stayed full for ``timeout_seconds``.
        OSError: nobody listens there, or it must not be used by us.
    """
    deadline = time.monotonic() + timeout_seconds
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(0)
        while True:
            try:
                connected.connect(path)
                return connected
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{path}: backlog full") from None
                sleep(_BACKLOG_WAIT_SECONDS)
    except BaseException:
        connected.close()
        raise
