"""Gets the costs of a job's client while the job reads raw.

A long job has the training loop's thread measure samples and device
(:mod:`hapi_client.planning.loop_probe`); a short one plans with what its first
window of raw reads shows (:mod:`hapi_client.planning.observed_costs`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hapi_client.metrics.events import WindowMetrics
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.planning.device_profile import LocalFacts
from hapi_client.planning.inputs import PlannerInputs
from hapi_client.planning.job_problem import JobProblem
from hapi_client.planning.loop_probe import TrainingThreadProbe
from hapi_client.planning.observed_costs import sample_seconds
from hapi_client.swift.transport import CancelScope

# The first read connects, and TCP's slow start takes some round trips: two
# seconds have tens of them.  The first window shows the link, which later
# windows correct.
WARM_UP_SECONDS = 2.0
"""Minimum time of raw reads by which the link is estimated."""
KNOWN_LINK_SECONDS = 0.5
"""The same, if reads during the split have shown the link's speed."""
# The first span waits for Swift's cold caches, and for the connection.
WARM_UP_SPANS = 2
"""Minimum number of spans that must arrive in that time."""
# A span of 64 photographs of 110 kB takes 28 s on 2 Mbit/s.  So slow a link
# gains most from push-down, and one span shows its speed.
MAX_WARM_UP_SECONDS = 60.0
"""Time after which one span is enough."""
# A tenth of the warm-up window.
POLL_SECONDS = 0.2
"""Interval at which the planning thread looks for spans and results."""
# Raw reads of the loop share the link meanwhile, so it is a few times the
# warm-up; on fast links all samples are there long before.
READ_SECONDS = 8.0
"""Approximate time to read samples; on a slow link fewer are read."""
# The loop stops for up to BUDGET_SECONDS and ENCODING_SECONDS, eight in all:
# a plan would have to save 13 % of a minute only to make up for them.
MIN_MEASURED_SECONDS = 60.0
"""Remaining time below which a job does not measure, because that stops the
loop for some seconds: it plans with what its raw reads have shown."""
# LOAD_SECONDS until the worker has the package, and time to use it.
MIN_REMAINING_SECONDS = 8.0
"""Remaining time below which a job does not plan."""


@dataclass(eq=False)
class ClientFacts:
    """Gets the costs of one job's client.

    Attributes:
        parts: parts of the job.
        problem: the problem of the job, for its remaining time.
        recorder: records the job.
        read_concurrency: maximum number of concurrent raw reads.
        scope: ends waits when cancelled.
        probe: measurement in the training loop's thread.
        observed: costs that a short job has shown; None if they are
            measured, or not known yet.
        early_rate: bytes per second of reads during the split; 0 if there
            were none.
        decline_reason: reason for which there are no costs; may be empty.
    """

    parts: PlannerInputs
    problem: JobProblem
    recorder: JobRecorder
    read_concurrency: int
    scope: CancelScope

    def __post_init__(self) -> None:
        self.probe = TrainingThreadProbe(self.parts.measure)
        self.observed: LocalFacts | None = None
        self.early_rate = 0.0
        self.decline_reason = ""
        self._window: WindowMetrics | None = None
        self._link_sample_seconds = 0.0
        self._samples_before = 0
        self._spans_before = 0

    @property
    def known(self) -> LocalFacts | None:
        """The costs; None until :meth:`request` has got them."""
        return self.probe.facts or self.observed

    def expect_link(self, rate: float) -> LocalFacts | None:
        """Notes the speed of reads during the split.

        Args:
            rate: bytes per second.

        Returns:
            Costs of a client for which only the link takes time; None if
            they are not known.
        """
        self.early_rate = rate
        facts = self.parts.observe(None)
        if facts is not None:
            self._link_sample_seconds = facts.samples.raw_bytes / rate
        return facts

    def is_short_job(self, sample_seconds: float) -> bool:
        """Returns True if too little time remains for a measurement."""
        seconds = self.problem.remaining_seconds(sample_seconds)
        return seconds < MIN_MEASURED_SECONDS

    def take_window(self) -> WindowMetrics:
        """Returns the window of the first raw reads once, then later ones."""
        window, self._window = self._window, None
        return window or self.recorder.take()

    def request(self) -> bool:
        """Takes the next step towards the costs.

        Returns:
            True to call it again soon, False to pause before that.

        Raises:
            Exception: the error of a measurement.
        """
        self.decline_reason = ""
        failure = self.probe.take_failure()
        if failure is not None:
            self._window = None
            raise failure
        if self._window is None:
            if not self._warm_up():
                return False
            so_far = self.parts.samples_so_far()
            if so_far == self._samples_before:
                return True  # the loop has not begun
            num_samples = so_far - self._samples_before
            self._samples_before = so_far
            window = self.recorder.take()
            # The loop may have used many fewer samples than were read ahead.
            seconds = self.problem.remaining_seconds(
                max(
                    sample_seconds(window, num_samples),
                    self._link_sample_seconds,
                )
            )
            if seconds < MIN_MEASURED_SECONDS and not self._observe(
                window, seconds
            ):
                return False
            self._window = window
            if self.observed is None:
                self.probe.request(
                    self.parts.read(self._max_probe_bytes(window))
                )
        return True

    def _max_probe_bytes(self, window: WindowMetrics) -> float:
        """Returns how many bytes one more read may have to be in time."""
        if not window.received_bytes:
            return math.inf  # all data had arrived before the window
        rate = window.received_rate
        return READ_SECONDS * rate / (1 + self.read_concurrency)

    def _observe(self, window: WindowMetrics, seconds: float) -> bool:
        """Takes the facts of a short job; returns False, with a reason."""
        needed = 0.0 if self.problem.is_stored else MIN_REMAINING_SECONDS
        if seconds >= needed:
            self.observed = self.parts.observe(window)
            needed = MIN_MEASURED_SECONDS
        if self.observed is None:
            self.decline_reason = (
                f"about {seconds:.0f} s remain, and planning needs at least "
                f"{needed:.0f} s"
            )
        return self.observed is not None

    def _warm_up(self) -> bool:
        """Waits for some raw reads; returns False if none arrived."""
        started = time.monotonic()
        needed = KNOWN_LINK_SECONDS if self.early_rate else WARM_UP_SECONDS
        while not self.scope.sleep(POLL_SECONDS):
            spans = self.recorder.num_spans - self._spans_before
            seconds = self.recorder.window_seconds
            if seconds >= needed and spans >= WARM_UP_SPANS:
                break
            if time.monotonic() - started >= MAX_WARM_UP_SECONDS:
                break
        else:
            return False
        self._spans_before += spans
        return spans > 0
