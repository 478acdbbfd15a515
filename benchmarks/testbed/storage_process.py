"""The process that owns a testbed's storage tier.

``python -m benchmarks.testbed.storage_process FOLDER`` runs a cluster in
``FOLDER/swift``, and its worker, which can be restarted, in the network
namespace and on the cores it was started with.  When its standard input ends,
it stops both and removes FOLDER.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.testbed.folders import remove_folder
from benchmarks.testbed.remote import serve
from hapi_cluster import Cluster
from hapi_cluster.launch import WORKER_SOCKET, ServerSpec, admin_socket
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.probes import answers
from hapi_cluster.supervisor import start_server

SWIFT_FOLDER = "swift"
WORKER_SECONDS = 60.0
"""Longest start, and longest end, of a worker."""
POLL_SECONDS = 0.05


class StorageTier:
    """Answers the testbed's questions about the cluster in a folder."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._paths = ClusterPaths(folder / SWIFT_FOLDER)
        self._stack = stack
        self._worker: subprocess.Popen[bytes] | None = None

    def start(self, worker: bool = True, **settings: Any) -> dict[str, Any]:
        """Starts the cluster; returns its credentials as variables."""
        cluster = self._stack.enter_context(
            Cluster.start(
                self._paths.directory,
                die_with_parent=True,
                worker=False,
                **settings,
            )
        )
        if worker:
            self._stack.callback(self._end_worker)
            self.restart_worker()
        return dict(cluster.environment)

    def affinities(self) -> dict[str, list[int]]:
        """Cores that each process of the storage tier may use."""
        return {
            name: sorted(os.sched_getaffinity(pid))
            for name, pid in self._pids().items()
        }

    def sessions(self) -> list[int]:
        """Sessions of all servers; each server has its own."""
        return list(self._pids().values())

    def restart_worker(self) -> None:
        """Starts a new worker, without models and profiles.

        Raises:
            ValueError: it does not start.
        """
        self._end_worker()
        config = self._paths.worker_config("worker")
        admin = admin_socket(self._paths.run / WORKER_SOCKET)
        spec = ServerSpec(
            "worker",
            (
                sys.executable,
                "-m",
                "hapi_worker.main",
                "--config",
                str(config),
            ),
            self._paths.log("worker"),
            lambda: answers(admin, "/healthz"),
        )
        self._worker = start_server(spec)
        deadline = time.monotonic() + WORKER_SECONDS
        while not spec.answers():
            status = self._worker.poll()
            if status is not None or time.monotonic() > deadline:
                raise ValueError(
                    f"hapi-worker did not start (status {status}); see"
                    f" {spec.log}"
                )
            time.sleep(POLL_SECONDS)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.terminate()
            self._worker.wait(WORKER_SECONDS)

    def _pids(self) -> dict[str, int]:
        status = Cluster.attach(self._paths.directory).status()
        pids = {n: child["pid"] for n, child in status["children"].items()}
        if self._worker is not None:
            pids["worker"] = self._worker.pid
        return pids


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.ExitStack() as stack:
        stack.callback(remove_folder, folder)
        tier = StorageTier(folder, stack)
        serve(
            {
                "start": tier.start,
                "affinities": tier.affinities,
                "sessions": tier.sessions,
                "restart_worker": tier.restart_worker,
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
