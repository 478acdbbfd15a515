"""Estimates a job's conditions from measurement windows.  No I/O.

Windows are *censored* observations: a link that was not the bottleneck shows
only that it is at least as fast as what it carried, and an idle worker only
that it can do what it was asked for.  So each window is first checked for its
bottleneck; everything else yields a bound, not a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hapi_client.metrics.events import WindowMetrics
from hapi_client.planning.link_estimator import (
    BUSY_SHARE,
    MAX_RATE_RATIO,
    NEW_WEIGHT,
    LinkEstimator,
)
from hapi_client.planning.modelled_costs import (
    modelled_layers,
    modelled_seconds,
)
from hapi_client.planning.server_share import BLOCKED_SHARE, updated_share
from hapi_splitter.planner.costs import Conditions
from hapi_splitter.planner.problem import CLIENT_CPU, RAW_ROUTE, Problem
from hapi_splitter.planner.resource_use import (
    CLIENT_DECODING,
    CLIENT_LAYERS,
    SERVER_DECODING,
    SERVER_LAYERS,
    TRAINING,
)

# A raw read either waits for bytes or decodes them: above half, reading takes
# longer than decoding.  Simulated jobs do as well with 0.25 and with 0.8.
LINK_LIMITED_SHARE = 0.5
"""Share of their time for which raw reads wait for bytes if the link limits
them (or Swift, which is the same to the plan)."""
# A quarter of a second of a window of five: a plan with few raw reads has no
# more, and its link would never be known with a much larger share.
MIN_READING_SHARE = 0.05
"""Share of a window below which waiting for bytes shows nothing."""
# Twice a socket's default buffer (Linux: net.ipv4.tcp_rmem, 128 KiB), which
# may be full before the read begins to wait.
MIN_READ_BYTES = 256 * 1024
"""Bytes of a window below which they do not show the link's throughput."""
# Chosen: below half, there are enough other samples to show what limits them.
MOSTLY_CACHED = 0.5
"""Share of cached samples above which the link is not taken to be idle: their
responses may have saturated it, which raw reads would not show."""
# Between one flow, which the window of its connection may limit
# (:mod:`hapi_client.loading.read_concurrency` has a measurement), and two.
SATURATING_FLOWS = 1.5
"""Mean number of concurrent flows from which on they saturate a link."""
# Costs are rarely lower than in a profile of an idle machine; ten times as
# high means that other processes have most of the cores.  Beyond it a window
# is taken for a disturbance, such as a suspended process.
SCALE_RANGE = (0.2, 10.0)
"""Bounds of observed over profiled cost."""
# A tenth of a second of a window of five.  Clocks, page faults and other
# threads are of this order; half and twice the share change nothing for
# simulated jobs.
MIN_EXPECTED_SHARE = 0.02
"""Share of a window that a cost component must take by the profile, for the
window to show how wrong the profile is."""
# Not 0: the loop takes each span from a queue, and waits for the first one.
MAX_WAITING_SHARE = 0.1
"""Share of the time for which a training loop waits for spans, below which
the loop or its device is the bottleneck."""
# A loop on the CPU has at least one core if it is not preempted, and none
# while it waits for a disk, a lock or another rank; chosen in between.
MIN_LOOP_CORES = 0.3
"""Cores below which a training loop waits for something else: its wall time
counts, not its CPU time."""


