"""Child processes of tests."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from process_identity import ProcessIdentity


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
