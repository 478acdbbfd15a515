"""Estimates link throughput from measurement windows. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from hapi_splitter.planner.problem import UNSEEN_LINK

RELAX_WEIGHT = 0.1
"""Of the newest interval where it only shows that there may be more."""
LINK_MEMORY_SECONDS = 60.0
LINK_GROWTH = 0.1
"""A link not seen at its limit for that long is taken to be faster by this
part, and by twice as much each further interval, so that one that became
faster is found."""
MAX_RATE_RATIO = 1.5
"""What a link at its limit carries tells so well how fast it is that an
older estimate is kept within this factor of it."""


@dataclass
class LinkEstimator:
    """Bytes per second of the job's path to Swift, all flows together."""

    bytes_per_second: float = UNSEEN_LINK
    _seconds_since_limited: float = 0.0
    _growth: float = LINK_GROWTH

    @property
    def has_limit(self) -> bool:
        """Whether it is known to have a limit."""
        return self.bytes_per_second < UNSEEN_LINK

    def observe(self, rate: float, limited: bool, seconds: float) -> None:
        """Takes one interval in.

        Args:
            rate: bytes per second that it carried.
            limited: whether the link was what limited it.
            seconds: its length.
        """
        if not limited:
            self._seconds_since_limited += seconds
            if self._seconds_since_limited > LINK_MEMORY_SECONDS:
                full = rate >= BUSY_SHARE * self.bytes_per_second
                self.bytes_per_second *= 1 + self._growth
                self._growth *= 2
                if full:
                    # It may well be what is believed: one small step.
                    self._seconds_since_limited = 0.0
                    self._growth = LINK_GROWTH
            self.raise_to(rate)
            return
        self._seconds_since_limited = 0.0
        self._growth = LINK_GROWTH
        before = min(self.bytes_per_second, MAX_RATE_RATIO * rate)
        if not self.has_limit:
            before = rate
        self.bytes_per_second = before + NEW_WEIGHT * (rate - before)

    def raise_to(self, rate: float) -> None:
        """Takes in what it carried, whatever limited that."""
        self.bytes_per_second = min(
            max(self.bytes_per_second, rate), UNSEEN_LINK
        )


BUSY_SHARE = 0.9
"""A resource used to this part of its capacity may be what limits."""

NEW_WEIGHT = 0.5
"""Of the newest interval in an average."""
