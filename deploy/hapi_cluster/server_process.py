"""A server process that the supervisor restarts.

Each process has its own session, because Swift's servers signal their whole
process group when they stop.  The kernel kills it when the supervisor ends
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hapi_cluster.process_control import die_with
from hapi_cluster.process_identity import ProcessIdentity

FIRST_DELAY_SECONDS = 0.25
MAX_DELAY_SECONDS = 15.0
STABLE_SECONDS = 30.0
"""Run time after which a process counts as stable: its delay is reset."""


@dataclass(frozen=True)
class ChildSpec:
    """Specification of a server process.

    Attributes:
        name: name in status and logs.
        argv: command line.
        log: file for stdout and stderr.
        answers: returns True if the process serves requests.
        leftovers: sockets of a killed predecessor, removed before a start.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    answers: Callable[[], bool]
    leftovers: tuple[Path, ...] = ()


class Backoff:
    """Delay before a restart: doubles, and is reset by a stable run."""

    def __init__(self) -> None:
        self._delay = 0.0

    def next_delay(self, run_seconds: float) -> float:
        if run_seconds >= STABLE_SECONDS:
            self._delay = 0.0
        delay = self._delay or FIRST_DELAY_SECONDS
        self._delay = min(2 * delay, MAX_DELAY_SECONDS)
        return delay


class ServerProcess:
    """A process that is restarted whenever it ends.

    Attributes:
        spec: command and log of the process.
        identity: identity of the running process; None if there is none.
        num_restarts: number of restarts so far.
        is_paused: no restart while this is True.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.identity: ProcessIdentity | None = None
        self.num_restarts = 0
        self.is_paused = False
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._backoff = Backoff()
        self._start_at: float | None = None
        self._kill_at: float | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def due(self) -> float | None:
        """Time (monotonic seconds) of the next action; None for none."""
        start_at = None if self.is_paused else self._start_at
        times = [t for t in (start_at, self._kill_at) if t is not None]
        return min(times, default=None)

    def start(self) -> None:
        self._start_at = None
        for path in self.spec.leftovers:
            path.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # The child must not report readiness for the starter's own service.
        environment.pop("NOTIFY_SOCKET", None)
        with self.spec.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        self._started = time.monotonic()
        self.identity = ProcessIdentity.of(self._process.pid)

    def act(self, now: float) -> bool:
        """Kills or restarts if that is due; True if it was restarted."""
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self.signal_group(signal.SIGKILL)
        if self.is_paused or self._start_at is None or now < self._start_at:
            return False
        self.num_restarts += 1
        self.start()
        return True

    def terminate(self, grace_seconds: float) -> None:
        """Sends SIGTERM now, and SIGKILL to its group after the grace."""
        if self._process is not None:
            self._process.terminate()
            self._kill_at = time.monotonic() + grace_seconds

    def signal_group(self, signum: signal.Signals) -> None:
        """Signals the process and all processes that it started."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signum)
        except ProcessLookupError:
            return

    def ended(self) -> tuple[int, float]:
        """Reaps the dead process and schedules its restart.

        Returns:
            Exit status, and delay of the restart in seconds.
        """
        assert self._process is not None
        # Before the wait, after which the group's number may be reused.
        self.signal_group(signal.SIGKILL)
        status = self._process.wait()
        was_terminated = self._kill_at is not None
        now = time.monotonic()
        delay = 0.0
        if not was_terminated:
            delay = self._backoff.next_delay(now - self._started)
        self._process = self.identity = self._kill_at = None
        self._start_at = now + delay
        return status, delay
