"""How much of a job is still to come (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Horizon:
    """How many samples are still to come.

    Without a number of epochs as many are expected as have come already,
    and at least the epoch under way: whoever has trained for long will go
    on for long, and a wrong guess costs at most as much again.

    Args:
        num_samples: of the data set.
        epochs: that the user announced, if so.
    """

    num_samples: int
    epochs: float | None

    def epochs_to_come(self, samples_so_far: int) -> float:
        """At least the rest of the epoch under way."""
        done = samples_so_far / self.num_samples
        if self.epochs is not None:
            return max(self.epochs - done, 1.0 - done % 1.0)
        return max(done, 1.0 - done % 1.0)
