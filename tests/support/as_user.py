"""Commands and scripts, run as a user of a cluster would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from children import run_family
from hapi_cluster import Cluster
from preloaded import python
from waiting import SECONDS

_MODULES = {
    "hapi": ("-m", "hapi_client.cli.main"),
    "swift": ("-m", "swiftclient.shell"),
    "python": (),
}


def environment_of(cluster: Cluster) -> dict[str, str]:
    """The variables of a user's programs, which import what this one does.

    They share a cache of splits, as those of a user do.
    """
    return {
        **os.environ,
        **cluster.environment,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HAPI_CACHE_DIR": str(cluster.directory / "user-cache"),
    }


def run(
    cluster: Cluster,
    folder: Path,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Runs ``hapi …``, ``swift …`` or ``python …`` in a folder.

    Args:
        environment: in addition to the variables of the cluster.
        seconds: that it may take.
    """
    program, *arguments = command
    return run_family(
        [python(), *_MODULES[program], *arguments],
        seconds,
        environment={**environment_of(cluster), **(environment or {})},
        folder=folder,
    )
