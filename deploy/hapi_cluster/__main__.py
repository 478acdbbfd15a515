"""``python -m hapi_cluster DIRECTORY CONNECTION [PARENT]``, see ``start``."""

import logging
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hapi_cluster.errors import ClusterError
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.supervisor import run_cluster


def main(argv: list[str]) -> int:
    """Runs a cluster; returns the exit status.

    Receives the settings on the descriptor CONNECTION, and sends None when
    all servers answer, or a :class:`ClusterError`.  PARENT is the pidfd of a
    process at whose end to stop.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    paths, parent = ClusterPaths(Path(argv[0])), [int(fd) for fd in argv[2:]]
    with Connection(int(argv[1])) as starter:

        def on_ready(_: dict[str, Any]) -> None:
            logging.info("running")
            starter.send(None)
            starter.close()

        try:
            run_cluster(paths, starter.recv(), on_ready, *parent)
        except ClusterError as error:
            logging.error("%s", error)
            if not starter.closed:
                starter.send(error)
            return 1
    logging.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
