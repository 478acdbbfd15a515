"""An embedded Swift cluster: start, attach, status, stop."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from hapi_cluster.configs import USERS
from hapi_cluster.errors import (
    AlreadyRunningError,
    NotAClusterError,
    NotRunningError,
    StartError,
    StopError,
)
from hapi_cluster.launch import admin_socket, reachable
from hapi_cluster.logs import tail
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.preflight import is_cluster, prepare_directory, require_swift
from hapi_cluster.probes import answers
from hapi_cluster.process_control import KILL_SECONDS, remove_leftovers
from hapi_cluster.process_identity import ProcessIdentity
from hapi_cluster.settings import (
    DEFAULT_START_SECONDS,
    DEFAULT_STOP_SECONDS,
    ClusterSettings,
)
from hapi_cluster.start import spawn_supervisor
from hapi_cluster.state import read_state

STOP_MARGIN_SECONDS = 30.0
"""Time for the supervisor's own end, added to its children's."""
POLL_SECONDS = 0.05
DEFAULT_USER = "test:tester"


class Cluster:
    """A Swift cluster on this machine, in one directory.

    ::

        with Cluster.start("/dev/shm/swift") as cluster:
            print(cluster.auth_url, cluster.user, cluster.key)

    Leaving the ``with`` block stops it and keeps its data.  Without such a
    block it keeps running, and any process may :meth:`attach` to it.

    Attributes:
        directory: absolute path of the cluster.
        user: name of the default user.
        key: key of the default user.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.directory = _absolute(directory)
        self.user = DEFAULT_USER
        self.key = USERS[DEFAULT_USER][0]
        self._paths = ClusterPaths(self.directory)
        self._process = process

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
        if die_with_parent:
            settings["parent_pid"] = os.getpid()
        cluster_settings = ClusterSettings(**settings)
        paths = ClusterPaths(_absolute(directory))
        require_swift()
        prepare_directory(paths)
        running = _supervisor(paths)
        if running is not None:
            raise AlreadyRunningError(
                f"the cluster in {paths.directory} is running already"
                f" (pid {running.pid}).",
                "Use it, or stop it first:"
                f" hapi cluster stop {paths.directory}",
            )
        return cls(paths.directory, spawn_supervisor(paths, cluster_settings))

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return _supervisor(self._paths) is not None

    @property
    def supervisor_pid(self) -> int | None:
        supervisor = _supervisor(self._paths)
        return None if supervisor is None else supervisor.pid

    @property
    def proxy_url(self) -> str:
        """URL of the proxy, without a path."""
        state = self._state()
        host = reachable(state["host"])
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{state['ports']['proxy']}"

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
    def worker_pid(self) -> int | None:
        """Pid of the current worker process; None while there is none."""
        worker = self._worker()
        return None if worker is None else worker.pid

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

    def restart_worker(
        self, timeout_seconds: float = DEFAULT_START_SECONDS
    ) -> None:
        """Drains and replaces the worker; returns when a new one answers.

        Also starts a worker that :meth:`stop_worker` has stopped.

        Raises:
            NotRunningError: the cluster has no worker.
            StartError: no new worker answers within the timeout.
        """
        old = self._worker()
        self._signal_supervisor(signal.SIGUSR1)
        self.wait_for_worker(old, timeout_seconds)

    def stop_worker(
        self, timeout_seconds: float = DEFAULT_START_SECONDS
    ) -> None:
        """Drains and stops the worker until :meth:`restart_worker`.

        Raises:
            NotRunningError: the cluster has no worker.
            StopError: the worker has not ended within the timeout.
        """
        self._signal_supervisor(signal.SIGUSR2)
        deadline = time.monotonic() + timeout_seconds
        while self.worker_pid is not None:
            if time.monotonic() > deadline:
                raise StopError(
                    f"the worker did not end in {timeout_seconds:g} s.",
                    f"Read {self.log('worker')}.",
                )
            time.sleep(POLL_SECONDS)

    def _signal_supervisor(self, signum: signal.Signals) -> None:
        supervisor = _supervisor(self._paths)
        if supervisor is None or self.worker_socket is None:
            raise _no_worker_error(self.directory)
        supervisor.send(signum)

    def wait_for_worker(
        self,
        other_than: ProcessIdentity | int | None = None,
        timeout_seconds: float = DEFAULT_START_SECONDS,
    ) -> int:
        """Waits for a worker that answers and returns its pid.

        Args:
            other_than: a worker that is ending and does not count.
            timeout_seconds: deadline.

        Raises:
            NotRunningError: the cluster has no worker.
            StartError: no worker answers within the timeout.
        """
        old = getattr(other_than, "pid", other_than)
        if self.worker_socket is None:
            raise _no_worker_error(self.directory)
        admin = admin_socket(self.worker_socket)
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            pid = self.worker_pid
            if pid not in (None, old) and answers(admin, "/healthz"):
                assert pid is not None
                return pid
            time.sleep(POLL_SECONDS)
        log = self.log("worker")
        raise StartError(
            f"no new worker answers after {timeout_seconds:g} s."
            f" The end of {log}:\n{tail(log)}",
            f"Read {log}.",
        )

    def status(self) -> dict[str, Any]:
        """The current state as JSON values, also of a stopped cluster.

        ``status`` is ``running``, ``starting``, ``stopping``, ``stopped``,
        ``died`` (its supervisor was killed) or ``absent``.
        """
        state = read_state(self._paths.state)
        if not state:
            status = "stopped" if is_cluster(self._paths) else "absent"
            return {"directory": str(self.directory), "status": status}
        if not self.running and state["status"] != "stopped":
            state["status"] = "died"
        for child in state["children"].values():
            process = _alive(child.pop("process"))
            child["pid"] = None if process is None else process.pid
        state["supervisor_pid"] = self.supervisor_pid
        state.pop("supervisor")
        urls = {"proxy_url": self.proxy_url, "auth_url": self.auth_url}
        return {"directory": str(self.directory), **state, **urls}

    def stop(self) -> bool:
        """Stops all processes; False if none was running.

        Also ends processes that a killed supervisor has left.

        Raises:
            StopError: the supervisor had to be killed.
            NotAClusterError: the directory never held a cluster.
        """
        supervisor = _supervisor(self._paths)
        if supervisor is None:
            return self._stop_leftovers()
        grace = self._state().get("stop_seconds", DEFAULT_STOP_SECONDS)
        timeout_seconds = grace + STOP_MARGIN_SECONDS
        supervisor.send(signal.SIGTERM)
        ended = supervisor.wait(timeout_seconds)
        if not ended:
            # The kernel kills its children with it.
            supervisor.send(signal.SIGKILL)
            supervisor.wait(KILL_SECONDS)
        if self._process is not None:
            self._process.wait(KILL_SECONDS)
        if not ended:
            remove_leftovers(self._paths)
            raise StopError(
                f"the supervisor (pid {supervisor.pid}) did not end within"
                f" {timeout_seconds:g} s and was killed.",
                f"Read {self.log('supervisor')}.",
            )
        return True

    def _state(self) -> dict[str, Any]:
        state = read_state(self._paths.state)
        if not state:
            raise NotRunningError(
                f"{self.directory} holds no started cluster.",
                f"Start it: hapi cluster start {self.directory}",
            )
        return state

    def _stop_leftovers(self) -> bool:
        if not is_cluster(self._paths):
            raise NotAClusterError(
                f"{self.directory} holds no cluster.",
                "Give the directory of one.",
            )
        self._paths.pid_file.unlink(missing_ok=True)
        return remove_leftovers(self._paths)

    def _worker(self) -> ProcessIdentity | None:
        child = self._state()["children"].get("worker", {})
        return _alive(child.get("process"))


def _no_worker_error(directory: Path) -> NotRunningError:
    return NotRunningError(
        f"the cluster in {directory} has no running worker.",
        "Start it with a worker.",
    )


def _absolute(directory: str | os.PathLike[str]) -> Path:
    return Path(directory).expanduser().resolve()


def _supervisor(paths: ClusterPaths) -> ProcessIdentity | None:
    """The directory's supervisor, if it is alive."""
    try:
        return _alive(paths.pid_file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _alive(process: str | None) -> ProcessIdentity | None:
    """The process named by a text, if it is alive."""
    identity = ProcessIdentity.parse(process or "")
    return identity if identity is not None and identity.alive() else None
