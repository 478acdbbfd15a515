"""A cluster whose servers a test runs itself: it may kill and restart each."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hapi_cluster import Cluster, ClusterSettings
from hapi_cluster.launch import ServerSpec, prepared
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.preflight import prepare_directory
from hapi_cluster.probes import create_accounts
from hapi_cluster.state import write_state
from hapi_cluster.supervisor import start_server
from waiting import until

SECONDS = 90.0


class OwnServers:
    """Running servers, by name."""

    def __init__(self, specs: list[ServerSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        """Starts servers; returns when they answer."""
        for name in names:
            self._processes[name] = start_server(self._specs[name])
        for name in names:
            until(
                self._specs[name].answers,
                SECONDS,
                self._specs[name].log.read_text,
            )

    def start_all(self) -> None:
        self.start(*self._specs)

    def restart(self, *names: str) -> None:
        """Kills servers, if they run, and starts them again."""
        for name in names:
            self._processes[name].kill()
            self._processes[name].wait()
        self.start(*names)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def end(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def own_servers(
    directory: Path, **settings: Any
) -> Iterator[tuple[Cluster, OwnServers]]:
    """Runs the servers of a new cluster in a directory.

    Args:
        directory: empty.
        settings: fields of ``ClusterSettings``.
    """
    paths = ClusterPaths(directory)
    prepare_directory(paths)
    with prepared(paths, ClusterSettings(**settings)) as launch:
        write_state(paths.state, launch.state)
        servers = OwnServers(launch.specs)
        try:
            servers.start_all()
            create_accounts(("127.0.0.1", launch.state["ports"]["proxy"]))
            yield Cluster(directory), servers
        finally:
            servers.end()
