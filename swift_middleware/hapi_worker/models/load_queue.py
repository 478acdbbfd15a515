"""Queue of models that wait for memory of one device.

No I/O; the clock is injected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

CLAIM_SECONDS = 8.0
"""For so long jobs of other models begin beside a claim, and beside the next
one after it is met: a model that has come is used for a while."""
DUE_SECONDS = 60.0
"""After which a claim that is due has had its turn, though it was not met, and
rests for as long: jobs that do not end are in its way."""
MAX_CLAIMS = 16
"""Of one account."""


@dataclass(eq=False)
class QueuedLoad:
    """A model that waits for memory.

    Attributes:
        account: whose model it is.
        num_bytes: that it needs, as far as is known.
        since: monotonic seconds; later where its account had a turn.
        until: it lapses then, unless it is told that somebody still waits.
        digest: of its package, or empty.
    """

    account: str
    num_bytes: int
    since: float
    until: float
    digest: str


class LoadQueue:
    """Of one device; guarded by its lock.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._claims: list[QueuedLoad] = []
        self._met = -math.inf

    def __len__(self) -> int:
        return len(self._in_order())

    def add(self, claim: QueuedLoad) -> bool:
        """Whether the account may have one more."""
        of_account = [c for c in self._claims if c.account == claim.account]
        if len(of_account) >= MAX_CLAIMS:
            return False
        self._claims.append(claim)
        return True

    def drop(self, claim: QueuedLoad, met: bool = False) -> None:
        """It waits no more; further calls do nothing."""
        first, now = self.first(), self._clock()
        if claim not in self._claims:
            return
        if claim is first:
            # The account had its turn.
            self._postpone(claim.account, now)
            if met:
                self._met = now
        self._claims.remove(claim)

    def withdraw(self, claim: QueuedLoad) -> None:
        """As if it had never been added."""
        self._claims.remove(claim)

    def first(self) -> QueuedLoad | None:
        """Whose turn it is."""
        return next(iter(self._in_order()), None)

    def waits(self, digest: str) -> bool:
        """Whether somebody waits for that model."""
        return any(each.digest == digest for each in self._in_order())

    def bytes_ahead(self, claim: QueuedLoad) -> int:
        """Of those that come before it."""
        order = self._in_order()
        return sum(each.num_bytes for each in order[: order.index(claim)])

    def due(self) -> QueuedLoad | None:
        """The one that others must leave room for."""
        first = self.first()
        if first is None:
            return None
        now = self._clock()
        waited = now - max(first.since, self._met)
        if waited >= CLAIM_SECONDS + DUE_SECONDS:
            self._postpone(first.account, now + DUE_SECONDS)
            return None
        return first if waited >= CLAIM_SECONDS else None

    def _postpone(self, account: str, since: float) -> None:
        for each in self._claims:
            if each.account == account:
                each.since = max(each.since, since)

    def _in_order(self) -> list[QueuedLoad]:
        now = self._clock()
        self._claims = [each for each in self._claims if now < each.until]
        earlier: Counter[str] = Counter()
        turns: dict[QueuedLoad, int] = {}
        for each in sorted(self._claims, key=lambda claim: claim.since):
            turns[each] = earlier[each.account]
            earlier[each.account] += 1
        return sorted(turns, key=lambda claim: (turns[claim], claim.since))
