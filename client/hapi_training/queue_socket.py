"""The socket of a device queue, and who has a turn.  No torch.

Jobs and queue send one JSON object a line.  A job says ``hello`` with its
version, name, weight and device, ``want`` with the number of turns that it
has left, ``done``, and once ``resident`` and ``peak``, its memory between
turns and at most.  The queue answers ``turn``, ``done``, ``noted``,
``alive`` while the job waits, and ``error``.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hapi_client.atomic_file import file_lock
from hapi_protocol.errors import ClientError

VERSION = 1
ALIVE_SECONDS = 2.0
"""Interval at which a queue tells waiting jobs that it lives."""


def turn_lock(path: Path) -> int:
    """A file that holders of turns lock, shared."""
    name = path.with_name(f"{path.name}.turn")
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def is_turn_taken(path: Path) -> bool:
    """True if a job has a turn, as one of a queue that was killed."""
    file = turn_lock(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(file)


def connected(path: Path, timeout_seconds: float) -> socket.socket:
    """Connects to a queue of this user.

    Raises:
        ClientError: ``bad_configuration`` if the path is something else.
        OSError: there is no queue.
    """
    status = path.stat()
    if not stat.S_ISSOCK(status.st_mode):
        raise ClientError(
            "bad_configuration",
            f"{path} is no socket; give that of hapi device-queue",
        )
    if status.st_uid != os.getuid():
        raise ClientError(
            "bad_configuration",
            f"the device queue {path} belongs to user {status.st_uid}, not to "
            f"{os.getuid()}; start one of your own (hapi device-queue)",
        )
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(timeout_seconds)
    try:
        server.connect(str(path))
    except BaseException:
        server.close()
        raise
    return server


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a unix socket."""
    option = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid, uid, _ = struct.unpack("3i", option)
    return pid, uid


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            if not path.name:
                raise ValueError("the path is empty")
            stack.enter_context(file_lock(path))
        except (ClientError, ValueError) as error:
            raise ClientError(
                "bad_configuration",
                f"cannot serve at {path}: {error}; give another path, or end "
                "the device queue that runs there, even if its socket was "
                "deleted",
            ) from error
        yield


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket that only this user can open; deleted at the end."""
    with _alone(path):
        if path.exists() or path.is_symlink():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ClientError(
                    "bad_configuration",
                    f"{path} exists and is no socket; give another path",
                )
            # Of a queue that was killed: a running one has the lock.
            path.unlink()
        server = socket.socket(socket.AF_UNIX)
        mask = os.umask(0o177)
        try:
            server.bind(str(path))
        except OSError as error:
            raise ClientError(
                "bad_configuration",
                f"cannot listen on {path}: {error}; give a path of at most "
                "107 bytes in a folder that you may write to",
            ) from error
        finally:
            os.umask(mask)
        try:
            yield server
        finally:
            path.unlink(missing_ok=True)
