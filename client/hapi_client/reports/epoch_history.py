"""The epochs of a job: their recorders, reports and progress bars."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.planning.job_planner import JobPlanner
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.reports.epoch_report import EpochReport, epoch_name
from hapi_client.reports.progress_bar import PlanStatus, start_progress_bar
from hapi_splitter.planner.problem import Route, mix_label


class EpochHistory:
    """Creates the recorder of each epoch and collects the reports.

    Args:
        wanted: from :func:`hapi_client.progress.progress_wanted`.
        route_scheduler: schedules spans over routes.
        recorder: recorder of the job.
        planner: returns the planner; None if the cut is fixed.
    """

    def __init__(
        self,
        wanted: bool | None,
        route_scheduler: RouteScheduler[Route],
        recorder: JobRecorder,
        planner: Callable[[], JobPlanner | None],
    ) -> None:
        self._wanted = wanted
        self._route_scheduler = route_scheduler
        self._recorder = recorder
        self._planner = planner
        self._recorders: list[EpochRecorder] = []

    def begin(
        self, epoch: int | None, split: str, *, shown: bool
    ) -> EpochRecorder:
        """Returns the recorder for a new loader.

        Args:
            epoch: number of the training epoch; None for evaluation.
            split: split of the data.
            shown: True if this process may show a progress bar.
        """
        # A reference to self would be a cycle with the recorder.
        plan_status = partial(
            current_plan_status, self._planner(), self._route_scheduler
        )
        start_bar = partial(
            start_progress_bar,
            epoch_name(epoch, split),
            wanted=self._wanted,
            plan_status=plan_status,
            traffic=self._recorder.traffic,
        )
        recorder = EpochRecorder(
            self._recorder,
            # JSON cannot represent NumPy's integers.
            epoch if epoch is None else operator.index(epoch),
            split,
            plan_status=plan_status,
            start_bar=start_bar if shown else lambda _: None,
        )
        self._recorders.append(recorder)
        return recorder

    @property
    def reports(self) -> list[EpochReport]:
        """Reports of all epochs that have begun, in order of creation."""
        reports = (recorder.report for recorder in self._recorders.copy())
        return [report for report in reports if report is not None]

    def close(self) -> None:
        """Ends the epochs that still run."""
        for recorder in self._recorders.copy():
            recorder.end()


def current_plan_status(
    planner: JobPlanner | None, route_scheduler: RouteScheduler[Route]
) -> PlanStatus:
    """Returns the plan in use, or the routes in use without one."""
    plan = planner.plan if planner else None
    if planner is None or plan is None:
        return PlanStatus(mix_label(route_scheduler.weights))
    return PlanStatus(
        plan.label,
        plan.samples_per_second,
        plan.binding,
        planner.num_changes,
    )
