"""All passes of a job over its data: their reports, and what is shown."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from functools import partial

from hapi_client.planning.planner import JobPlanner
from hapi_client.planning.replanner import way_label
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_client.reports.epoch_recorder import (
    EpochRecorder,
    NoLine,
    PlanChangeCounter,
    PlanStatus,
)
from hapi_client.reports.epoch_report import EpochReport, pass_name
from hapi_client.reports.progress_bar import open_line
from hapi_client.swift.traffic_counters import Traffic
from hapi_splitter.planner.problem import Route
from hapi_splitter.units import percent_text


class EpochHistory:
    """Makes tallies, and keeps what they have found.

    Args:
        wanted: as of :func:`hapi_client.reports.progress_bar.progress_wanted`.
        mixer: deals the spans.
        traffic: over the wire.
    """

    def __init__(
        self,
        wanted: bool | None,
        mixer: RouteScheduler[Route],
        traffic: Traffic,
    ) -> None:
        self._wanted = wanted
        self._mixer = mixer
        self._traffic = traffic
        self._planner: JobPlanner | None = None
        self._lock = threading.Lock()
        self._tallies: list[EpochRecorder] = []
        self._plans = PlanChangeCounter()

    def follow(self, planner: JobPlanner) -> None:
        """From now on the cut is not fixed."""
        self._planner = planner

    def begin(
        self, epoch: int | None, split: str, *, shown: bool
    ) -> EpochRecorder:
        """For a loader.

        Args:
            epoch: of training; None for the index's order.
            split: of the data.
            shown: whether this process may show anything.
        """
        # No reference to this object, which would make a cycle of the two.
        now = partial(in_force, self._planner, self._mixer)
        show = partial(
            open_line,
            pass_name(epoch, split),
            wanted=self._wanted,
            in_force=now,
            traffic=self._traffic,
        )
        tally = EpochRecorder(
            # NumPy's integers are not fit for JSON.
            epoch if epoch is None else operator.index(epoch),
            split,
            in_force=now,
            open_line=show if shown else lambda samples: NoLine(),
            plans=self._plans,
        )
        with self._lock:
            self._tallies.append(tally)
        return tally

    @property
    def reports(self) -> list[EpochReport]:
        """Of all that have begun, in the order of their loaders."""
        with self._lock:
            tallies = list(self._tallies)
        found = (tally.report for tally in tallies)
        return [each for each in found if each is not None]

    def close(self) -> None:
        """Ends those that are under way."""
        with self._lock:
            tallies = list(self._tallies)
        for tally in tallies:
            tally.end()


def in_force(
    planner: JobPlanner | None, mixer: RouteScheduler[Route]
) -> PlanStatus:
    """What is done at present.

    Args:
        planner: None where the cut is fixed.
        mixer: deals the spans.
    """
    plan = planner.plan if planner else None
    if planner is None or plan is None:
        return PlanStatus(_mix_label(mixer.weights))
    return PlanStatus(
        plan.label,
        plan.samples_per_second,
        plan.binding,
        planner.num_changes,
    )


def _mix_label(weights: Mapping[Route, float]) -> str:
    """As :attr:`hapi_splitter.planner.plan.Plan.label`."""
    if len(weights) == 1:
        return way_label(*weights)
    parts = sorted(weights.items(), key=lambda part: -part[1])
    return " + ".join(
        f"{percent_text(weight)} {way_label(way)}" for way, weight in parts
    )
