"""Throughput of spans, and the expected time of one more. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hapi_splitter.planner.problem import Route


@dataclass(frozen=True)
class Throughput:
    """Throughput of one loader.

    Attributes:
        samples_per_second: samples per second of one loop, cached samples
            excluded: the larger of measured and planned throughput, because
            a straggler lowers the measured value; 0 before the first window
            and plan.
        sample_seconds: moving average by route of the seconds per sample of
            a span, from its start to its end.  It is halved with each window
            without a span on that route, so that the route is tried again.
        in_flight: spans by route that have not arrived.
        waiting: samples by cut that wait for their suffix.
        suffix_seconds: moving average by cut of the seconds per sample of
            the suffix.
        link_seconds: seconds per sample by route at the full bandwidth of
            the link, which concurrent spans share.
    """

    samples_per_second: float = 0.0
    sample_seconds: Mapping[Route, float] = field(default_factory=dict)
    in_flight: Mapping[Route, float] = field(default_factory=dict)
    waiting: Mapping[int, float] = field(default_factory=dict)
    suffix_seconds: Mapping[int, float] = field(default_factory=dict)
    link_seconds: Mapping[Route, float] = field(default_factory=dict)

    def pending_samples(self, route: Route, span_samples: int) -> float:
        """Returns the scheduled samples of a route that are not finished.

        Args:
            route: cut and encoding; routes of one cut share their waiting
                samples.
            span_samples: samples of one span in flight.
        """
        in_flight = self.in_flight.get(route, 0.0) * span_samples
        return in_flight + self.waiting.get(route.cut, 0.0)

    def span_seconds(self, route: Route, span_samples: int) -> float:
        """Returns the seconds until one more span of a route is finished.

        The link bounds it from below, because the measured average may stem
        from spans that had the link to themselves.
        """
        pending = self.pending_samples(route, span_samples) + span_samples
        in_flight = (self.in_flight.get(route, 0.0) + 1) * span_samples
        return (
            max(
                self.sample_seconds.get(route, 0.0) * span_samples,
                self.link_seconds.get(route, 0.0) * in_flight,
            )
            + self.suffix_seconds.get(route.cut, 0.0) * pending
        )
