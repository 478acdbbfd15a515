"""systemd: inherited sockets (sd_listen_fds(3)) and notifications.

Inherited sockets stay open while the worker restarts, so that connections
wait instead of being refused.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import time
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

FIRST_DESCRIPTOR = 3
"""``SD_LISTEN_FDS_START`` of sd_listen_fds(3)."""


def inherited_sockets(
    environment: MutableMapping[str, str] = os.environ,
    first_descriptor: int = FIRST_DESCRIPTOR,
) -> dict[str, socket.socket]:
    """Returns listening unix sockets by path.

    The variables that name them are removed from the environment.

    Raises:
        ValueError: one of them is not a listening unix stream socket.
    """
    count = environment.pop("LISTEN_FDS", "")
    pid = environment.pop("LISTEN_PID", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    sockets = {}
    for number in range(first_descriptor, first_descriptor + int(count)):
        opened = _listening(number)
        sockets[str(opened.getsockname())] = opened
    return sockets


def _listening(descriptor: int) -> socket.socket:
    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        opened = socket.socket(fileno=descriptor)
        if (
            opened.family == socket.AF_UNIX
            and opened.type == socket.SOCK_STREAM
            and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            opened.set_inheritable(False)
            return opened
    raise ValueError(
        f"descriptor {descriptor}, passed by systemd, is not a listening "
        "unix stream socket: see hapi-worker.socket"
    )


def monotonic_usec() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def notify_systemd(state: str) -> None:
    """Sends a state to systemd, if it started this process (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.connect(address)
            notifier.sendall(state.encode())
    except OSError as error:
        logger.warning("cannot notify systemd: %s", error)
