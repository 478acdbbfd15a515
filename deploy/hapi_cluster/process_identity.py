"""Identity of a process that stays unique after the process has ended.

A pid is reused after its process ends.  A pid with the start time (clock
ticks since boot) and the id of the boot is not.  Pid files hold all three, and
signals go through a pidfd that was checked against them.
"""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_DEAD_STATES = ("Z", "X", "x")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of one boot of this machine."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identity of a living process; None if it is dead or a zombie."""
        ticks = _start_ticks(pid)
        return None if ticks is None else cls(pid, ticks, _boot_id())

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """Reads the result of ``str()``; None if it is something else."""
        parts = text.split()
        if len(parts) != 3 or not (parts[0] + parts[1]).isdigit():
            return None
        return cls(int(parts[0]), int(parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{self.pid} {self.start_ticks} {self.boot_id}"

    def alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def send(self, signum: signal.Signals) -> bool:
        """Sends a signal to exactly this process; False if it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(handle, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def wait(self, timeout_seconds: float) -> bool:
        """Waits for its end; False if it is alive after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            while self.alive():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                select.select([handle], [], [], remaining)
        finally:
            os.close(handle)
        return True


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in brackets, may contain spaces and brackets.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in _DEAD_STATES else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
