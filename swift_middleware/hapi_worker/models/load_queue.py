"""Queue of models that wait for memory of one device.

No I/O; the clock is injected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

LOAD_GRACE_SECONDS = 8.0
"""Grace period after a load is queued, in which jobs of other models may still
start.  It starts again when a load is served, so that a loaded model is used
for a while."""
HEAD_SECONDS = 60.0
"""Time for which the head of the queue blocks other jobs.  Then it pauses for
as long, because jobs that do not end hold its memory."""
MAX_LOADS_PER_ACCOUNT = 16


@dataclass(eq=False)
class QueuedLoad:
    """A model that waits for memory.

    Attributes:
        account: account of the model.
        num_bytes: needed bytes, as far as they are known.
        since: monotonic seconds; later if its account had a turn.
        until: end of its lifetime, unless that is extended.
        digest: digest of its package, or empty.
    """

    account: str
    num_bytes: int
    since: float
    until: float
    digest: str


class LoadQueue:
    """The queued loads of one device; guarded by its lock.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loads: list[QueuedLoad] = []
        self._last_served = -math.inf

    def __len__(self) -> int:
        return len(self._in_order())

    def add(self, queued: QueuedLoad) -> bool:
        """Queues a load; returns False if its account has too many."""
        of_account = [c for c in self._loads if c.account == queued.account]
        if len(of_account) >= MAX_LOADS_PER_ACCOUNT:
            return False
        self._loads.append(queued)
        return True

    def remove(self, queued: QueuedLoad, served: bool = False) -> None:
        """Removes a load if it is queued.

        Args:
            queued: the load.
            served: it has its memory.
        """
        head, now = self.head(), self._clock()
        if queued not in self._loads:
            return
        if queued is head:
            # The account had its turn.
            self._postpone(queued.account, now)
            if served:
                self._last_served = now
        self._loads.remove(queued)

    def withdraw(self, queued: QueuedLoad) -> None:
        """Removes a load as if it had never been added."""
        self._loads.remove(queued)

    def head(self) -> QueuedLoad | None:
        """Returns the load whose turn it is."""
        return next(iter(self._in_order()), None)

    def waits(self, digest: str) -> bool:
        """Returns True if a load of that model is queued."""
        return any(each.digest == digest for each in self._in_order())

    def bytes_ahead(self, queued: QueuedLoad) -> int:
        """Needed bytes of the loads before it."""
        order = self._in_order()
        return sum(each.num_bytes for each in order[: order.index(queued)])

    def blocking(self) -> QueuedLoad | None:
        """Returns the load for which other jobs must leave memory."""
        head = self.head()
        if head is None:
            return None
        now = self._clock()
        waited = now - max(head.since, self._last_served)
        if waited >= LOAD_GRACE_SECONDS + HEAD_SECONDS:
            self._postpone(head.account, now + HEAD_SECONDS)
            return None
        return head if waited >= LOAD_GRACE_SECONDS else None

    def _postpone(self, account: str, since: float) -> None:
        for each in self._loads:
            if each.account == account:
                each.since = max(each.since, since)

    def _in_order(self) -> list[QueuedLoad]:
        now = self._clock()
        self._loads = [each for each in self._loads if now < each.until]
        earlier: Counter[str] = Counter()
        turns: dict[QueuedLoad, int] = {}
        for each in sorted(self._loads, key=lambda queued: queued.since):
            turns[each] = earlier[each.account]
            earlier[each.account] += 1
        return sorted(turns, key=lambda queued: (turns[queued], queued.since))
