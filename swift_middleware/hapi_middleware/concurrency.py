"""Green threads and green sockets: the only module that imports eventlet.

Swift is leaving eventlet and collects what it uses of it in
``swift.common.concurrency`` (since 2.38); older releases have eventlet only.
The sockets made here are green even if the process is not monkey-patched, so
waiting for the worker never blocks the other requests of a proxy.
"""

from __future__ import annotations

import http.client
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from swift.common.bufferedhttp import http_connect
from swift.common.utils import ContextPool

try:
    from swift.common.concurrency import (
        Empty,
        GreenletExit,
        LightQueue,
        Timeout,
        sleep,
        socket,
        spawn,
    )
except ImportError:  # Swift before 2.38
    from eventlet import Timeout, sleep, spawn
    from eventlet.green import socket
    from eventlet.queue import Empty, LightQueue
    from eventlet.support.greenlets import GreenletExit

try:
    # Swift's connections are of eventlet's copy, whose errors are others.
    from eventlet.green.httplib import HTTPException as _GreenError
except ImportError:
    _GreenError = http.client.HTTPException

__all__ = [
    "HTTP_ERRORS",
    "Empty",
    "LightQueue",
    "Task",
    "Timeout",
    "connect_unix",
    "http_connect",
    "map_ahead",
    "sleep",
    "yielding",
]

HTTP_ERRORS = (http.client.HTTPException, _GreenError)
"""Errors of HTTP, of connections of the standard library and of Swift."""
CANCEL_SECONDS = 10.0
"""A killed thread ends at its next wait; longer would mean a defect."""
SEND_BUFFER_BYTES = 1 << 20
"""Send buffer requested from the kernel, which grants at most twice
``net.core.wmem_max``.  The default buffer holds three chunks of a source;
waking up for them took 10 to 20 % of a proxy's CPU time."""
_BACKLOG_WAIT_SECONDS = 0.01
"""Only avoids a busy loop while the backlog is full; not measured."""
_TURN_SECONDS = 0.002
"""Others wait no longer for a copy: less than for a disk's seek."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def _until_killed(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the function's result; None if its thread is killed.

    A green thread keeps the exception that ended it, and with it the frames
    and their sockets and bodies, until the next garbage collection.
    """
    try:
        return function(*args)
    except GreenletExit:
        return None


class Task:
    """A function that runs in a green thread of its own."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._thread = spawn(_until_killed, function)

    def cancel(self) -> None:
        """Stops the function at its next wait and returns when it ended.

        Does nothing after its end.  A function not yet started never runs.
        """
        self._thread.kill()
        with Timeout(CANCEL_SECONDS, False):
            try:
                self._thread.wait()
            except GreenletExit:
                return


def map_ahead(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    concurrency: int,
) -> Generator[_Result, None, None]:
    """Maps a function over items, in order, in green threads.

    At most ``concurrency`` items and results exist at a time, including the
    result that the caller holds.  When the iterator ends or is closed, all
    its threads have ended.
    """
    # GreenPool.imap() runs in a pool that nobody closes and holds twice as
    # many results.
    pool = ContextPool(concurrency)
    try:
        ahead: deque[Any] = deque()
        for item in items:
            ahead.append(pool.spawn(_until_killed, function, item))
            if len(ahead) == concurrency:
                yield ahead.popleft().wait()
        while ahead:
            yield ahead.popleft().wait()
    finally:
        try:
            _kill_all(pool)
        finally:
            # Each kill lets other threads run; one may kill this thread.
            _kill_all(pool)
            with Timeout(CANCEL_SECONDS, False):
                while pool.running():
                    pool.waitall()


def _kill_all(pool: ContextPool) -> None:
    # ContextPool.close(), which Swift has since 2.31.
    for thread in list(pool.coroutines_running):
        thread.kill()


def yielding(chunks: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Yields chunks, and lets other green threads run every 2 ms.

    A copy from a local disk to a local socket never waits, so that other
    requests of the process would wait for its end.
    """
    started = time.monotonic()
    for chunk in chunks:
        yield chunk
        if time.monotonic() - started > _TURN_SECONDS:
            sleep()
            started = time.monotonic()


def connect_unix(path: str, timeout_seconds: float) -> Any:
    """Connects a green socket to the unix socket at ``path``.

    If the backlog is full, a non-blocking connect fails at once with EAGAIN,
    which cannot be polled for: the connect is repeated.

    Raises:
        TimeoutError: the backlog stayed full for ``timeout_seconds``.
        OSError: nobody listens there, or this process may not connect.
    """
    deadline = time.monotonic() + timeout_seconds
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES
        )
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
