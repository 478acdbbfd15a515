"""Paths of a cluster's files inside its directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TEMPORARY_PREFIX = "hapi-run-"


@dataclass(frozen=True)
class ClusterPaths:
    """Paths of a cluster's files.

    Attributes:
        directory: absolute path of the cluster.
    """

    directory: Path

    @property
    def state(self) -> Path:
        """Ports, processes and URLs as JSON, written by the supervisor."""
        return self.directory / "cluster.json"

    @property
    def lock(self) -> Path:
        """File that the supervisor locks (flock) as long as it runs."""
        return self.directory / "supervisor.lock"

    @property
    def etc(self) -> Path:
        """Swift's ``swift_dir``: configurations, rings, builders."""
        return self.directory / "etc"

    @property
    def secrets(self) -> Path:
        """Hash-path suffix and token key of this cluster (mode 0600)."""
        return self.etc / "secrets.json"

    @property
    def backend_key(self) -> Path:
        """Key that signs requests from the proxy to object servers."""
        return self.etc / "hapi-backend.key"

    def worker_config(self, name: str) -> Path:
        """Configuration of the worker with this name."""
        return self.etc / f"hapi-{name}.conf"

    @property
    def devices(self) -> Path:
        """Stored data, one folder per ring device."""
        return self.directory / "srv"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def run(self) -> Path:
        """Folder of the workers' sockets while the cluster runs."""
        return self.directory / "run"

    def server_config(self, server: str) -> Path:
        return self.etc / f"{server}-server.conf"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"
