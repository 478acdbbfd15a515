"""How fast spans come, and when one more would (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hapi_splitter.planner.problem import Route


@dataclass(frozen=True)
class Throughput:
    """How fast spans come.

    Attributes:
        samples_per_second: of one loop, without those that the store had
            kept: measured, or planned where that is more, since where all
            have waited for a late span less was measured; 0 before the
            first window and plan.
        sample_seconds: by way, from the start of a span to its end for
            each of its samples: a moving average, halved with each window
            in which no span was on that way, so that it is tried again.
        under_way: spans by way that have not come.
        waiting: samples by cut that have come, and whose layers behind it
            are still to be computed here.
        finish_seconds: that these layers take for each sample: a moving
            average.
        link_seconds: by way, that the whole link takes for a sample; what
            comes at the same time shares it.
    """

    samples_per_second: float = 0.0
    sample_seconds: Mapping[Route, float] = field(default_factory=dict)
    in_flight: Mapping[Route, float] = field(default_factory=dict)
    waiting: Mapping[int, float] = field(default_factory=dict)
    suffix_seconds: Mapping[int, float] = field(default_factory=dict)
    link_seconds: Mapping[Route, float] = field(default_factory=dict)

    def pending_samples(self, way: Route, span_samples: int) -> float:
        """Samples that were dealt to a way, and are not done with.

        Args:
            way: cut and encoding; ways of one cut share what waits.
            span_samples: of one span under way.
        """
        coming = self.in_flight.get(way, 0.0) * span_samples
        return coming + self.waiting.get(way[0], 0.0)

    def span_seconds(self, way: Route, span_samples: int) -> float:
        """From now on until one more span of a way would be done with.

        What it takes may have been measured while it was alone.
        """
        ahead = self.pending_samples(way, span_samples) + span_samples
        coming = (self.in_flight.get(way, 0.0) + 1) * span_samples
        return (
            max(
                self.sample_seconds.get(way, 0.0) * span_samples,
                self.link_seconds.get(way, 0.0) * coming,
            )
            + self.suffix_seconds.get(way[0], 0.0) * ahead
        )
