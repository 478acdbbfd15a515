"""An embedded Swift cluster: start, attach, status, stop."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hapi_cluster.configs import USERS
from hapi_cluster.errors import (
    NotAClusterError,
    NotRunningError,
    ServerEndedError,
    StopError,
)
from hapi_cluster.paths import ClusterPaths, read_state
from hapi_cluster.preflight import is_cluster, prepare_directory, require_swift
from hapi_cluster.process_control import lock_holder
from hapi_cluster.settings import DEFAULT_STOP_SECONDS, ClusterSettings
from hapi_cluster.start import KILL_SECONDS, spawn_supervisor
from hapi_cluster.supervisor import run_cluster

STOP_MARGIN_SECONDS = 30.0
"""Time for the supervisor's own end, added to its children's."""
DEFAULT_USER = "test:tester"


class Cluster:
    """A Swift cluster on this machine, in one directory.

    ::

        with Cluster.start("/dev/shm/swift") as cluster:
            print(cluster.auth_url, cluster.user, cluster.key)

    Leaving the ``with`` block stops it and keeps its data.  Without such a
    block it keeps running, and any process may :meth:`attach` to it.  If one
    of its servers ends, the whole cluster ends, and the block raises
    :class:`~hapi_cluster.errors.ServerEndedError`.

    Attributes:
        directory: absolute path of the cluster.
        user: name of the default user.
        key: key of the default user.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).expanduser().resolve()
        self.user = DEFAULT_USER
        self.key = USERS[DEFAULT_USER][0]
        self._paths = ClusterPaths(self.directory)
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        directory: str | os.PathLike[str],
        *,
        die_with_parent: bool = False,
        **settings: Any,
    ) -> Cluster:
        """Starts a cluster and returns when all servers answer.

        Args:
            directory: created if needed; a cluster that it already holds
                serves its data again.
            die_with_parent: stop the cluster when this process ends.
            **settings: fields of :class:`ClusterSettings`.

        Raises:
            ClusterError: see :mod:`hapi_cluster.errors`.
        """
        cluster, checked = cls._checked(directory, settings)
        cluster._process = spawn_supervisor(
            cluster._paths, checked, die_with_parent
        )
        return cluster

    @classmethod
    def run(
        cls,
        directory: str | os.PathLike[str],
        on_ready: Callable[[dict[str, Any]], None],
        **settings: Any,
    ) -> None:
        """Runs a cluster in this process until SIGINT, SIGTERM or SIGHUP.

        Only for a process that has no children: all are killed at the end.

        Args:
            directory: see :meth:`start`.
            on_ready: called with the state when all servers answer.  In this
                process, :meth:`status` would release the directory's lock.
            **settings: fields of :class:`ClusterSettings`.

        Raises:
            ClusterError: it cannot start, or a server ended.
        """
        cluster, checked = cls._checked(directory, settings)
        run_cluster(cluster._paths, checked, on_ready)

    @classmethod
    def _checked(
        cls, directory: str | os.PathLike[str], settings: dict[str, Any]
    ) -> tuple[Cluster, ClusterSettings]:
        checked, cluster = ClusterSettings(**settings), cls(directory)
        require_swift()
        prepare_directory(cluster._paths)
        return cluster, checked

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, **settings: Any) -> Iterator[Cluster]:
        """Runs a cluster that ends with this process and leaves no files.

        It is in /dev/shm if possible, because ext4 limits metadata to 4 kB.
        """
        shm = Path("/dev/shm")  # noqa: S108
        parent = shm if os.access(shm, os.W_OK) else None
        directory = Path(tempfile.mkdtemp(prefix="hapi-", dir=parent))
        settings.setdefault("die_with_parent", True)
        try:
            with cls.start(directory, **settings) as cluster:
                yield cluster
        finally:
            shutil.rmtree(directory)

    @classmethod
    def attach(cls, directory: str | os.PathLike[str]) -> Cluster:
        """Returns the running cluster of a directory.

        Raises:
            NotRunningError: no cluster is running there.
        """
        cluster = cls(directory)
        if not cluster.running:
            raise NotRunningError(
                f"no cluster is running in {cluster.directory}.",
                f"Start it: hapi cluster start {cluster.directory}",
            )
        return cluster

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if "error" in (state := self._state()):
            message, _, remedy = state["error"].rpartition("\n")
            raise ServerEndedError(message, remedy)

    @property
    def running(self) -> bool:
        return self.supervisor_pid is not None

    @property
    def supervisor_pid(self) -> int | None:
        return lock_holder(self._paths.lock)

    @property
    def proxy_url(self) -> str:
        """URL of the proxy, without a path."""
        return str(self._state()["proxy_url"])

    @property
    def auth_url(self) -> str:
        """URL of the authentication (ST_AUTH of swiftclient)."""
        return f"{self.proxy_url}/auth/v1.0"

    @property
    def worker_socket(self) -> Path | None:
        """Path of the worker's unix socket; None without a worker."""
        path = self._state()["worker_socket"]
        return None if path is None else Path(path)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables ST_AUTH, ST_USER and ST_KEY."""
        return {
            "ST_AUTH": self.auth_url,
            "ST_USER": self.user,
            "ST_KEY": self.key,
        }

    def log(self, name: str) -> Path:
        """Path of the log of ``swift`` (or ``proxy`` …), ``worker``, …"""
        return self._paths.log(name)

    def status(self) -> dict[str, Any]:
        """The current state as JSON values, also of a stopped cluster.

        ``status`` is ``running``, ``starting``, ``stopped``, ``died`` or
        ``absent``.  ``error`` has the reason why it died, unless its
        supervisor was killed.
        """
        state: dict[str, Any] = {
            "directory": str(self.directory),
            "status": "absent",
        }
        if is_cluster(self._paths):
            state["status"] = "stopped"
        supervisor_pid = self.supervisor_pid
        state |= read_state(self._paths.state)
        if "children" not in state:
            return state
        if supervisor_pid is None:
            if state["status"] != "stopped":
                state["status"] = "died"
            for child in state["children"].values():
                child["pid"] = None
        urls = {"auth_url": self.auth_url, "supervisor_pid": supervisor_pid}
        return {**state, **urls}

    def stop(self) -> bool:
        """Stops all processes; returns False if none was running.

        Raises:
            StopError: the supervisor had to be killed.
            NotAClusterError: the directory never held a cluster.
        """
        if not is_cluster(self._paths):
            raise NotAClusterError(
                f"{self.directory} holds no cluster.",
                "Give the directory of one.",
            )
        pid = self.supervisor_pid
        if pid is not None:
            self._end(pid)
        if self._process is not None:
            self._process.wait(KILL_SECONDS)
        return pid is not None

    def _end(self, pid: int) -> None:
        grace = read_state(self._paths.state).get(
            "stop_seconds", DEFAULT_STOP_SECONDS
        )
        seconds = grace + STOP_MARGIN_SECONDS
        with contextlib.ExitStack() as stack:
            try:
                process = os.pidfd_open(pid)
                stack.callback(os.close, process)
                # Another process may have got the pid of an ended one.
                if self.supervisor_pid != pid:
                    return
                signal.pidfd_send_signal(process, signal.SIGTERM)
            except ProcessLookupError:
                return
            if select.select([process], [], [], seconds)[0]:
                return
            # The kernel kills its children with it.
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [], KILL_SECONDS)
        raise StopError(
            f"the supervisor (pid {pid}) did not end within {seconds:g} s"
            " and was killed.",
            f"Read {self.log('supervisor')}.",
        )

    def _state(self) -> dict[str, Any]:
        state = read_state(self._paths.state)
        if not state:
            raise NotRunningError(
                f"{self.directory} holds no started cluster.",
                f"Start it: hapi cluster start {self.directory}",
            )
        return state
