"""Estimates a job's conditions from measurement windows.  No I/O.

Windows are *censored* observations: a link that was not the bottleneck shows
only that it is at least as fast as what it carried, and an idle worker only
that it can do what it was asked for.  So each window is first checked for its
bottleneck; everything else yields a bound, not a value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hapi_client.metrics.events import WindowMetrics
from hapi_client.planning.link_estimator import (
    BUSY_SHARE,
    MAX_RATE_RATIO,
    NEW_WEIGHT,
    RELAX_WEIGHT,
    LinkEstimator,
)
from hapi_splitter.planner.costs import Conditions
from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    RAW_ROUTE,
    SERVER_CPU,
    SERVER_DEVICE,
    Option,
    Problem,
    Route,
)
from hapi_splitter.planner.resource_use import (
    CLIENT_DECODING,
    CLIENT_LAYERS,
    SERVER_DECODING,
    SERVER_LAYERS,
    SERVING,
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
# Chosen.  Not 0: a client whose threads are busy unpacking blocks a worker
# too.  Simulated jobs do as well with 0.15 and with 0.6.
BLOCKED_SHARE = 0.3
"""Share of their time for which workers cannot send if the link limits
them."""
# Below 1, because a queue is not full at the start and end of an epoch, nor
# between two spans.  With half of it, simulated jobs do a little worse on a
# link that became slow (86 % of the optimum meanwhile, not 90 %).
FULL_QUEUE = 0.75
"""Mean share of busy threads from which on a read queue counts as full."""
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
            self._observe_share(computed, build(self.conditions()))

    def _observe_client(
        self, window: WindowMetrics, profiled: Problem
    ) -> None:
        raw_reads = _modelled(
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
                _modelled_layers(window, profiled),
                window.seconds,
            )
        else:
            self._observe_accelerator(window, _modelled(window, profiled))
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
        charged = _modelled(window, profiled)[
            CLIENT_DECODING
        ] * self.scale.get(CLIENT_DECODING, 1.0)
        lower_bound = 0.0
        if self.train_on_cpu:
            layers = _modelled_layers(window, profiled)
            charged += self.client_threads * (
                layers * self.scale.get(CLIENT_LAYERS, 1.0)
                + window.training.samples * self.train_seconds
            )
            lower_bound = -self.client_threads * self.train_seconds
        each = (window.client_cpu_seconds - charged) / window.num_samples
        if self.handling_seconds is not None:
            each = self.handling_seconds + NEW_WEIGHT * (
                each - self.handling_seconds
            )
        self.handling_seconds = max(lower_bound, each)

    def _observe_server(
        self, window: WindowMetrics, profiled: Problem
    ) -> None:
        pushed = _modelled(window, profiled, lambda route: route != RAW_ROUTE)
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
        each = spent / window.training.samples
        if self.train_seconds:
            each = self.train_seconds + NEW_WEIGHT * (
                each - self.train_seconds
            )
        self.train_seconds = each

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
        before = self.scale.get(kind, ratio)
        self.scale[kind] = before + NEW_WEIGHT * (ratio - before)

    def _observe_share(self, window: WindowMetrics, problem: Problem) -> None:
        """Updates the share of the storage tier that this job gets.

        While its requests queue there, that is what it uses; else it could
        use the idle capacity too.

        The share is the input of a loop: the plan pushes down as much as the
        share allows, and the next window shows what came of it.  Several jobs
        have such a loop around one worker.  So the share follows a full queue
        at once, and idle capacity slowly, for the reason for which a TCP
        sender halves its window and raises it in small steps (Chiu and Jain,
        1989): users of one resource then settle on fair shares.
        """
        if window.load is None:
            return
        used = _modelled_use(window, problem)
        # The tier is as fast as the busier of its two resources: the other
        # one is idle in part whatever the share.
        resource = _busier_resource(problem, used)
        # The problem has this job's part of the capacity: undo the share.
        capacity = problem.capacity(resource) / self.server_share
        used_share = used.get(resource, 0.0) / window.seconds / capacity
        busy = (
            window.load.cpu_busy
            if resource == SERVER_CPU
            else window.load.device_busy
        )
        concurrent = window.pushed.seconds / window.seconds
        # The worker counted streams at one moment, at which ours may have
        # been more than their mean.  With the mean alone, a job that had a
        # worker to itself took its own streams at the end of short epochs
        # for those of others, and drifted to raw reads from epoch to epoch.
        ours = max(concurrent, window.max_pushed)
        fair_share = window.load.share * min(
            1.0, ours / max(window.load.streams, 1)
        )
        queued = (
            concurrent >= FULL_QUEUE * self.pushdown_concurrency()
            and window.blocked_share < BLOCKED_SHARE
        )
        if queued:
            # The worker is saturated: the job gets its fair share, or what it
            # uses if that is more; and more than that if the read queue was
            # not always full, as at the end of an epoch: use / full is the
            # use while the queue is full.  Swift's own seconds for requests
            # and bytes are spent in any case, so they are not scaled up.
            # A worker that is less than busy is limited by something else,
            # such as its disks; then the fair share is one of what it does.
            full = min(1.0, concurrent / self.pushdown_concurrency())
            swift = 0.0
            if resource == SERVER_CPU:
                seconds = self._swift_seconds(window, problem)
                swift = seconds / window.seconds / capacity
            share = max(used_share, fair_share * max(used_share, busy))
            share = swift + max(0.0, share - swift) / full
        else:
            # The worker has answered all: what is idle could be used too.
            share = max(fair_share, used_share + 1.0 - busy)
        # Without a queue a higher share is a guess, and a lower one is not:
        # other jobs have taken the capacity.
        is_relaxing = not queued and share >= self.server_share
        weight = RELAX_WEIGHT if is_relaxing else NEW_WEIGHT
        # Not 0, because the next window divides the capacity by it.
        share = min(max(share, 0.01), 1.0)
        self.server_share += weight * (share - self.server_share)

    def _swift_seconds(self, window: WindowMetrics, problem: Problem) -> float:
        """Returns core-seconds of Swift itself on the server."""
        modelled = _modelled(window, problem)
        return self.server_share * modelled.get(SERVING, 0.0)


def _modelled(
    window: WindowMetrics,
    problem: Problem,
    counts: Callable[[Route], bool] = lambda route: True,
) -> dict[str, float]:
    """Returns modelled seconds of the window's samples, by component."""
    sums: dict[str, float] = defaultdict(float)
    for option, count in _options_of(window, problem):
        if counts(option.route):
            for kind, seconds in option.work.items():
                sums[kind] += count * seconds
    return sums


def _modelled_layers(window: WindowMetrics, problem: Problem) -> float:
    """Returns modelled device-seconds of layers computed on the client."""
    each = {
        option.cut: option.work.get(CLIENT_LAYERS, 0.0)
        for option in problem.options
    }
    return sum(
        each.get(cut, 0.0) * n
        for cut, n in window.layers.samples_by_cut.items()
    )


def _modelled_use(window: WindowMetrics, problem: Problem) -> dict[str, float]:
    """Returns the modelled use of each resource by the window's samples."""
    sums: dict[str, float] = defaultdict(float)
    for option, count in _options_of(window, problem):
        for resource, amount in option.use.items():
            sums[resource] += count * amount
    return sums


def _options_of(
    window: WindowMetrics, problem: Problem
) -> Iterator[tuple[Option, int]]:
    known = {each.route: each for each in problem.options}
    for route, count in window.samples.items():
        if route in known:
            yield known[route], count


def _busier_resource(problem: Problem, used: Mapping[str, float]) -> str:
    """Returns the resource of the storage tier with the higher usage."""
    return max(
        (SERVER_CPU, SERVER_DEVICE),
        key=lambda name: used.get(name, 0.0) / problem.capacity(name),
    )
