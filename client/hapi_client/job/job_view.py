"""Plan, statistics and reports that data sets and jobs show their users."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hapi_client.data.splits import TRAIN
from hapi_client.job.pipeline import FeaturePipeline
from hapi_client.metrics.events import JobStats
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.split_arguments import AUTO
from hapi_client.planning.replanner import PlanChange
from hapi_client.reports.notebook import Reports
from hapi_client.reports.run_page import write_reports
from hapi_client.reports.run_report import DEFAULT_TITLE, Curves
from hapi_protocol.errors import ClientError
from hapi_splitter.described import Described
from hapi_splitter.planner.plan import Plan, Problem


class JobView(Described):
    """Plan, statistics and reports of a data set or job.

    In the process that made it: a loader worker has none, and gets a
    ``ClientError``.
    """

    _pipeline: FeaturePipeline | None
    _split = TRAIN

    @property
    def pipeline(self) -> FeaturePipeline:
        """Loaders of this process; internal, and may change."""
        if self._pipeline is None or not self._pipeline.is_own:
            raise ClientError(
                "bad_configuration",
                "samples, plan, statistics and reports belong to the process "
                "that made the data set or job, and this is another; ask for "
                "them there",
            )
        return self._pipeline

    def describe(self) -> Mapping[str, str]:
        """Returns data, model and plan, by name."""
        if self._pipeline is None or not self._pipeline.is_own:
            return {"in": "a loader worker, which has no plan or reports"}
        data = self._pipeline.data
        split = data.split(self._split)
        places = dict.fromkeys(map(str, split.locations))
        planned = str(self.plan or self.no_plan_reason)
        return {
            "data": ", ".join(places),
            "samples": f"{split.num_samples:,} in batches of "
            f"{data.options.batch_size}",
            "frozen up to": str(self.frozen.freeze),
            "features": "x".join(map(str, self.feature_shape)),
            "cut": f"auto: {planned}" if self.cut == AUTO else str(self.cut),
            "passes": str(len(self.reports)),
        }

    @property
    def frozen(self) -> FrozenRegion:
        """The frozen region, with the limits of this job."""
        return self.pipeline.frozen

    @property
    def cut(self) -> int | str:
        """Number of the cut, or ``"auto"``."""
        return self.pipeline.plan.cut

    @property
    def plan(self) -> Plan | None:
        """The current plan; None as :attr:`no_plan_reason` says.

        If the cut is fixed, there is none yet, or push-down does not pay.
        Without a plan, all samples of a job with ``cut="auto"`` are read raw.
        """
        planner = self.pipeline.plan.planner
        return planner.plan if planner else None

    @property
    def no_plan_reason(self) -> str | None:
        """Reason for which :attr:`plan` is None; None if there is a plan."""
        planner = self.pipeline.plan.planner
        if planner is None:
            return "the cut is fixed"
        return None if planner.plan else planner.no_plan_reason

    @property
    def problem(self) -> Problem | None:
        """The problem that :attr:`plan` solves, with current conditions."""
        planner = self.pipeline.plan.planner
        return planner.problem if planner else None

    @property
    def plan_changes(self) -> Sequence[PlanChange]:
        """All plans so far, oldest first."""
        planner = self.pipeline.plan.planner
        return planner.changes if planner else ()

    @property
    def num_cuts(self) -> int:
        """Number of cuts; the last one is the whole frozen region."""
        return self.frozen.num_cuts

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one sample at the freeze point."""
        return self.frozen.cut_shape(self.num_cuts)

    @property
    def num_samples(self) -> int:
        """Number of samples of the data set, or of the job's training data."""
        return self.pipeline.data.split(self._split).num_samples

    @property
    def num_classes(self) -> int:
        """Number of classes, one more than the largest label of any split."""
        return self.pipeline.data.num_classes

    @property
    def stats(self) -> JobStats:
        """Counters of the job so far, without workers of a ``DataLoader``."""
        return self.pipeline.stats

    @property
    def reports(self) -> Reports:
        """Time and traffic of each epoch on this rank, oldest first.

        The current epoch is included as far as it got, and nothing of what
        workers of a ``DataLoader`` do.
        """
        return Reports(self.pipeline.history.reports)

    def write_report(
        self,
        path: str | os.PathLike[str],
        title: str = DEFAULT_TITLE,
        curves: Curves | None = None,
    ) -> None:
        """Writes :attr:`reports` to a file.

        Args:
            path: file name that ends in ``.json``, or in ``.html`` for
                tables and figures in one file.
            title: title of the page.
            curves: results of each epoch of a run, or of several by their
                names, to draw: ``{"": [{"loss": 0.7, "val_loss": 0.9,
                "val_accuracy": 0.6}]}``.

        Raises:
            ClientError: ``bad_configuration`` for another suffix, or a file
                that cannot be written.
        """
        write_reports(path, self.reports, title, curves)

    def features_facts(self) -> dict[str, Any]:
        """Facts that determine the features of all epochs, fit for JSON.

        Cut and encoding are not among them.  A tail that was trained on
        features of other facts does not match this job.
        """
        return self.pipeline.features_facts()
