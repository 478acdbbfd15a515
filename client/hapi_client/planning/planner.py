"""Plans a running job: measures, stores the package, asks the worker, mixes.

A job begins by streaming. Meanwhile a thread of its own waits until the
link has shown what it carries, has samples and the device measured, asks
whether push-down could pay even with an infinitely fast worker, stores the
package, has the worker profile it, and only then are spans pushed. Whatever
fails there costs the job nothing but the chance: it is logged, and the job
goes on streaming.

It is the training loop's own thread that measures; see
:mod:`hapi_client.loop_measurement`.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.metrics.window_metrics import WindowMetrics
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.device_profile import LocalFacts
from hapi_client.planning.inputs import PlannerInputs
from hapi_client.planning.loop_probe import TrainingThreadProbe
from hapi_client.planning.replanner import (
    MIN_PUSH_GAIN,
    PlanChange,
    Replanner,
    speedup_over,
)
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_client.swift.transport import CancelScope
from hapi_protocol.encodings import ENCODINGS, PRECISIONS
from hapi_protocol.errors import HapiError
from hapi_protocol.profiles import BatchProfile, ModelProfile
from hapi_splitter.planner.costs import (
    Conditions,
    SampleCosts,
    StartupCost,
    build_problem,
    layer_threads,
)
from hapi_splitter.planner.plan import Plan, Problem, solve, streaming_plan
from hapi_splitter.planner.problem import Route
from hapi_splitter.units import number_text

logger = logging.getLogger(__name__)

WARM_UP_SECONDS = 2.0
"""Of streaming, before anything is uploaded: so long the link is watched,
and longer until :data:`WARM_UP_SPANS` have come."""
WARM_UP_SPANS = 2
MAX_WARM_UP_SECONDS = 60.0
POLL_SECONDS = 0.2
READ_SECONDS = 8.0
"""Of reading samples, about: a slow link brings fewer of them."""
MIN_REMAINING_SECONDS = 60.0
"""Of streaming: what would be over sooner is not worth the measuring, for
which the loop stands still for some seconds."""
RETRY_SECONDS = 30.0
"""After a plan that did not come about; doubles up to the longest."""
MAX_RETRY_SECONDS = 600.0
PROFILE_SECONDS = 180.0
JOIN_SECONDS = 10.0
UNLIMITED = 1e6
"""Speed of a worker that nothing limits, for the question whether it could
pay at all."""


class JobPlanner:
    """The plan of one job, from its first span to its last.

    Args:
        parts: see there.
        estimates: of the conditions.
        mixer: begins with streaming alone.
        meter: of the job.

    Attributes:
        no_plan_reason: while there is none; a clause that follows "no plan:".
    """

    def __init__(
        self,
        parts: PlannerInputs,
        estimates: CostEstimators,
        scheduler: RouteScheduler[Route],
        metrics: MetricsCollector,
    ) -> None:
        self._parts = parts
        self._estimates = estimates
        self._scheduler = scheduler
        self._metrics = metrics
        self._scope = CancelScope()
        self._server: ModelProfile | None = None
        self._startup_cost = StartupCost()
        self._measurement = TrainingThreadProbe(parts.measure)
        self._first_window: WindowMetrics | None = None
        self._encodings: Sequence[str] = ENCODINGS
        self._pause = RETRY_SECONDS
        self._samples_before = 0
        self.no_plan_reason = "it has not trained for long enough"
        self._replanner: Replanner | None = None
        self._settled = threading.Event()
        self._lock = threading.Lock()
        # The thread must not keep a job alive that nobody wants any more.
        weakref.finalize(self, self._scope.set_cancelled)
        self._thread = threading.Thread(
            target=_prepare,
            args=(weakref.ref(self), self._scope),
            name="hapi-plan",
            daemon=True,
        )

    # --- the training loop's thread ---

    def begin(self, *, is_training: bool = True) -> None:
        """Called when an epoch begins.

        Args:
            is_training: lists the cache again for it, without waiting.
        """
        if self._thread.ident is None:
            self._metrics.take()
            self._thread.start()
        elif is_training and self._parts.listing and self.plan is not None:
            self._parts.listing.start(self._scope)

    def span_arrived(self) -> None:
        """Called after each span."""
        self._measurement.span_arrived()
        with self._lock:
            replanner = self._replanner
        if replanner is not None:
            replanner.span_arrived()

    def wait(self, seconds: float) -> bool:
        """Whether the first plan was made, or given up, in time.

        It needs :meth:`begin`, and spans that come meanwhile.
        """
        return self._settled.wait(seconds)

    @property
    def plan(self) -> Plan | None:
        """The present one; None until there is one."""
        with self._lock:
            return self._replanner.plan if self._replanner else None

    @property
    def changes(self) -> Sequence[PlanChange]:
        """All plans so far, oldest first."""
        with self._lock:
            return self._replanner.changes if self._replanner else ()

    @property
    def num_changes(self) -> int:
        """Plans so far."""
        with self._lock:
            return self._replanner.num_changes if self._replanner else 0

    @property
    def problem(self) -> Problem | None:
        """The planner's problem under the present conditions."""
        server, facts = self._server, self._measurement.facts
        if server is None or facts is None:
            return None
        return self._build(facts, server, self._estimates.conditions())

    def close(self) -> None:
        """Ends what is under way."""
        self._parts.connection.cancel(self._scope)
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                logger.warning("the planning of a job is still busy")

    # --- the planning thread ---

    def attempt(self) -> float | None:
        """Seconds until another attempt; None when none is wanted."""
        try:
            with self._parts.connection.working_for(self._scope):
                wait = self._try()
        except HapiError as error:
            if self._scope.cancelled:
                return None
            wait = self._longer_pause()
            self.no_plan_reason = str(error)
            logger.warning(
                "no plan, streaming for %.0f s more: %s", wait, error
            )
        except Exception:
            logger.exception("a defect: no plan, the job streams")
            self.no_plan_reason = "a defect, see the log"
            wait = self._longer_pause()
        if wait != POLL_SECONDS:
            self._settled.set()
        return wait

    def _longer_pause(self) -> float:
        pause = self._pause
        self._pause = min(2 * pause, MAX_RETRY_SECONDS)
        return pause

    def _try(self) -> float | None:
        """One step on the way to a plan; as :meth:`attempt`."""
        facts = self._measurement.facts
        if facts is None:
            return self._ask_for_facts()
        if self._server is None:
            if not self._may_pay(facts):
                return self._longer_pause()
            self._server = self._ask_server()
        server = self._server
        replanner = Replanner(
            lambda conditions: self._build(facts, server, conditions),
            self._estimates,
            self._scheduler,
            self._metrics,
            self._parts.options,
            clock=time.monotonic,
            random=random.random,
            tracker=self._parts.tracker,
        )
        replanner.begin()
        with self._lock:
            self._replanner = replanner
        return None

    def _remaining_epochs(self) -> float:
        parts = self._parts
        return parts.remaining_work.remaining_epochs(
            parts.earlier_samples() + parts.samples_so_far()
        )

    def _ask_for_facts(self) -> float:
        failure = self._measurement.take_failure()
        if failure is not None:
            self._first_window = None
            raise failure
        if self._first_window is None:
            if not self._warm_up():
                return self._longer_pause()
            so_far = self._parts.samples_so_far()
            if so_far == self._samples_before:
                return POLL_SECONDS  # the loop has had nothing yet
            had, self._samples_before = so_far - self._samples_before, so_far
            window = self._metrics.take()
            if self._is_nearly_over(window.seconds / had):
                return self._longer_pause()
            self._measurement.ask(
                self._parts.read(self._bytes_in_time(window))
            )
            self._first_window = window
        return POLL_SECONDS

    def _bytes_in_time(self, window: WindowMetrics) -> float:
        """That a read beside those of the job may take."""
        if not window.received_bytes:
            return math.inf  # all had come before: the link is no limit
        rate = window.received_bytes / window.seconds
        return READ_SECONDS * rate / (1 + self._estimates.read_concurrency)

    def _is_nearly_over(self, sample_seconds: float) -> bool:
        """
        Args:
            sample_seconds: for each that the loop has had, which may be far
                fewer than were fetched ahead.
        """
        num_samples = self._parts.remaining_work.num_samples
        seconds = self._remaining_epochs() * num_samples * sample_seconds
        if seconds >= MIN_REMAINING_SECONDS:
            return False
        self._decline(
            f"what is to come takes about {seconds:.0f} s, and measuring pays "
            f"from {MIN_REMAINING_SECONDS:.0f} s on"
        )
        return True

    def _decline(self, reason: str) -> None:
        self.no_plan_reason = reason
        logger.info("no plan, the job streams: %s", reason)

    def _warm_up(self) -> bool:
        """Lets the job stream for a while; whether spans came."""
        started = time.monotonic()
        before = self._metrics.num_spans
        while not _slept(self._scope, POLL_SECONDS):
            waited = time.monotonic() - started
            spans = self._metrics.num_spans - before
            if waited >= WARM_UP_SECONDS and spans >= WARM_UP_SPANS:
                return True
            if waited >= MAX_WARM_UP_SECONDS:
                return spans > 0
        return False

    def _may_pay(self, facts: LocalFacts) -> bool:
        """Whether push-down would pay with a worker of endless speed."""
        server = unlimited_worker(facts.client)
        estimates = self._estimates
        estimates.client_threads = layer_threads(facts.client)
        window, self._first_window = self._first_window, None
        if window is None:
            window = self._metrics.take()
        self._startup_cost = StartupCost(
            package_bytes=self._package_bytes(),
            # A link without a known limit is no reason to take an upload
            # for nothing: it is as fast as what was seen to come.
            upload_bytes_per_second=window.received_bytes / window.seconds
            if window.received_bytes
            else None,
        )
        estimates.observe_start(
            window,
            self._build(facts, server, estimates.conditions(scaled=False)),
        )
        problem = self._build(facts, server, estimates.conditions())
        best = solve(problem)
        gain = speedup_over(streaming_plan(problem), best)
        if best.pushes and gain >= MIN_PUSH_GAIN:
            return True
        self._decline(_why_not(best, gain))
        return False

    def _package_bytes(self) -> int:
        parts = self._parts
        if parts.region.is_stored(parts.connection, parts.models_container):
            return 0
        return parts.region.parameter_bytes

    def _ask_server(self) -> ModelProfile:
        parts = self._parts
        section = parts.connection.require_hapi()
        self._encodings = section.get("encodings", ENCODINGS)
        started = time.monotonic()
        model, sent_bytes = parts.region.store(
            parts.connection, parts.models_container
        )
        parts.package_stored(model, sent_bytes)
        logger.info(
            "package stored: %d bytes in %.1f s",
            sent_bytes,
            time.monotonic() - started,
        )
        profile = parts.connection.get_profile(
            model.container, model.object, seconds=PROFILE_SECONDS
        )
        if section.get("cache"):
            parts.tracker.identify(profile.digest, profile.numerics_tag)
        if parts.listing is not None:
            parts.listing.read()
        # What has been paid is no reason against pushing any more.
        self._startup_cost = StartupCost()
        self._estimates.server_threads = layer_threads(profile)
        return profile

    def _build(
        self, facts: LocalFacts, server: ModelProfile, conditions: Conditions
    ) -> Problem:
        parts = self._parts
        return build_problem(
            facts.cuts,
            server,
            facts.client,
            with_encodings(facts.samples, self._encodings),
            conditions,
            # Only what the floor allows was measured.
            min_precision=PRECISIONS[-1],
            num_samples=parts.remaining_work.num_samples,
            epochs=self._remaining_epochs(),
            one_off=self._startup_cost,
        )


