"""Gathers the facts for the first plan of a running job.

:meth:`.Replanner.begin` makes and applies that plan, and later ones.

A job begins with raw reads.  Meanwhile a thread observes the link, gets the
costs of the client (:mod:`hapi_client.planning.client_facts`), stops if
push-down would not pay with an infinitely fast worker, stores the package, and
has the worker profile it.  If reads during the split have shown the link's
speed, and push-down pays by its bytes alone, the package is stored first.
An error of any step is logged, and the job continues with raw reads.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Sequence

from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.planning.client_facts import POLL_SECONDS, ClientFacts
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.device_profile import LocalFacts
from hapi_client.planning.inputs import PlannerInputs
from hapi_client.planning.job_problem import (
    JobProblem,
    decline_reason,
    unlimited_worker,
)
from hapi_client.planning.plan_chooser import MIN_PUSH_GAIN
from hapi_client.planning.replanner import PlanChange, Replanner
from hapi_client.planning.route_mix import speedup_over
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_client.planning.worker_preparation import WorkerPreparation
from hapi_client.swift.transport import CancelScope
from hapi_protocol.errors import HapiError
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.planner.costs import layer_threads
from hapi_splitter.planner.plan import Plan, Problem
from hapi_splitter.planner.problem import Route

logger = logging.getLogger(__name__)

# A worker that restarts is back in seconds, and a package it refuses stays
# refused: the pause is short at first, and ten minutes cost such a job one
# request each.
RETRY_SECONDS = 30.0
"""First pause after a failed attempt; it doubles with each."""
MAX_RETRY_SECONDS = 600.0
# As long as the window of raw reads that it would wait for
# (KNOWN_LINK_SECONDS), so that waiting would gain nothing.
QUICK_UPLOAD_SECONDS = 0.5
"""An upload that takes less does not wait for measurements: while the worker
loads the package, the job is measured."""
# LOAD_SECONDS was measured as 3 to 7 s: if a plan gains half, it still pays
# when it is wrong by that much.
MIN_EARLY_GAIN = 1.5
"""Minimum speed-up of the rest, startup included, to store the package before
client and loop are known: the upload slows raw reads, and the time to load the
package is a guess."""
# Its requests are cancelled at once; it may still be in a forward pass or in
# the solver, which take seconds.
JOIN_SECONDS = 10.0
"""Longest wait for the planning thread at the end of a job."""


class JobPlanner:
    """Plans one job, from its first span to its last.

    Args:
        parts: parts of the job.
        estimates: estimates of the conditions.
        scheduler: schedules spans; it begins with raw reads.
        recorder: records the job.

    Attributes:
        no_plan_reason: reason for which there is no plan yet; a clause that
            follows "no plan:".
    """

    def __init__(
        self,
        parts: PlannerInputs,
        estimates: CostEstimators,
        scheduler: RouteScheduler[Route],
        recorder: JobRecorder,
    ) -> None:
        self._parts = parts
        self._estimates = estimates
        self._scheduler = scheduler
        self._recorder = recorder
        self._scope = CancelScope()
        self._server: ModelProfile | None = None
        self._worker = WorkerPreparation(parts)
        self._problem = JobProblem(parts, self._worker)
        self._client = ClientFacts(
            parts,
            self._problem,
            recorder,
            estimates.read_concurrency,
            self._scope,
        )
        self._pause = RETRY_SECONDS
        self.no_plan_reason = "it has not trained for long enough"
        self._replanner: Replanner | None = None
        self._settled = threading.Event()
        # The thread must not keep a forgotten job alive.
        weakref.finalize(self, self._scope.set_cancelled)
        self._thread = threading.Thread(
            target=_prepare,
            args=(weakref.ref(self), self._scope),
            name="hapi-plan",
            daemon=True,
        )

    # --- the training loop's thread ---

    def begin(self, *, is_training: bool = True) -> None:
        """Starts planning with the first epoch; called at each.

        Args:
            is_training: True to list the cache again, in a thread.
        """
        if self._thread.ident is None:
            self._recorder.take()
            self._thread.start()
        elif is_training and self._parts.listing and self.plan is not None:
            self._parts.listing.start(self._scope)

    def span_arrived(self) -> None:
        """Measures or re-plans if it is time; called after each span."""
        self._client.probe.span_arrived()
        if self._replanner is not None:
            self._replanner.span_arrived()

    def wait(self, seconds: float) -> bool:
        """Waits until the first attempt to plan has ended.

        It needs :meth:`begin` before, and a loop that reads spans meanwhile.

        Args:
            seconds: longest wait.

        Returns:
            False if the attempt has not ended by then.
        """
        return self._settled.wait(seconds)

    @property
    def plan(self) -> Plan | None:
        """The current plan; None until there is one."""
        return self._replanner.plan if self._replanner else None

    @property
    def changes(self) -> Sequence[PlanChange]:
        """All plans so far, oldest first."""
        return self._replanner.changes if self._replanner else ()

    @property
    def num_changes(self) -> int:
        """Number of plans so far."""
        return self._replanner.num_changes if self._replanner else 0

    @property
    def problem(self) -> Problem | None:
        """The planner's problem under current conditions; None before."""
        server, facts = self._server, self._client.known
        if server is None or facts is None:
            return None
        return self._problem.build(facts, server, self._estimates.conditions())

    def close(self) -> None:
        """Ends the planning thread and its requests."""
        self._parts.connection.cancel(self._scope)
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                logger.warning(
                    "the planning thread did not end in %g s", JOIN_SECONDS
                )

    # --- the planning thread ---

    def attempt(self) -> float | None:
        """Makes one attempt to plan.

        Returns:
            Seconds until the next attempt; None if none is needed.
        """
        try:
            with self._parts.connection.working_for(self._scope):
                wait = self._try()
        except HapiError as error:
            if self._scope.cancelled:
                return None
            wait = self._longer_pause()
            self.no_plan_reason = str(error)
            logger.warning(
                "no plan, raw reads for %.0f s more: %s", wait, error
            )
        except Exception:
            logger.exception(
                "internal error while planning; continuing with raw reads"
            )
            self.no_plan_reason = "internal error, see the log"
            wait = self._longer_pause()
        if wait != POLL_SECONDS:
            self._settled.set()
        return wait

    def _longer_pause(self) -> float:
        pause = self._pause
        self._pause = min(2 * pause, MAX_RETRY_SECONDS)
        return pause

    def _try(self) -> float | None:
        """Takes the next step towards a plan; returns as :meth:`attempt`."""
        client = self._client
        if client.observed is not None and (plan := self.plan) is not None:
            if client.is_short_job(1 / plan.samples_per_second):
                return RETRY_SECONDS
            # There turn out to be more epochs: it pays to measure now.
            client.observed = self._server = None
        if self._stores_early():
            self._worker.store()
        facts = client.known
        if facts is None:
            if client.request():
                return POLL_SECONDS
            if client.decline_reason:
                self._decline(client.decline_reason)
            return self._longer_pause()
        self._observe_start(facts)
        if self._server is None:
            if not self._may_pay(facts):
                return self._longer_pause()
            # A short job assumes that the worker is as fast as this host.
            self._server = self._worker.profile(
                facts.client if facts is client.observed else None
            )
            self._estimates.server_threads = layer_threads(self._server)
        server = self._server
        replanner = Replanner(
            build=lambda now: self._problem.build(facts, server, now),
            estimates=self._estimates,
            scheduler=self._scheduler,
            recorder=self._recorder,
            options=self._parts.options,
            clock=time.monotonic,
            random=random.random,
            tracker=self._parts.tracker,
        )
        replanner.begin()
        self._replanner = replanner
        return RETRY_SECONDS if facts is client.observed else None

    def _decline(self, reason: str) -> None:
        self.no_plan_reason = reason
        logger.info("no plan, raw reads only: %s", reason)

    def _stores_early(self) -> bool:
        """Returns True to store the package before client and loop are known.

        That is if its upload takes hardly any time, or if push-down pays
        though only the link took time.  Asked once, if the link's speed is
        known from reads during the split.
        """
        if self._client.early_rate or not (rate := self._parts.early_rate()):
            return False
        self._estimates.link.bytes_per_second = rate
        facts = self._client.expect_link(rate)
        if self._worker.upload_bytes() < QUICK_UPLOAD_SECONDS * rate:
            return True
        if facts is None:
            return False
        self._problem.expect_startup(rate)
        best, streaming = self._problem.best_case(
            facts, self._estimates.conditions()
        )
        seconds = MIN_EARLY_GAIN * best.total_seconds
        return best.pushes and (
            streaming is None or streaming.total_seconds >= seconds
        )

    def _observe_start(self, facts: LocalFacts) -> None:
        """Updates the estimates with the first window."""
        estimates = self._estimates
        estimates.client_threads = layer_threads(facts.client)
        window = self._client.take_window()
        # If the link was never saturated, the received bytes are a lower
        # bound of the upload's throughput.
        rate = max(window.received_rate, self._client.early_rate)
        self._problem.expect_startup(rate or None)
        server = self._server or unlimited_worker(facts.client)
        estimates.observe_start(
            window,
            self._problem.build(
                facts, server, estimates.conditions(scaled=False)
            ),
        )

    def _may_pay(self, facts: LocalFacts) -> bool:
        """Returns True if push-down pays with an infinitely fast worker."""
        best, streaming = self._problem.best_case(
            facts, self._estimates.conditions()
        )
        gain = speedup_over(streaming, best)
        if best.pushes and gain >= MIN_PUSH_GAIN:
            return True
        self._decline(decline_reason(best, gain))
        return False


def _prepare(reference: weakref.ref[JobPlanner], scope: CancelScope) -> None:
    """Runs the planning thread until there is a plan or the job ends."""
    while (planner := reference()) is not None:
        wait = planner.attempt()
        del planner
        if wait is None or scope.sleep(wait):
            return
