"""``hapi-worker`` in its own process, and its use of the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from waiting import until
from worker_under_test import Exchange

START_SECONDS = 60.0
SETTLE_SECONDS = 10.0
"""Time for a worker without clients to return to its level."""
RSS_MARGIN_BYTES = 64 << 20
"""Margin of resident memory above its level; up to 40 MiB were measured right
after the last job."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_COUNTER = re.compile(r"(\w+?)(?:\{(.*)\})? (\S+)")

Counts = Mapping[str, float]
"""Values by name and labels as in ``/metrics``."""


@dataclass(frozen=True)
class Footprint:
    """Memory, threads and descriptors of a process."""

    rss_bytes: int
    num_threads: int
    num_descriptors: int

    def is_within(self, level: Footprint) -> bool:
        """Returns True if it is back at ``level``."""
        return (
            self.rss_bytes <= level.rss_bytes + RSS_MARGIN_BYTES
            and self.num_threads <= level.num_threads
            and self.num_descriptors <= level.num_descriptors
        )


class WorkerProcess(Exchange):
    """The command as an operator runs it, with its sockets in ``folder``.

    A killed worker leaves its sockets, and the next one replaces them.

    Args:
        folder: folder of configuration, sockets and log.
        options: options of the section ``[hapi-worker]`` without the socket.
    """

    def __init__(self, folder: Path, options: Mapping[str, object]) -> None:
        super().__init__(str(folder / "worker.sock"))
        config = folder / "worker.conf"
        lines = [f"{name} = {value}" for name, value in options.items()]
        config.write_text(
            "\n".join(["[hapi-worker]", f"socket = {self.socket}", *lines])
        )
        self._config = config
        self._log = folder / "worker.log"
        self.start()

    def start(self) -> None:
        """Starts it, also again after its end."""
        command = [sys.executable, "-m", "hapi_worker.main", "--config"]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, self._config],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stderr=log,
            )
        self.pid = self.process.pid

    def wait_until_ready(self) -> None:
        until(self._is_ready, START_SECONDS, self.log)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            health = self.request("GET", "/healthz", admin=True)
        except OSError:  # it does not listen yet
            return False
        return bool(health.fields["pid"] == self.pid)

    def stop(self) -> int:
        """Ends it as systemd does; returns its exit status."""
        self.process.terminate()
        return self.process.wait(300)

    def kill(self) -> None:
        """Sends SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(300)

    def log(self) -> str:
        return self._log.read_text()

    def footprint(self) -> Footprint:
        folder = Path(f"/proc/{self.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        return Footprint(
            rss_bytes=pages * PAGE_BYTES,
            num_threads=len(os.listdir(folder / "task")),
            num_descriptors=len(os.listdir(folder / "fd")),
        )

    def jobs_running(self) -> int:
        health = self.request("GET", "/healthz", admin=True)
        return int(health.fields["jobs_running"])

    def counts(self) -> Counts:
        """All counters and gauges, from the admin socket."""
        text = self.request("GET", "/metrics", admin=True).body.decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            match = _COUNTER.fullmatch(line)
            if match is not None and not match[1].endswith("_created"):
                labels = f"{{{match[2]}}}" if match[2] else ""
                found[match[1] + labels] = float(match[3])
        return found

    def settle(self, level: Footprint) -> None:
        """Waits until no job runs and the footprint is back at ``level``."""
        until(
            lambda: not self.jobs_running(),
            SETTLE_SECONDS,
            lambda: f"{self.jobs_running()} jobs still run",
        )
        until(
            lambda: self.footprint().is_within(level),
            SETTLE_SECONDS,
            lambda: f"{self.footprint()} is left of {level}",
        )


def grown(after: Counts, before: Counts) -> dict[str, float]:
    """Increases of the counters that went up."""
    growth = {k: v - before.get(k, 0.0) for k, v in after.items()}
    return {name: more for name, more in growth.items() if more > 0}
