"""What a killed supervisor may leave behind, and its removal."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from hapi_cluster.identity import ProcessIdentity
from hapi_cluster.launch import TEMPORARY_PREFIX
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.state import read_state

KILL_SECONDS = 5.0


def remove_leftovers(paths: ClusterPaths) -> bool:
    """End the last run's processes, remove its sockets.

    True if a process was still there. Call it only when the directory has
    no living supervisor, or as the supervisor.
    """
    state = read_state(paths.state)
    found = False
    for child in state.get("children", {}).values():
        identity = ProcessIdentity.parse(child["process"] or "")
        if identity is not None and identity.send(signal.SIGKILL):
            identity.wait(KILL_SECONDS)
            found = True
    for path in paths.run.glob("*"):
        path.unlink()
    folder = Path(state.get("temporary_folder") or "/")
    if folder.name.startswith(TEMPORARY_PREFIX) and folder.exists():
        shutil.rmtree(folder)
    return found
