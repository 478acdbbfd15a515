"""Faults and queues of object servers, as the proxies of a host know them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hapi_middleware.shared_table import SharedTable, shared_table

Address = tuple[str, int]

TOLD_SECONDS = 5.0
"""Age at which a worker's own number of jobs is of no use any more."""
COMPUTED_SECONDS = 3600.0
"""Time for which an object server that has computed is the first to be sent
bytes."""
_BUCKETS = 1 << 13
"""Room for 65,000 faults and queues, in 1.5 MB: at 1,000 storage nodes some
thousands are in use."""


class NodeTable:
    """Faults and queues of object servers.

    A fault has a key of several parts: the address of a server, with the name
    of a device, an object or a model if only that is at fault.

    Args:
        shared: the memory of all processes.
        clock: seconds of a clock that all processes share.
    """

    def __init__(
        self,
        shared: SharedTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared or shared_table("nodes", _BUCKETS)
        self._clock = clock
        self._running: Counter[Address] = Counter()

    def leave_out(self, *fault: object, seconds: float) -> None:
        """Asks for something no more for ``seconds``."""
        self._shared.put(_key(fault), self._clock() + seconds, seconds)

    def back_off(
        self, *fault: object, seconds: float, longest: float
    ) -> float:
        """Leaves something out, each time for twice as long.

        Args:
            fault: its parts.
            seconds: for the first time.
            longest: for all others.

        Returns:
            The seconds.
        """
        before = self._shared.get(_key(fault))
        if before is not None and before.value > 0:
            seconds = max(seconds, min(2 * before.value, longest))
        self.leave_out(*fault, seconds=seconds)
        return seconds

    def forgive(self, *fault: object) -> None:
        """Asks for something again, and forgets for how long it did not."""
        if self._shared.get(_key(fault)) is not None:
            self._shared.put(_key(fault), 0.0)

    def is_left_out(self, *fault: object) -> bool:
        """True if something is not asked for now."""
        entry = self._shared.get(_key(fault))
        return entry is not None and entry.until > self._clock()

    def told(self, address: Address, jobs: int) -> None:
        """Notes how many jobs a worker says that it runs and keeps waiting."""
        until = self._clock() + TOLD_SECONDS
        self._shared.put(_key(("jobs", *address)), until, jobs)
        computes = self._shared.get(_key(("computes", *address)))
        if computes is None or computes.until < until:
            # Now and then: it is the same for each job.
            self._shared.put(
                _key(("computes", *address)), until + COMPUTED_SECONDS
            )

    def has_computed(self, address: Address) -> bool:
        """True if a worker there has granted a job not long ago."""
        return self.is_left_out("computes", *address)

    def jobs(self, address: Address) -> float:
        """Jobs of a worker: as it last said, and at least our own."""
        entry = self._shared.get(_key(("jobs", *address)))
        is_new = entry is not None and entry.until > self._clock()
        told = entry.value if entry is not None and is_new else 0.0
        return max(told, self._running[address])

    @contextmanager
    def running(self, address: Address) -> Iterator[None]:
        """Counts a job of this process while the block runs."""
        self._running[address] += 1
        try:
            yield
        finally:
            self._running[address] -= 1
            # Addresses come and go with rings.
            self._running += Counter()


def _key(parts: tuple[object, ...]) -> str:
    return "\n".join(map(str, parts))
