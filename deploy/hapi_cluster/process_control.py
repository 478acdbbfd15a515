"""Linux process control for the supervisor: locks, children, parent's end."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from hapi_cluster.errors import (
    AlreadyRunningError,
    DirectoryError,
    StartError,
)
from hapi_cluster.paths import TEMPORARY_PREFIX, ClusterPaths
from hapi_cluster.process_identity import ProcessIdentity
from hapi_cluster.state import read_state, write_private

KILL_SECONDS = 5.0


def remove_leftovers(paths: ClusterPaths) -> bool:
    """Kills the last run's processes and removes its sockets.

    Only for the supervisor, or if the directory has no living supervisor.

    Returns:
        True if a process was still running.
    """
    state = read_state(paths.state)
    was_running = False
    for child in state.get("children", {}).values():
        identity = ProcessIdentity.parse(child["process"] or "")
        if identity is not None and identity.send(signal.SIGKILL):
            identity.wait(KILL_SECONDS)
            was_running = True
    for path in paths.run.glob("*"):
        path.unlink()
    folder = Path(state.get("temporary_folder") or "/")
    if folder.name.startswith(TEMPORARY_PREFIX) and folder.exists():
        shutil.rmtree(folder)
    return was_running


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def locked(paths: ClusterPaths) -> Iterator[None]:
    """Locks the directory and keeps its pid file.

    The lock decides, because it ends with its process; a pid file does not.

    Raises:
        AlreadyRunningError: another supervisor holds the lock.
        DirectoryError: the lock cannot be written.
    """
    try:
        descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DirectoryError(
            f"cannot write {paths.lock}: {error.strerror}.",
            "Choose a directory that you may write.",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AlreadyRunningError(
            f"the cluster in {paths.directory} is running already.",
            f"Use it, or stop it first: hapi cluster stop {paths.directory}",
        ) from error
    try:
        write_private(paths.pid_file, f"{ProcessIdentity.of(os.getpid())}\n")
        yield
        paths.pid_file.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def watched_parent(pid: int | None) -> Iterator[int | None]:
    """A pidfd that is readable when the given process ends.

    PR_SET_PDEATHSIG would fire when the *thread* that started the supervisor
    ends.
    """
    if pid is None:
        yield None
        return
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise StartError(
            f"process {pid}, at whose end the cluster should stop, has ended.",
            "Start it again.",
        ) from error
    try:
        yield handle
    finally:
        os.close(handle)


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


def dead_child() -> int | None:
    """Pid of a dead child that is not yet reaped; None if there is none."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        dead = os.waitid(os.P_ALL, 0, flags)
    except ChildProcessError:
        return None
    return None if dead is None else dead.si_pid


def kill_orphans() -> None:
    """Kills and reaps all remaining children and inherited orphans."""
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in own.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
