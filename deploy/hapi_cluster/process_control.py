"""Linux process control: the directory's lock, children, orphans."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from hapi_cluster.errors import AlreadyRunningError, DirectoryError
from hapi_cluster.paths import ClusterPaths

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STRUCT_FLOCK = "hhqqi4x"
"""``struct flock``: type, whence, start, length, pid."""


def lock_holder(path: Path) -> int | None:
    """Pid of the process that has locked a file; None if there is none.

    Never for the process that has the lock: a POSIX lock is lost when its
    process closes any descriptor of the file.
    """
    question = struct.pack(STRUCT_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except (FileNotFoundError, NotADirectoryError):
        return None
    kind, _, _, _, pid = struct.unpack(STRUCT_FLOCK, answer)
    return None if kind == fcntl.F_UNLCK else int(pid)


@contextlib.contextmanager
def locked(paths: ClusterPaths) -> Iterator[None]:
    """Locks the directory; the kernel ends the lock with this process.

    Raises:
        AlreadyRunningError: another supervisor has the lock.
        DirectoryError: the lock cannot be written.
    """
    try:
        file = paths.lock.open("ab")
    except OSError as error:
        raise DirectoryError(
            f"cannot write {paths.lock}: {error.strerror}.",
            "Choose a directory that you may write.",
        ) from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunningError(
                f"the cluster in {paths.directory} is running already"
                f" (pid {lock_holder(paths.lock)}).",
                "Use it, or stop it first:"
                f" hapi cluster stop {paths.directory}",
            ) from error
        yield


def become_subreaper() -> None:
    """Makes this process the parent of its children's orphans."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with(parent_pid: int) -> Callable[[], None]:
    """A ``preexec_fn`` with which the kernel kills the child at our end."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # The parent may have died before the line above.
        if os.getppid() != parent_pid:
            os._exit(1)

    return in_child


def kill_orphans() -> None:
    """Kills and reaps all remaining children and inherited orphans."""
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in own.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
