"""Child processes of tests."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from hapi_cluster.identity import ProcessIdentity


def heed_interrupts() -> None:
    """``preexec_fn`` of a child that a test interrupts.

    A shell starts background jobs with SIGINT ignored, and children inherit
    that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def family(pid: int) -> list[ProcessIdentity]:
    """A process and all its descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    found = [pid]
    for ancestor in found:
        found += [p for p, parent in parents.items() if parent == ancestor]
    identities = [ProcessIdentity.of(p) for p in found]
    return [identity for identity in identities if identity is not None]
