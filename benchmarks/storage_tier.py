"""The process that owns a testbed's storage tier.

``python -m benchmarks.storage_tier FOLDER`` runs a cluster in
``FOLDER/swift``, in the network namespace and on the cores that it was
started with, until its standard input ends; then it stops the cluster and
removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.cpu_seconds import session_seconds
from benchmarks.folders import remove_folder
from benchmarks.remote import serve

from hapi_cluster import Cluster
from hapi_protocol.unix_http import UnixConnection

SWIFT_FOLDER = "swift"
SECONDS = 30.0
BATCHES = "hapi_worker_batch_samples_count"
BATCH_SAMPLES = "hapi_worker_batch_samples_sum"
COUNTERS = (
    BATCHES,
    BATCH_SAMPLES,
    "hapi_worker_jobs_total",
    "hapi_worker_samples_total",
    "hapi_worker_uploads_total",
)


def worker_counters(socket: str | Path) -> dict[str, float]:
    """Jobs, samples, batches and uploads of a worker so far.

    Args:
        socket: of the worker.
    """
    connection = UnixConnection(f"{socket}.admin", SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return {
        name: float(value)
        for name, _, value in (
            line.rpartition(" ") for line in text.splitlines()
        )
        if name.startswith(COUNTERS)
    }


class StorageTier:
    """Answers the testbed's questions; see :func:`serve`."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def start(self, **settings: Any) -> dict[str, Any]:
        """Starts the cluster; its credentials' environment variables."""
        cluster = self._stack.enter_context(
            Cluster.start(
                self._folder / SWIFT_FOLDER, die_with_parent=True, **settings
            )
        )
        return dict(cluster.environment)

    def affinities(self) -> dict[str, list[int]]:
        """Cores that each process of the cluster may use."""
        cluster = Cluster.attach(self._folder / SWIFT_FOLDER)
        children = cluster.status()["children"]
        return {
            name: sorted(os.sched_getaffinity(child["pid"]))
            for name, child in children.items()
            if child["pid"] is not None
        }

    def cpu_seconds(self) -> float:
        """Of all processes of the cluster that live now.

        Each server has a session of its own, which holds what it started.
        """
        return session_seconds(self.sessions())

    def sessions(self) -> list[int]:
        """Numbers of the sessions of all servers that live now."""
        cluster = Cluster.attach(self._folder / SWIFT_FOLDER)
        children = cluster.status()["children"].values()
        return [child["pid"] for child in children if child["pid"]]

    def worker_counters(self) -> dict[str, float]:
        """See :func:`worker_counters`; of the cluster's worker."""
        cluster = Cluster.attach(self._folder / SWIFT_FOLDER)
        return worker_counters(cluster.worker_socket)

    def restart_worker(self) -> None:
        """A new worker, which knows no model and no profile."""
        Cluster.attach(self._folder / SWIFT_FOLDER).restart_worker()

    def stop_worker(self) -> None:
        """No worker, until it is restarted."""
        Cluster.attach(self._folder / SWIFT_FOLDER).stop_worker()


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
                "cpu_seconds": tier.cpu_seconds,
                "sessions": tier.sessions,
                "worker_counters": tier.worker_counters,
                "restart_worker": tier.restart_worker,
                "stop_worker": tier.stop_worker,
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
