"""One watched process of a cluster.

Every child leads a session of its own, because Swift's servers signal
their whole process group when they stop, and is killed by the kernel
when the supervisor dies (PR_SET_PDEATHSIG): nothing outlives it.
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
LONGEST_DELAY_SECONDS = 15.0
STEADY_SECONDS = 30.0


@dataclass(frozen=True)
class ChildSpec:
    """What to run."""

    name: str
    argv: tuple[str, ...]
    log: Path
    answers: Callable[[], bool]
    """Whether it does its work (one short question)."""
    leftovers: tuple[Path, ...] = ()
    """Sockets of a killed predecessor, removed before a start."""


class Backoff:
    """Seconds before the next restart: doubling, forgiven when steady."""

    def __init__(self) -> None:
        self._delay = 0.0

    def next_delay(self, lived_seconds: float) -> float:
        if lived_seconds >= STEADY_SECONDS:
            self._delay = 0.0
        delay = self._delay or FIRST_DELAY_SECONDS
        self._delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        return delay


class ServerProcess:
    """A process that is started again whenever it ends."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.identity: ProcessIdentity | None = None
        self.num_restarts = 0
        self.held = False
        """Not started again until this is taken back."""
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
        """When (monotonic seconds) :meth:`act` has something to do."""
        start_at = None if self.held else self._start_at
        times = [t for t in (start_at, self._kill_at) if t is not None]
        return min(times, default=None)

    def start(self) -> None:
        self._start_at = None
        for path in self.spec.leftovers:
            path.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # The readiness of the starter's own service is not the child's.
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
        """Do what is due; True if a new process was started."""
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self.signal_group(signal.SIGKILL)
        if self.held or self._start_at is None or now < self._start_at:
            return False
        self.num_restarts += 1
        self.start()
        return True

    def terminate(self, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL to its group after the grace."""
        if self._process is not None:
            self._process.terminate()
            self._kill_at = time.monotonic() + grace_seconds

    def signal_group(self, signum: signal.Signals) -> None:
        """To the child and to whatever it started itself."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signum)
        except ProcessLookupError:
            return

    def ended(self) -> tuple[int, float]:
        """Reap it and plan its restart: exit status, delay in seconds.

        Its group is killed while its number is still its own.
        """
        assert self._process is not None
        self.signal_group(signal.SIGKILL)
        status = self._process.wait()
        asked = self._kill_at is not None
        now = time.monotonic()
        delay = 0.0
        if not asked:
            delay = self._backoff.next_delay(now - self._started)
        self._process = self.identity = self._kill_at = None
        self._start_at = now + delay
        return status, delay