@dataclass
class CostEstimators:
    """Estimates of a job's conditions, updated with each window.

    Args:
        pushdown_concurrency: returns the current limit of concurrent feature
            reads.
        train_on_cpu: True if the training loop computes on the CPU.
        client_threads: cores that the training loop takes then.
        server_threads: cores of one forward pass of the worker; 0 on an
            accelerator.
        read_concurrency: maximum number of concurrent raw reads.
        link: initial estimate of the link.

    Attributes:
        server_share: share of the workers' capacity that this job gets, 0
            to 1.
        num_workers: workers that serve this job.
        train_seconds: seconds of the training loop per sample.
        handling_seconds: client overhead, in core-seconds per sample:
            neither decoding, nor layers, nor training; negative if the loop
            uses fewer cores than it is charged.  None before the first
            window.
        scale: observed over profiled cost, by cost component.
    """

    pushdown_concurrency: Callable[[], int]
    train_on_cpu: bool
    client_threads: int = 1
    server_threads: int = 0
    read_concurrency: int = 4
    link: LinkEstimator = field(default_factory=LinkEstimator)
    server_share: float = 1.0
    num_workers: int = 1
    train_seconds: float = 0.0
    handling_seconds: float | None = None
    scale: dict[str, float] = field(default_factory=dict)

    def conditions(self, scaled: bool = True) -> Conditions:
        """Returns the current estimates for a planner's problem.

        Args:
            scaled: True to correct the profiles by :attr:`scale`.
        """
        return Conditions(
            link_bytes_per_second=self.link.bytes_per_second,
            server_share=self.server_share,
            num_workers=self.num_workers,
            train_seconds=self.train_seconds,
            handling_seconds=self.handling_seconds or 0.0,
            scale=dict(self.scale) if scaled else {},
        )

    def observe_start(self, window: WindowMetrics, profiled: Problem) -> None:
        """Updates link and training time from the first window.

        Most samples that arrived in it are not computed yet, so its CPU
        seconds show nothing.

        Args:
            window: sums of the window.
            profiled: problem under uncorrected conditions.
        """
        if window.seconds > 0 and window.num_samples:
            self._observe_training(window)
            self._observe_link(window, profiled)

    def observe(
        self, window: WindowMetrics, build: Callable[[Conditions], Problem]
    ) -> None:
        """Updates all estimates from a window.

        Args:
            window: sums of the window.
            build: returns the problem under given conditions.
        """
        if window.seconds <= 0 or not window.num_samples:
            return
        self.num_workers = max(1, window.num_workers)
        profiled = build(self.conditions(scaled=False))
        self._observe_training(window)
        self._observe_link(window, profiled)
        self._observe_client(window, profiled)
        if window.pushed.samples:
            computed = window.without_cached()
            self._observe_server(computed, profiled)
            self.server_share = updated_share(
                self.server_share,
                computed,
                build(self.conditions()),
                self.pushdown_concurrency(),
            )

    def _observe_client(
        self, window: WindowMetrics, profiled: Problem
    ) -> None:
        raw_reads = modelled_seconds(
            window, profiled, lambda route: route == RAW_ROUTE
        )
        self._rescale(
            CLIENT_DECODING,
            window.raw.decode_cpu_seconds,
            raw_reads.get(CLIENT_DECODING, 0.0),
            window.seconds,
        )
        if self.train_on_cpu:
            self._rescale(
                CLIENT_LAYERS,
                window.layers.cpu_seconds,
                modelled_layers(window, profiled),
                window.seconds,
            )
        else:
            self._observe_accelerator(
                window, modelled_seconds(window, profiled)
            )
        self._observe_handling(window, profiled)

    def _observe_accelerator(
        self, window: WindowMetrics, modelled: Mapping[str, float]
    ) -> None:
        """Corrects the profile of the client's accelerator.

        It computes asynchronously, so its seconds are not measured.  But if
        the loop never waits for a span, the device takes all of the window;
        and it never takes more than that.
        """
        # Spans may have arrived that the loop has not used yet.
        trained_share = window.training.samples / window.num_samples
        expected = trained_share * sum(
            modelled.get(kind, 0.0) for kind in (CLIENT_LAYERS, TRAINING)
        )
        limiting = window.waiting.seconds < MAX_WAITING_SHARE * window.seconds
        scaled = expected * self.scale.get(CLIENT_LAYERS, 1.0)
        if limiting or scaled > window.seconds:
            self._rescale(
                CLIENT_LAYERS, window.seconds, expected, window.seconds
            )
            if CLIENT_LAYERS in self.scale:
                self.scale[TRAINING] = self.scale[CLIENT_LAYERS]

    def _observe_handling(
        self, window: WindowMetrics, profiled: Problem
    ) -> None:
        """Updates the client overhead: CPU seconds that no component has."""
        charged = modelled_seconds(window, profiled)[
            CLIENT_DECODING
        ] * self.scale.get(CLIENT_DECODING, 1.0)
        lower_bound = 0.0
        if self.train_on_cpu:
            layers = modelled_layers(window, profiled)
            charged += self.client_threads * (
                layers * self.scale.get(CLIENT_LAYERS, 1.0)
                + window.training.samples * self.train_seconds
            )
            lower_bound = -self.client_threads * self.train_seconds
        overhead = (window.client_cpu_seconds - charged) / window.num_samples
        self.handling_seconds = max(
            lower_bound, _averaged(self.handling_seconds, overhead)
        )

    def _observe_server(
        self, window: WindowMetrics, profiled: Problem
    ) -> None:
        pushed = modelled_seconds(
            window, profiled, lambda route: route != RAW_ROUTE
        )
        decoding = window.pushed.server_cpu_seconds
        layers = window.pushed.stage("forward")
        if self.server_threads:
            # CPU seconds: decoding on the same cores stretches wall time.
            layers = window.pushed.stage("forward_cpu") / self.server_threads
            decoding -= window.pushed.stage("forward_cpu")
        for kind, seconds in (
            (SERVER_DECODING, decoding),
            (SERVER_LAYERS, layers),
        ):
            self._rescale(kind, seconds, pushed.get(kind, 0.0), window.seconds)

    def _observe_training(self, window: WindowMetrics) -> None:
        if not window.training.samples:
            return
        spent = window.training.seconds
        if (
            self.train_on_cpu
            and window.training.cpu_seconds > MIN_LOOP_CORES * spent
        ):
            spent = window.training.cpu_seconds
        self.train_seconds = _averaged(
            self.train_seconds or None, spent / window.training.samples
        )

    def _observe_link(self, window: WindowMetrics, profiled: Problem) -> None:
        cores = profiled.capacity(CLIENT_CPU)
        waited = (
            window.client_cpu_seconds < BUSY_SHARE * window.seconds * cores
            and window.received_bytes > 0
        )
        rate, limited = window.received_bytes / window.seconds, False
        # Only bytes of waiting reads count: with few raw reads the link is
        # idle in between.
        if waited and window.reading_seconds > 0:
            while_reading = window.reading_bytes / window.reading_seconds
            if window.reading_share <= LINK_LIMITED_SHARE:
                # Bytes from socket buffers arrive faster than any link, so
                # such a rate raises the estimate step by step.
                max_rate = MAX_RATE_RATIO * self.link.bytes_per_second
                if window.reading_bytes >= MIN_READ_BYTES:
                    rate = max(rate, min(while_reading, max_rate))
            elif window.reading_seconds > MIN_READING_SHARE * window.seconds:
                rate = while_reading
                # A single flow may be slow for reasons of its own.  It counts
                # at first, when there is no other estimate.
                is_first = (
                    not self.link.has_limit and not window.pushed.seconds
                )
                limited = is_first or window.reading_flows >= min(
                    SATURATING_FLOWS, 0.5 * self.read_concurrency
                )
        if waited and not limited and window.blocked_share > BLOCKED_SHARE:
            rate = window.received_bytes / window.seconds
            limited = window.pushed.seconds >= window.seconds
        if (
            not limited
            and window.num_cached > MOSTLY_CACHED * window.num_samples
        ):
            self.link.raise_to(rate)
        else:
            self.link.observe(rate, limited, window.seconds)

    def _rescale(
        self,
        kind: str,
        seconds: float,
        expected: float,
        window_seconds: float,
    ) -> None:
        """Updates the scale of a cost component, if the window has enough.

        Args:
            kind: the component.
            seconds: seconds that were measured.
            expected: seconds by the profile.
            window_seconds: length of the window.
        """
        if seconds <= 0 or expected <= MIN_EXPECTED_SHARE * window_seconds:
            return
        low, high = SCALE_RANGE
        ratio = min(max(seconds / expected, low), high)
        self.scale[kind] = _averaged(self.scale.get(kind), ratio)


def _averaged(before: float | None, new: float) -> float:
    """Returns the average of an estimate, if there is one, and a new value."""
    return new if before is None else before + NEW_WEIGHT * (new - before)
