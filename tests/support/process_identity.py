"""Identity of a process that stays unique after the process has ended."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from waiting import until


@dataclass(frozen=True)
class ProcessIdentity:
    """A process by its pid, which may be reused, and its start time.

    The time is in clock ticks since boot.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identity of a living process; None if it is dead or a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The command's name, in brackets, may contain spaces and brackets.
        state, *fields = stat.rpartition(") ")[2].split()
        return None if state in "ZXx" else cls(pid, int(fields[18]))

    def alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def send(self, signum: signal.Signals) -> None:
        """Sends a signal to exactly this process, if it is alive."""
        if self.alive():
            os.kill(self.pid, signum)

    def wait(self, seconds: float) -> None:
        """Waits for its end; fails after ``seconds``."""
        until(lambda: not self.alive(), seconds)
