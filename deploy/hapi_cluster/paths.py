"""Where everything of one cluster lies inside its directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TEMPORARY_PREFIX = "hapi-run-"


@dataclass(frozen=True)
class ClusterPaths:
    """The files of a cluster; ``directory`` is absolute."""

    directory: Path

    @property
    def state(self) -> Path:
        """Ports, processes, URLs: JSON, written by the supervisor only."""
        return self.directory / "cluster.json"

    @property
    def pid_file(self) -> Path:
        """The supervisor's identity: ``PID START_TICKS BOOT_ID``."""
        return self.directory / "supervisor.pid"

    @property
    def lock(self) -> Path:
        """Held (flock) by the supervisor for as long as it lives."""
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
    def worker_config(self) -> Path:
        return self.etc / "hapi-worker.conf"

    @property
    def devices(self) -> Path:
        """The data: one folder per ring device."""
        return self.directory / "srv"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def run(self) -> Path:
        """The worker's sockets."""
        return self.directory / "run"

    def server_config(self, server: str) -> Path:
        return self.etc / f"{server}-server.conf"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"
