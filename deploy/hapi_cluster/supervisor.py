"""The supervisor process: starts, watches and stops a cluster's servers."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hapi_cluster.configs import BACKEND_HOST
from hapi_cluster.errors import ClusterError, StartError
from hapi_cluster.launch import (
    Socket,
    admin_socket,
    child_specs,
    choose_layout,
    choose_socket,
    reachable,
    reserve_ports,
    worker_sockets,
    write_files,
)
from hapi_cluster.logs import tail
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.ports import PortReservation
from hapi_cluster.preflight import check_xattrs
from hapi_cluster.probes import create_accounts
from hapi_cluster.process_control import (
    become_subreaper,
    dead_child,
    kill_orphans,
    locked,
    remove_leftovers,
    watched_parent,
)
from hapi_cluster.process_identity import ProcessIdentity
from hapi_cluster.server_process import ServerProcess
from hapi_cluster.settings import ClusterSettings
from hapi_cluster.state import read_state, write_state

PROBE_INTERVAL_SECONDS = 0.03
IDLE_SECONDS = 3600.0
RINGS_SECONDS = 60.0

logger = logging.getLogger("hapi_cluster")


class Supervisor:
    """Supervises one run of a cluster."""

    def __init__(self, paths: ClusterPaths, settings: ClusterSettings) -> None:
        self._paths = paths
        self._settings = settings
        self._children: list[ServerProcess] = []
        self._socket: Socket | None = None
        self._sockets: dict[str, Path] = {}
        """Sockets of all workers, by name."""
        self._log_bytes: dict[Path, int] = {}
        """Lengths of the logs before this start."""
        self._stopping = False
        self._restart_worker = False
        self._pause_worker = False
        self._state: dict[str, Any] = {}
        self._wake_read, self._wake_write = os.pipe2(
            os.O_NONBLOCK | os.O_CLOEXEC
        )

    def run(self, ready: int) -> None:
        """Starts the servers, reports the result, watches, stops.

        Args:
            ready: file descriptor to which the result is written as JSON.
        """
        self._catch_signals()
        become_subreaper()
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            try:
                parent = stack.enter_context(
                    watched_parent(self._settings.parent_pid)
                )
                self._start(stack)
                self._await_answers(parent)
                self._publish("running")
            except ClusterError as error:
                logger.error("%s", error)
                _report(ready, error.to_json())
                return
            _report(ready, {"ok": True})
            logger.info("running")
            while not self._stopping:
                self._step(parent, IDLE_SECONDS)

    # -- starting ---------------------------------------------------------

    def _start(self, stack: contextlib.ExitStack) -> None:
        paths, settings = self._paths, self._settings
        last = read_state(paths.state)
        remove_leftovers(paths)
        layout = choose_layout(settings, last.get("layout"))
        reservations = reserve_ports(settings, last.get("ports", {}))
        for reservation in reservations.values():
            stack.callback(reservation.close)
        ports = {name: each.port for name, each in reservations.items()}
        if settings.processes and shutil.which("memcached"):
            ports["memcached"] = _free_port()
        for folder in (paths.etc, paths.logs, paths.run, paths.devices):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._log_bytes = {
            log: log.stat().st_size for log in paths.logs.iterdir()
        }
        sock = self._socket = choose_socket(paths.run)
        self._sockets = worker_sockets(settings, sock.path)
        self._state = {
            "layout": layout,
            "host": settings.host,
            "ports": ports,
            "processes": settings.processes,
            "hapi_filter": settings.hapi_filter,
            "worker": settings.worker,
            "encryption": settings.encryption,
            "worker_options": dict(settings.worker_options),
            "filter_options": dict(settings.filter_options),
            "object_servers": settings.object_servers,
            "object_workers": settings.object_workers,
            "object_options": dict(settings.object_options),
            "worker_socket": str(sock.path) if settings.worker else None,
            "temporary_folder": (
                str(sock.path.parent) if sock.is_temporary else None
            ),
            "stop_seconds": settings.stop_seconds,
            "warnings": check_xattrs(paths.directory),
            "supervisor": str(ProcessIdentity.of(os.getpid())),
        }
        self._publish("starting")
        write_files(paths, settings, layout, ports, self._sockets)
        if settings.processes:
            self._make_rings()
        specs = child_specs(paths, settings, ports, self._sockets)
        self._children = [ServerProcess(spec) for spec in specs]
        for child in self._children:
            child.start()
        self._publish("starting")

    def _make_rings(self) -> None:
        log_path = self._paths.log("rings")
        argv = [sys.executable, "-m", "hapi_cluster.rings"]
        with log_path.open("ab") as log:
            done = subprocess.run(
                [*argv, str(self._paths.etc)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                timeout=RINGS_SECONDS,
                check=False,
            )
        if done.returncode != 0:
            raise self._start_error("the ring builder failed", log_path)

    def _await_answers(self, parent: int | None) -> None:
        deadline = time.monotonic() + self._settings.start_seconds
        waiting = list(self._children)
        while waiting:
            waiting = [c for c in waiting if not c.spec.answers()]
            self._step(parent, PROBE_INTERVAL_SECONDS if waiting else 0)
            for child in waiting:
                if child.pid is None or child.num_restarts:
                    raise self._start_error(
                        f"{child.spec.name} ended while starting",
                        child.spec.log,
                    )
            if self._stopping:
                raise StartError(
                    "the cluster was stopped while starting.",
                    "Start it again.",
                )
            if waiting and time.monotonic() > deadline:
                raise self._start_error(
                    f"{waiting[0].spec.name} did not answer within"
                    f" {self._settings.start_seconds:g} s",
                    waiting[0].spec.log,
                )
        if self._settings.keystone_url is None:
            self._create_accounts()

    def _create_accounts(self) -> None:
        port = self._state["ports"]["proxy"]
        try:
            create_accounts((reachable(self._settings.host), port))
        except (OSError, http.client.HTTPException, ValueError) as error:
            name = "proxy" if self._settings.processes else "swift"
            raise self._start_error(
                f"the first requests failed ({error})", self._paths.log(name)
            ) from error

    def _start_error(self, what: str, log: Path) -> StartError:
        lines = tail(log, since=self._log_bytes.get(log, 0))
        return StartError(
            f"{what}. The end of {log}:\n{lines}",
            f"Read {log}, then start again.",
        )

    # -- watching ---------------------------------------------------------

    def _step(self, parent: int | None, seconds: float) -> None:
        """Waits for an event or a due action, then handles it."""
        now = time.monotonic()
        due = [child.due for child in self._children]
        times = [d - now for d in due if d is not None]
        timeout = max(0.0, min([seconds, *times]))
        watched = [self._wake_read] + ([parent] if parent else [])
        readable, _, _ = select.select(watched, [], [], timeout)
        if self._wake_read in readable:
            os.read(self._wake_read, 4096)
        if parent in readable:
            logger.info("the parent process ended")
            self._stopping = True
        self._reap()
        restart, pause = self._restart_worker, self._pause_worker
        self._restart_worker = self._pause_worker = False
        if restart or pause:
            self._terminate_worker(pause)
        if not self._stopping:
            now = time.monotonic()
            started = [child.act(now) for child in self._children]
            if any(started):
                self._publish(self._state["status"])

    def _reap(self) -> None:
        """Reaps all dead children, including inherited orphans."""
        changed = False
        while (pid := dead_child()) is not None:
            child = next((c for c in self._children if c.pid == pid), None)
            if child is None:
                os.waitpid(pid, 0)
                continue
            status, delay = child.ended()
            changed = True
            if not self._stopping:
                logger.warning(
                    "%s (pid %d) ended with status %d; next start in %.2f s",
                    child.spec.name,
                    pid,
                    status,
                    delay,
                )
        if changed:
            self._publish(self._state["status"])

    def _terminate_worker(self, pause: bool) -> None:
        for child in self._children:
            if child.spec.name == "worker":
                child.is_paused = pause
                child.terminate(self._settings.stop_seconds)

    # -- stopping ---------------------------------------------------------

    def _stop(self) -> None:
        """Ends all children and their orphans."""
        self._stopping = True
        if self._state:
            self._publish("stopping")
        for child in self._children:
            child.terminate(self._settings.stop_seconds)
        while any(child.pid is not None for child in self._children):
            self._step(None, 1.0)
            now = time.monotonic()
            for child in self._children:
                if child.pid is not None:
                    child.act(now)
        kill_orphans()
        self._children = []
        # After the worker's end: it removes its sockets itself.
        for path in self._sockets.values():
            path.unlink(missing_ok=True)
            admin_socket(path).unlink(missing_ok=True)
        if self._socket is not None and self._socket.is_temporary:
            shutil.rmtree(self._socket.path.parent)
        if self._state:
            self._publish("stopped")
        logger.info("stopped")

    # -- the rest ---------------------------------------------------------

    def _publish(self, status: str) -> None:
        self._state["status"] = status
        self._state["children"] = {
            child.spec.name: {
                "process": str(child.identity) if child.identity else None,
                "restarts": child.num_restarts,
                "log": str(child.spec.log),
            }
            for child in self._children
        }
        try:
            write_state(self._paths.state, self._state)
        except OSError as error:
            # A full disk must not end the servers.
            logger.error("cannot write %s: %s", self._paths.state, error)

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_restart)
        signal.signal(signal.SIGUSR2, self._on_pause)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_stop(self, *_: object) -> None:
        self._stopping = True

    def _on_restart(self, *_: object) -> None:
        self._restart_worker = True
        self._pause_worker = False

    def _on_pause(self, *_: object) -> None:
        self._pause_worker = True
        self._restart_worker = False


def _free_port() -> int:
    # memcached cannot share a reserved port: it does not set SO_REUSEPORT.
    reservation = PortReservation.take(BACKEND_HOST, 0)
    reservation.close()
    return reservation.port


def _report(ready: int, message: dict[str, Any]) -> None:
    """Writes the result of the start; its reader may have ended."""
    with contextlib.suppress(BrokenPipeError):
        os.write(ready, json.dumps(message).encode())
    os.close(ready)


def main(argv: list[str]) -> int:
    """Returns 0 even after a failed start: the pipe has the error."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s supervisor: %(message)s"
    )
    paths, ready = ClusterPaths(Path(argv[0])), int(argv[1])
    os.set_inheritable(ready, False)
    settings = ClusterSettings.from_json(sys.stdin.read())
    try:
        with locked(paths):
            Supervisor(paths, settings).run(ready)
    except ClusterError as error:
        _report(ready, error.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
