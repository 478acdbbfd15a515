"""The problem that a job's plans solve, for what remains of the job."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from hapi_client.planning.device_profile import LocalFacts
from hapi_client.planning.inputs import PlannerInputs
from hapi_client.planning.plan_chooser import MIN_PUSH_GAIN
from hapi_client.planning.worker_preparation import WorkerPreparation
from hapi_protocol.encodings import PRECISIONS
from hapi_protocol.profiles import BatchProfile, ModelProfile
from hapi_splitter.planner.costs import (
    Conditions,
    SampleCosts,
    build_problem,
)
from hapi_splitter.planner.plan import Plan, Problem, solve, streaming_plan
from hapi_splitter.planner.problem import StartupCost
from hapi_splitter.units import number_text

logger = logging.getLogger(__name__)

LOAD_SECONDS = 5.0
"""Assumed time until a worker has checked and loaded a package.  A worker on
one slow core took 3 to 7 s for packages of 4 MB while it served raw reads."""
# Not 0: a route without bytes would look free, however slow the link is.
MIN_TO_READ = 0.01
"""Smallest share of the remaining samples that counts as still to be read."""
# Larger than any ratio of client and worker, and small enough for the linear
# program's arithmetic.
UNLIMITED = 1e6
"""Cores and devices of an infinitely fast worker."""


class JobProblem:
    """Builds the problem of one job.

    Args:
        parts: parts of the job.
        worker: prepares the worker; nothing has to be paid for what it has
            done.
    """

    def __init__(self, parts: PlannerInputs, worker: WorkerPreparation):
        self._parts = parts
        self._worker = worker
        self._startup = StartupCost()

    @property
    def is_stored(self) -> bool:
        """True if the worker has the package, so that nothing is to pay."""
        return self._worker.model is not None

    def expect_startup(self, upload_bytes_per_second: float | None) -> None:
        """Estimates the startup cost, unless the package is stored.

        Args:
            upload_bytes_per_second: limit of the upload; None for the link's.
        """
        if not self.is_stored:
            self._startup = StartupCost(
                package_bytes=self._worker.upload_bytes(),
                load_seconds=LOAD_SECONDS,
                upload_bytes_per_second=upload_bytes_per_second,
            )

    def remaining_seconds(self, sample_seconds: float) -> float:
        """Returns the time to the job's end, from the time per sample."""
        num_samples = self._parts.remaining_work.num_samples
        return self.remaining_epochs() * num_samples * sample_seconds

    def remaining_epochs(self) -> float:
        """Returns the epochs that remain to be computed; a fraction counts."""
        parts = self._parts
        return parts.remaining_work.remaining_epochs(
            parts.earlier_samples() + parts.samples_so_far()
        )

    def build(
        self, facts: LocalFacts, server: ModelProfile, conditions: Conditions
    ) -> Problem:
        """Returns the problem under given conditions."""
        parts = self._parts
        epochs = self.remaining_epochs()
        num_samples = parts.remaining_work.num_samples
        samples = with_encodings(facts.samples, self._worker.encodings)
        # The link has already carried what was read early.
        to_read = 1 - parts.early_samples() / (epochs * num_samples)
        samples = replace(
            samples, raw_bytes=samples.raw_bytes * max(to_read, MIN_TO_READ)
        )
        return build_problem(
            facts.cuts,
            server,
            facts.client,
            samples,
            conditions,
            # Only encodings that min_precision allows were measured.
            min_precision=PRECISIONS[-1],
            num_samples=num_samples,
            epochs=epochs,
            startup=StartupCost() if self.is_stored else self._startup,
        )

    def best_case(
        self, facts: LocalFacts, conditions: Conditions
    ) -> tuple[Plan, Plan | None]:
        """Solves the problem with an infinitely fast worker.

        Returns:
            The best plan, and raw reads; None if the client lacks the memory
            for these.
        """
        server = unlimited_worker(facts.client)
        problem = self.build(facts, server, conditions)
        best, streaming = solve(problem), streaming_plan(problem)
        logger.info(
            "%.1f s with an infinitely fast worker, by %s; %.1f s without",
            best.total_seconds,
            best.label,
            streaming.total_seconds if streaming else math.inf,
        )
        return best, streaming


def with_encodings(
    samples: SampleCosts, encodings: Sequence[str]
) -> SampleCosts:
    """Returns the costs of the encodings that a proxy supports."""
    supported = {
        route: count
        for route, count in samples.wire_bytes.items()
        if route.encoding in encodings
    }
    return replace(samples, wire_bytes=supported)


def unlimited_worker(client: ModelProfile) -> ModelProfile:
    """Returns the profile of an infinitely fast worker."""
    return replace(
        client,
        device="unlimited",
        cores=UNLIMITED,
        num_devices=int(UNLIMITED),
        batches=tuple(
            BatchProfile(
                profile.batch, tuple(0.0 for _ in profile.cut_seconds)
            )
            for profile in client.batches
        ),
        memory_limit_bytes=2**62,
    )


def decline_reason(best: Plan, gain: float) -> str:
    """Returns the reason not to use even an infinitely fast worker.

    Args:
        best: best plan with such a worker.
        gain: its speed-up over raw reads.
    """
    if best.pushes:
        return (
            f"{best.label} would be {gain - 1:.1%} faster on an infinitely "
            f"fast worker, and the minimum is {MIN_PUSH_GAIN - 1:.0%}"
        )
    if best.pays_from_samples is None:
        return "no cut would be faster, not even on an infinitely fast worker"
    pays_from = math.ceil(best.pays_from_samples)
    return (
        "uploading the package costs more time than push-down saves: the "
        f"break-even is {number_text(pays_from)} samples"
    )
