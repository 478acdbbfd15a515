"""All experiments, by name, in the order of a whole run."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.suite import (
    ablations,
    grid,
    many_tenants,
    regret,
    runs,
    scaling,
)
from benchmarks.suite.experiment import Experiment
from benchmarks.suite.standalone import ACCURACY, BYTES, STAGES

EXPERIMENTS: Mapping[str, Experiment] = {
    each.name: each
    for each in (
        STAGES,
        BYTES,
        grid.EXPERIMENT,
        runs.EXPERIMENT,
        many_tenants.EXPERIMENT,
        scaling.EXPERIMENT,
        ablations.EXPERIMENT,
        regret.EXPERIMENT,
        ACCURACY,
    )
}
