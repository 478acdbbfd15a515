"""Estimates link throughput from measurement windows. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from hapi_splitter.planner.problem import UNSEEN_LINK

# Below 1, because a window also has the pauses between two reads.  With 0.45,
# simulated jobs (tests/support/simulated_tiers.py) did not find out within 60
# windows that a link had become faster; 0.99 changed nothing.
BUSY_SHARE = 0.9
"""Utilisation above which a resource may be the bottleneck."""
# A window is five seconds of a job whose spans arrive unevenly: with half the
# weight, an error of an estimate is an eighth after three of them, and one odd
# window moves it half-way at most.  Four simulated jobs that share a worker
# reach 95 % of the optimum on average; with 0.25 it is 89 %.
NEW_WEIGHT = 0.5
"""Weight of the newest window in an average."""
# A lower bound says that there is more, but not how much, and other jobs see
# the same idle capacity at the same time.  Half and twice the weight change
# nothing for simulated jobs.
RELAX_WEIGHT = 0.1
"""Weight of a window that gives only a lower bound."""
# Twelve re-plans: as long as a job does not saturate the link, a faster one
# would hardly help it.  Half and twice the time change nothing for simulated
# jobs, whose raw reads show a faster link before.
LINK_MEMORY_SECONDS = 60.0
"""Time without saturation after which the link estimate grows."""
# A link that became ten times as fast is known after six windows:
# 1.1 * 1.2 * 1.4 * 1.8 * 2.6 * 4.2 is more than ten.
LINK_GROWTH = 0.1
"""Initial relative growth of that estimate.  It doubles with each further
window, so that the estimate follows a link that became faster."""
# Simulated jobs reach 90 % of the optimum on a link that is no limit any more,
# after one of 0.5 MB/s, in 23 windows with 1.2, 11 with 1.5 and 5 with 3; but
# with 3, one window in which buffers are emptied would triple the estimate.
MAX_RATE_RATIO = 1.5
"""Upper bound of two ratios: the estimate over the rate of a saturated link,
and a rate that may come from buffered bytes over the estimate."""


@dataclass
class LinkEstimator:
    """Estimates the link's throughput, all flows together.

    Attributes:
        bytes_per_second: the estimate; :data:`UNSEEN_LINK` until the link
            was saturated once.
    """

    bytes_per_second: float = UNSEEN_LINK
    _seconds_since_limited: float = 0.0
    _growth: float = LINK_GROWTH

    @property
    def has_limit(self) -> bool:
        """True once the link was saturated."""
        return self.bytes_per_second < UNSEEN_LINK

    def observe(self, rate: float, limited: bool, seconds: float) -> None:
        """Updates the estimate with one window.

        Args:
            rate: bytes per second that arrived.
            limited: True if the link was saturated.
            seconds: length of the window.
        """
        if not limited:
            self._seconds_since_limited += seconds
            if self._seconds_since_limited > LINK_MEMORY_SECONDS:
                full = rate >= BUSY_SHARE * self.bytes_per_second
                self.bytes_per_second *= 1 + self._growth
                self._growth *= 2
                if full:
                    # The estimate may be right: one small step.
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
        """Raises the estimate to a rate that was reached."""
        self.bytes_per_second = min(
            max(self.bytes_per_second, rate), UNSEEN_LINK
        )
