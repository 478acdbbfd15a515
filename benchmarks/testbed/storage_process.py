"""The process that owns a testbed's storage tier.

``python -m benchmarks.testbed.storage_process FOLDER`` runs a cluster in
``FOLDER/swift``, in the network namespace and on the cores it was started
with.  When its standard input ends, it stops the cluster and removes FOLDER.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.testbed.folders import remove_folder
from benchmarks.testbed.remote import serve
from hapi_cluster import Cluster

SWIFT_FOLDER = "swift"


class StorageTier:
    """Answers the testbed's questions about the cluster in a folder."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder / SWIFT_FOLDER
        self._stack = stack

    def start(self, **settings: Any) -> dict[str, Any]:
        """Starts the cluster; returns its credentials as variables."""
        cluster = self._stack.enter_context(
            Cluster.start(self._folder, die_with_parent=True, **settings)
        )
        return dict(cluster.environment)

    def affinities(self) -> dict[str, list[int]]:
        """Cores that each process of the cluster may use."""
        return {
            name: sorted(os.sched_getaffinity(child["pid"]))
            for name, child in self._children().items()
            if child["pid"] is not None
        }

    def sessions(self) -> list[int]:
        """Sessions of all live servers; each server has its own."""
        children = self._children().values()
        return [child["pid"] for child in children if child["pid"]]

    def restart_worker(self) -> None:
        """Starts a new worker, without models and profiles."""
        Cluster.attach(self._folder).restart_worker()

    def _children(self) -> dict[str, Any]:
        return dict(Cluster.attach(self._folder).status()["children"])


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
