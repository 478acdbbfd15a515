"""Green threads and green sockets: the only module that knows eventlet.

Swift is leaving eventlet and collects what it uses of it in
``swift.common.concurrency`` (since 2.38); older releases have eventlet only.
The sockets made here are green whether or not the process is monkey-patched,
so that waiting for the worker never stalls the other requests of a proxy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from swift.common.utils import ContextPool

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

__all__ = ["Task", "Timeout", "connect_unix", "run_ahead"]

CANCEL_SECONDS = 10.0
SEND_BUFFER_BYTES = 1 << 20
"""Asked of the kernel, which gives twice ``net.core.wmem_max`` at most.  In
its default buffer there is room for three pieces of a source, and waking up
for them took a tenth to a fifth of a proxy's CPU seconds."""
_BACKLOG_WAIT_SECONDS = 0.01

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def _until_killed(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns; None, for nobody, where it is killed.

    A green thread keeps the exception that ended it, and so the frames with
    all that they hold, sockets and bodies among it, until the next collection
    of garbage.
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
        """End the function where it waits; return when it has ended.

        Harmless after its end.  A function that has not begun never runs.
        """
        self._thread.kill()
        with Timeout(CANCEL_SECONDS, False):
            try:
                self._thread.wait()
            except GreenletExit:
                return


def run_ahead(
    function: Callable[[_Item], _Result], items: Iterable[_Item], most: int
) -> Generator[_Result, None, None]:
    """What ``function`` makes of each item, in order.

    The next items are worked on meanwhile, each in a green thread: there are
    at most ``most`` of them and of results at a time, the one that the caller
    has been given among them.  When the iterator ends, or is closed, all of
    its threads have ended where they waited.
    """
    # Not its imap(): that runs in a pool of its own, which nobody closes,
    # and holds twice as many results.
    pool = ContextPool(most)
    try:
        ahead: deque[Any] = deque()
        for item in items:
            ahead.append(pool.spawn(_until_killed, function, item))
            if len(ahead) == most:
                yield ahead.popleft().wait()
        while ahead:
            yield ahead.popleft().wait()
    finally:
        try:
            pool.close()
        finally:
            # Each kill lets others run, who may end this thread meanwhile.
            pool.close()
            with Timeout(CANCEL_SECONDS, False):
                while pool.running():
                    pool.waitall()


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
