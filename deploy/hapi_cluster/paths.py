"""A cluster's files inside its directory, and ``cluster.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ClusterPaths:
    """Paths of a cluster's files in its directory, an absolute path."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "cluster.json"
        """Ports, processes and URLs as JSON, written by the supervisor."""
        self.lock = directory / "supervisor.lock"
        """File that the supervisor locks as long as it runs."""
        self.etc = directory / "etc"
        """Swift's ``swift_dir``: configurations, rings, builders."""
        self.secrets = self.etc / "secrets.json"
        """Hash-path suffix and token key of this cluster (mode 0600)."""
        self.backend_key = self.etc / "hapi-backend.key"
        """Key that signs requests from the proxy to object servers."""
        self.devices = directory / "srv"
        """Stored data, one folder per ring device."""
        self.logs = directory / "logs"
        self.run = directory / "run"
        """Folder of the workers' sockets while the cluster runs."""

    def worker_config(self, name: str) -> Path:
        """Configuration of the worker with this name."""
        return self.etc / f"hapi-{name}.conf"

    def server_config(self, server: str) -> Path:
        return self.etc / f"{server}-server.conf"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"


def write_private(path: Path, text: str) -> None:
    """Replaces a file atomically; only its owner may read it."""
    partial = path.with_name(path.name + ".new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    partial.replace(path)


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Writes the cluster's state, for other processes."""
    write_private(path, json.dumps(state, indent=2) + "\n")


def read_state(path: Path) -> dict[str, Any]:
    """The last written state; empty if there is no readable one."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}
