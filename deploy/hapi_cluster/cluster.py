"""The accounts of a fresh cluster.

An account that nobody wrote to yet answers HEAD with 200 instead of 204,
and tests that compare answers see the difference: each is made at start.
"""

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

# What the supervisor itself needs beside the grace its children have.
STOP_MARGIN_SECONDS = 30.0
POLL_SECONDS = 0.05
DEFAULT_USER = "test:tester"


class Cluster:
    """A Swift cluster on this machine, in one directory.

    ::

        with Cluster.start("/dev/shm/swift") as cluster:
            print(cluster.auth_url, cluster.user, cluster.key)

    Leaving the ``with`` block stops it and keeps its data. Without one it
    runs on, and any process may :meth:`attach` to it.
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
        """Start a cluster and return when all of it answers.

        ``settings`` are the fields of :class:`ClusterSettings`. With
        ``die_with_parent`` it stops when this process ends, however that
        happens. The directory is made if needed; one that held a cluster
        before serves its data again.

        Raises a :class:`hapi_cluster.errors.ClusterError`.
        """
        if die_with_parent:
            settings["parent_pid"] = os.getpid()
        chosen = ClusterSettings(**settings)
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
        return cls(paths.directory, spawn_supervisor(paths, chosen))

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, **settings: Any) -> Iterator[Cluster]:
        """A cluster that ends with this process and leaves no files.

        In /dev/shm where there is one: ext4 keeps too little metadata.
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
        """The running cluster of a directory; raises NotRunningError."""
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
        found = _supervisor(self._paths)
        return None if found is None else found.pid

    @property
    def proxy_url(self) -> str:
        """The proxy's address, without a path."""
        state = self._state()
        host = reachable(state["host"])
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{state['ports']['proxy']}"

    @property
    def auth_url(self) -> str:
        """What swiftclient calls ST_AUTH."""
        return f"{self.proxy_url}/auth/v1.0"

    @property
    def worker_socket(self) -> Path | None:
        """The worker's unix socket; None without a worker."""
        path = self._state()["worker_socket"]
        return None if path is None else Path(path)

    @property
    def worker_pid(self) -> int | None:
        """The present worker process; None while there is none."""
        worker = self._worker()
        return None if worker is None else worker.pid

    @property
    def environment(self) -> dict[str, str]:
        """ST_AUTH, ST_USER and ST_KEY."""
        return {
            "ST_AUTH": self.auth_url,
            "ST_USER": self.user,
            "ST_KEY": self.key,
        }

    def log(self, name: str) -> Path:
        """The log of ``swift`` (or ``proxy`` …), ``worker``, …"""
        return self._paths.log(name)

    def restart_worker(
        self, timeout_seconds: float = DEFAULT_START_SECONDS
    ) -> None:
        """End the worker in order, and return when a new one answers.

        Starts it where :meth:`stop_worker` has ended it. Raises
        NotRunningError, or StartError after the timeout.
        """
        old = self._worker()
        self._send_for_worker(signal.SIGUSR1)
        self.wait_for_worker(old, timeout_seconds)

    def stop_worker(
        self, timeout_seconds: float = DEFAULT_START_SECONDS
    ) -> None:
        """End the worker in order, until :meth:`restart_worker`.

        Raises NotRunningError, or StopError after the timeout.
        """
        self._send_for_worker(signal.SIGUSR2)
        deadline = time.monotonic() + timeout_seconds
        while self.worker_pid is not None:
            if time.monotonic() > deadline:
                raise StopError(
                    f"the worker did not end in {timeout_seconds:g} s.",
                    f"Read {self.log('worker')}.",
                )
            time.sleep(POLL_SECONDS)

    def _send_for_worker(self, number: signal.Signals) -> None:
        supervisor = _supervisor(self._paths)
        if supervisor is None or self.worker_socket is None:
            raise _no_worker(self.directory)
        supervisor.send(number)

    def wait_for_worker(
        self,
        other_than: ProcessIdentity | int | None = None,
        timeout_seconds: float = DEFAULT_START_SECONDS,
    ) -> int:
        """Wait for a worker that answers; its pid.

        ``other_than`` is a worker that does not count (it is going away).
        """
        old = getattr(other_than, "pid", other_than)
        if self.worker_socket is None:
            raise _no_worker(self.directory)
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
        """The present state, JSON-able; never raises for a stopped one.

        ``status`` is ``running``, ``starting``, ``stopping``, ``stopped``,
        ``died`` (its supervisor was killed) or ``absent``.
        """
        state = read_state(self._paths.state)
        if not state:
            absent = not is_cluster(self._paths)
            status = "absent" if absent else "stopped"
            return {"directory": str(self.directory), "status": status}
        if not self.running and state["status"] != "stopped":
            state["status"] = "died"
        for child in state["children"].values():
            child["pid"] = _living_pid(child.pop("process"))
        state["supervisor_pid"] = self.supervisor_pid
        state.pop("supervisor")
        urls = {"proxy_url": self.proxy_url, "auth_url": self.auth_url}
        return {"directory": str(self.directory), **state, **urls}

    def stop(self) -> bool:
        """Stop everything; False if nothing was running.

        Also ends what a killed supervisor may have left. Raises StopError,
        and NotAClusterError for a directory that never was one.
        """
        supervisor = _supervisor(self._paths)
        if supervisor is None:
            return self._stop_leftovers()
        grace = self._state().get("stop_seconds", DEFAULT_STOP_SECONDS)
        timeout_seconds = grace + STOP_MARGIN_SECONDS
        supervisor.send(signal.SIGTERM)
        ended = supervisor.wait(timeout_seconds)
        if not ended:
            # Its children are killed with it.
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

    # -- inside -----------------------------------------------------------

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
        found = ProcessIdentity.parse(child.get("process") or "")
        return found if found is not None and found.alive() else None


def _no_worker(directory: Path) -> NotRunningError:
    return NotRunningError(
        f"the cluster in {directory} has no worker running.",
        "Start it with a worker.",
    )


def _absolute(directory: str | os.PathLike[str]) -> Path:
    return Path(directory).expanduser().resolve()


def _supervisor(paths: ClusterPaths) -> ProcessIdentity | None:
    """The living supervisor of the directory."""
    try:
        text = paths.pid_file.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    identity = ProcessIdentity.parse(text)
    return identity if identity is not None and identity.alive() else None


def _living_pid(process: str | None) -> int | None:
    identity = ProcessIdentity.parse(process or "")
    alive = identity is not None and identity.alive()
    return identity.pid if identity is not None and alive else None
