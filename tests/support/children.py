"""Child processes of tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from waiting import until


def enable_interrupts() -> None:
    """Enables interrupts in a child; for ``preexec_fn``.

    A shell starts background jobs with SIGINT ignored, and children inherit
    that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Enables interrupts in this process, however it was started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
        with contextlib.suppress(ProcessLookupError):
            if self.alive():
                os.kill(self.pid, signum)

    def wait(self, seconds: float) -> None:
        """Waits for its end; fails after ``seconds``."""
        until(lambda: not self.alive(), seconds)


def family(pid: int) -> list[ProcessIdentity]:
    """A process and all its descendants."""
    parents = _parents()
    found = [pid]
    for ancestor in found:
        found += _children(ancestor, parents)
    identities = [ProcessIdentity.of(p) for p in found]
    return [identity for identity in identities if identity is not None]


def children(pid: int) -> list[int]:
    """Processes that a process has started itself."""
    return _children(pid, _parents())


def _children(pid: int, parents: Mapping[int, int]) -> list[int]:
    return [child for child, parent in parents.items() if parent == pid]


def _parents() -> dict[int, int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    return parents


def run_family(
    command: Sequence[str],
    seconds: float,
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; nothing of its family outlives a failure.

    Raises:
        TimeoutExpired: after ``seconds``.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=seconds)
        except BaseException:
            for process in family(child.pid):
                process.send(signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(
        command, child.returncode, stdout, stderr
    )
