"""Which process is meant, for longer than its number is its own.

A process number is given again after its process ended. A number together
with the start time (clock ticks since boot) and the boot's id is not, so that
is what pid files keep here, and signals go through a pidfd that was
checked against it.
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
    """One process of one boot of this machine."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of a living process; None for dead or zombie."""
        ticks = _start_ticks(pid)
        return None if ticks is None else cls(pid, ticks, _boot_id())

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """Read :meth:`__str__`'s form; None if it is something else."""
        parts = text.split()
        if len(parts) != 3 or not (parts[0] + parts[1]).isdigit():
            return None
        return cls(int(parts[0]), int(parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{self.pid} {self.start_ticks} {self.boot_id}"

    def alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def send(self, signum: signal.Signals) -> bool:
        """Signal exactly this process; False if it is gone."""
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
        """Wait for its end; False if it still lives after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            while self.alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                select.select([handle], [], [], left)
        finally:
            os.close(handle)
        return True


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in brackets, may itself hold spaces and brackets.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in _DEAD_STATES else int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
