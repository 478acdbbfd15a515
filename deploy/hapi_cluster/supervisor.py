"""Runs a cluster's servers until it is stopped or one of them ends."""

from __future__ import annotations

import http.client
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from hapi_cluster.errors import ClusterError, ServerEndedError, StartError
from hapi_cluster.launch import ServerSpec, make_rings, prepared, reachable
from hapi_cluster.logs import tail
from hapi_cluster.paths import ClusterPaths, write_state
from hapi_cluster.probes import create_accounts
from hapi_cluster.process_control import (
    become_subreaper,
    die_with,
    kill_orphans,
    locked,
)
from hapi_cluster.settings import ClusterSettings

PROBE_INTERVAL_SECONDS = 0.03
"""Adds at most this to a start, which takes seconds."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest(Exception):
    """A signal asks the supervisor to stop, or its parent has ended."""


def start_server(spec: ServerSpec) -> subprocess.Popen[bytes]:
    """Starts a server; the kernel kills it when the calling thread ends.

    It has its own session, because Swift's servers signal their whole process
    group when they stop.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # It must not report readiness for this process's own service.
    environment.pop("NOTIFY_SOCKET", None)
    with spec.log.open("ab") as log:
        return subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=environment,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )


class Servers:
    """The server processes of a cluster.

    Args:
        specs: servers to run.
        parent: pidfd of a process at whose end to stop.
    """

    def __init__(
        self, specs: Sequence[ServerSpec], parent: int | None = None
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log_bytes: dict[str, int] = {}
        self._parent = parent
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        become_subreaper()

    def start(self) -> dict[str, Any]:
        """Starts all servers; returns their pids and logs, by name."""
        for name, spec in self._specs.items():
            log = spec.log
            self._log_bytes[name] = log.stat().st_size if log.exists() else 0
            self._processes[name] = start_server(spec)
        return {
            name: {"pid": process.pid, "log": str(self._specs[name].log)}
            for name, process in self._processes.items()
        }

    def await_answers(self, seconds: float) -> None:
        """Waits until all servers answer.

        Raises:
            StartError: one does not answer within ``seconds``.
            ServerEndedError, StopRequest: see :meth:`wait`.
        """
        deadline = time.monotonic() + seconds
        waiting = list(self._specs.values())
        while waiting := [spec for spec in waiting if not spec.answers()]:
            self.wait(PROBE_INTERVAL_SECONDS)
            if time.monotonic() > deadline:
                name = waiting[0].name
                raise StartError(
                    f"{name} did not answer within {seconds:g} s."
                    f" {self.log_text(name)}",
                    f"Read {waiting[0].log}, then start again.",
                )

    def wait(self, seconds: float | None = None) -> None:
        """Waits for an event, at most ``seconds``.

        Raises:
            StopRequest: a signal came, or the parent ended.
            ServerEndedError: a server ended.
        """
        watched = [self._wake, *([self._parent] if self._parent else [])]
        readable, _, _ = select.select(watched, [], [], seconds)
        received = os.read(self._wake, 4096) if self._wake in readable else b""
        if self._parent in readable or set(received) & set(STOP_SIGNALS):
            raise StopRequest
        dead = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (child := os.waitid(os.P_ALL, 0, dead)) is not None:
            for name, process in self._processes.items():
                if process.pid == child.si_pid:
                    raise self._ended_error(name, process)
            os.waitpid(child.si_pid, 0)  # an orphan of a server

    def log_text(self, name: str) -> str:
        """The last lines of a server's log since its start."""
        log = self._specs[name].log
        lines = tail(log, since=self._log_bytes[name])
        return f"The end of {log}:\n{lines}"

    def _ended_error(
        self, name: str, process: subprocess.Popen[bytes]
    ) -> ServerEndedError:
        status = process.wait()
        cause = (
            f"was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with exit status {status}"
        )
        return ServerEndedError(
            f"{name} (pid {process.pid}) {cause}, so the cluster ended."
            f" {self.log_text(name)}",
            f"Read {self._specs[name].log}, then start again.",
        )

    def stop(self, grace_seconds: float) -> None:
        """Ends all servers; kills those that take longer than the grace."""
        deadline = time.monotonic() + grace_seconds
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        kill_orphans()


def run_cluster(
    paths: ClusterPaths,
    settings: ClusterSettings,
    on_ready: Callable[[dict[str, Any]], None],
    parent: int | None = None,
) -> None:
    """Runs a cluster in this process until SIGINT, SIGTERM or SIGHUP.

    Only for a process that has no children: all are killed at the end.

    Args:
        paths: directory of the cluster.
        settings: settings of this start.
        on_ready: called with the state when all servers answer.
        parent: pidfd of a process at whose end to stop.

    Raises:
        ClusterError: the cluster cannot start, or a server ended.
    """
    with locked(paths), prepared(paths, settings) as (state, specs):
        servers = Servers(specs, parent)
        status = "died"
        try:
            write_state(paths.state, state)
            if settings.processes:
                make_rings(paths)
            state["children"] = servers.start()
            servers.await_answers(settings.start_seconds)
            if settings.keystone_url is None:
                _create_accounts(state, servers)
            state["status"] = "running"
            write_state(paths.state, state)
            on_ready(state)
            while True:
                servers.wait()
        except StopRequest:
            status = "stopped"
            if state["status"] == "starting":
                raise StartError(
                    "the cluster was stopped while starting.",
                    "Start it again.",
                ) from None
        except ClusterError as error:
            state["error"] = str(error)
            raise
        finally:
            servers.stop(settings.stop_seconds)
            write_state(paths.state, {**state, "status": status})


def _create_accounts(state: dict[str, Any], servers: Servers) -> None:
    try:
        create_accounts((reachable(state["host"]), state["ports"]["proxy"]))
    except (OSError, http.client.HTTPException, ValueError) as error:
        name = "proxy" if state["processes"] else "swift"
        raise StartError(
            f"the first requests failed ({error}). {servers.log_text(name)}",
            f"Read {state['children'][name]['log']}, then start again.",
        ) from error
