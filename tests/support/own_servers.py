"""A cluster whose servers a test runs itself: it may kill and restart each."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hapi_cluster import Cluster, ClusterSettings
from hapi_cluster.launch import ServerSpec, prepared
from hapi_cluster.paths import ClusterPaths, write_state
from hapi_cluster.preflight import prepare_directory
from hapi_cluster.probes import create_accounts
from hapi_cluster.supervisor import start_server
from waiting import SECONDS, until


class OwnServers:
    """Running servers.

    Attributes:
        processes: by the server's name.
    """

    def __init__(self, specs: list[ServerSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, names: Iterable[str]) -> None:
        """Starts servers; returns when they answer."""
        specs = [self._specs[name] for name in names]
        for spec in specs:
            self.processes[spec.name] = start_server(spec)
        for spec in specs:
            until(spec.answers, SECONDS, spec.log.read_text)

    def restart(self, name: str) -> None:
        """Kills a server, if it runs, and starts it again."""
        self.processes[name].kill()
        self.processes[name].wait()
        self.start([name])

    def kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextmanager
def own_servers(**settings: Any) -> Iterator[tuple[Cluster, OwnServers]]:
    """Runs a new cluster with these fields of ``ClusterSettings``."""
    shm = Path("/dev/shm")
    parent = shm if os.access(shm, os.W_OK) else None
    with TemporaryDirectory(prefix="hapi-", dir=parent) as directory:
        paths = ClusterPaths(Path(directory))
        prepare_directory(paths)
        with prepared(paths, ClusterSettings(**settings)) as (state, specs):
            write_state(paths.state, state)
            servers = OwnServers(specs)
            try:
                servers.start([spec.name for spec in specs])
                create_accounts(("127.0.0.1", state["ports"]["proxy"]))
                yield Cluster(directory), servers
            finally:
                servers.kill_all()
