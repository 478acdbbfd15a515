"""Policies that choose the next turn on a device.  No I/O, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(eq=False)
class Share:
    """Facts of a job that a policy decides by.

    Attributes:
        weight: its part of fair shares.
        turns: turns that it has had.
        seconds: seconds of these.
        left: turns that it has yet to take; None if it does not say.
        start: virtual time at which its next turn begins, for fair shares.
    """

    weight: float
    turns: int = 0
    seconds: float = 0.0
    left: int | None = None
    start: float = 0.0

    def left_seconds(self) -> float:
        """Expected seconds until the job ends.

        Of one that does not say, as many as it has had: in samples of jobs,
        the longer one has run, the longer it goes on (Tiresias, NSDI'19).
        """
        if self.left is None or not self.turns:
            return self.seconds
        return self.left * self.seconds / self.turns


class FairShares:
    """Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM'96).

    A job's virtual time goes on by the seconds of its turns, divided by its
    weight.  That of one which has not asked for a while is moved on to that
    of the others, so that it cannot save up turns.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def asks(self, share: Share) -> None:
        """Notes that a job begins to wait for a turn."""
        share.start = max(share.start, self._now)

    def ends(self, share: Share, seconds: float) -> None:
        """Notes the end of a job's turn."""
        share.start += seconds / share.weight

    def choose(self, waiting: Iterable[Share]) -> Share:
        """Returns the job with the least virtual time, the first of equals."""
        chosen = min(waiting, key=lambda share: share.start)
        self._now = chosen.start
        return chosen


class ShortestRemaining(FairShares):
    """Shortest remaining time first, which gives the least mean time."""

    def choose(self, waiting: Iterable[Share]) -> Share:
        """Returns the job that is expected to end first."""
        return min(waiting, key=Share.left_seconds)


POLICIES: Mapping[str, Callable[[], FairShares]] = MappingProxyType(
    {"srtf": ShortestRemaining, "fair": FairShares}
)
"""Policies by the name of ``hapi device-queue --policy``."""