def _why_not(best: Plan, gain: float) -> str:
    """Why even a worker of endless speed would not be asked.

    Args:
        best: plan with such a worker.
        gain: of that over streaming.
    """
    if best.pushes:
        return (
            f"{best.label} would be {gain - 1:.1%} faster on a worker of "
            f"endless speed, and {MIN_PUSH_GAIN - 1:.0%} is the least"
        )
    if best.pays_from_samples is None:
        return "no cut would be faster, not even on a worker of endless speed"
    pays_from = math.ceil(best.pays_from_samples)
    return (
        "sending the package costs more than push-down would save, which "
        f"pays from {number_text(pays_from)} samples on"
    )


def _prepare(reference: weakref.ref[JobPlanner], scope: CancelScope) -> None:
    """The planning thread, until there is a plan or nobody wants one."""
    while (planner := reference()) is not None:
        wait = planner.attempt()
        del planner
        if wait is None or _slept(scope, wait):
            return


def _slept(scope: CancelScope, seconds: float) -> bool:
    """Whether the scope was cancelled meanwhile."""
    try:
        scope.wait(seconds)
    except HapiError:
        return True
    return False


def with_encodings(
    samples: SampleCosts, encodings: Sequence[str]
) -> SampleCosts:
    """Without the encodings that a proxy does not have."""
    kept = {
        route: count
        for route, count in samples.wire_bytes.items()
        if route[1] in encodings
    }
    return replace(samples, wire_bytes=kept)


def unlimited_worker(client: ModelProfile) -> ModelProfile:
    """A worker that nothing limits."""
    return replace(
        client,
        device="endless",
        cores=UNLIMITED,
        num_devices=int(UNLIMITED),
        batches=tuple(
            BatchProfile(each.batch, tuple(0.0 for _ in each.cut_seconds))
            for each in client.batches
        ),
        memory_limit_bytes=2**62,
    )
