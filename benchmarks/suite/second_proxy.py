"""A further proxy and worker on the storage tier, in front of the same Swift.

``python -m benchmarks.suite.second_proxy CLUSTER FOLDER [KEY=VALUE …]``, with
options of the worker, answers questions on its standard input
(:mod:`benchmarks.remote`) until that ends; then both have ended.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.network import STORAGE_ADDRESS
from benchmarks.proxies import SideProxy
from benchmarks.remote import serve
from benchmarks.storage_tier import SWIFT_FOLDER, worker_counters
from benchmarks.testbed import LOOPBACK, Testbed, Tier
from benchmarks.worker_process import running_worker

from hapi_cluster.paths import ClusterPaths

MODULE = "benchmarks.suite.second_proxy"
EVERYWHERE = "0.0.0.0"
START_SECONDS = 180.0
COUNTERS_SECONDS = 60.0


@dataclass(frozen=True)
class SecondProxy:
    """One that runs.

    Attributes:
        auth_url: for ``ST_AUTH``.
        sessions: of its processes.
        worker_counters: of its worker, so far.
    """

    auth_url: str
    sessions: tuple[int, ...]
    worker_counters: Callable[[], dict[str, float]]

    @property
    def environment(self) -> dict[str, str]:
        """Of clients that use it."""
        return {"ST_AUTH": self.auth_url}


@contextlib.contextmanager
def second_proxy(
    bed: Testbed,
    tier: Tier,
    more_options: Mapping[str, str] | None = None,
) -> Iterator[SecondProxy]:
    """Runs one on a testbed.

    Args:
        bed: the testbed.
        tier: its storage tier, or a part of that.
        more_options: of the worker, beside those of the testbed's own.
    """
    # The name of a unix socket must not be long.
    folder = tempfile.mkdtemp(prefix="proxy-", dir=bed.folder)
    options = [f"{k}={v}" for k, v in (more_options or {}).items()]
    with tier.remote(
        MODULE, str(bed.folder / SWIFT_FOLDER), folder, *options
    ) as remote:
        found = remote.ask("start", seconds=START_SECONDS)
        host = STORAGE_ADDRESS if bed.shaped else LOOPBACK
        yield SecondProxy(
            f"http://{host}:{found['port']}/auth/v1.0",
            tuple(found["sessions"]),
            lambda: dict(
                remote.ask("worker_counters", seconds=COUNTERS_SECONDS)
            ),
        )


def worker_options(cluster: Path) -> dict[str, str]:
    """Of a cluster's own worker, all but its socket."""
    config = configparser.RawConfigParser(delimiters=("=",))
    config.read(ClusterPaths(cluster).etc / "hapi-worker.conf")
    options = dict(config["hapi-worker"])
    del options["socket"]
    return options


class _Server:
    def __init__(
        self,
        cluster: Path,
        folder: Path,
        options: list[str],
        stack: contextlib.ExitStack,
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._options = options
        self._stack = stack
        self._socket = Path()

    def start(self) -> dict[str, Any]:
        """Port of the proxy, and sessions of all processes."""
        options = worker_options(self._cluster)
        device = options.pop("device")
        lines = [f"{key} = {value}" for key, value in options.items()]
        self._socket = self._stack.enter_context(
            running_worker(self._folder, device, [*lines, *self._options])
        )
        proxy = SideProxy(
            self._cluster,
            self._folder / "proxy",
            {
                "DEFAULT": {"bind_ip": EVERYWHERE},
                "filter:hapi": {"worker_socket": str(self._socket)},
            },
        )
        self._stack.enter_context(proxy)
        return {
            "port": proxy.address[1],
            "sessions": [os.getsid(0), proxy.pid],
        }

    def worker_counters(self) -> dict[str, float]:
        """Of the worker."""
        return worker_counters(self._socket)


def main(argv: list[str]) -> int:
    cluster, folder, *options = argv
    with contextlib.ExitStack() as stack:
        server = _Server(Path(cluster), Path(folder), options, stack)
        serve(
            {
                "start": server.start,
                "worker_counters": server.worker_counters,
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
