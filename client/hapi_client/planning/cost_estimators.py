"""What a job knows of its conditions, from what it observes (pure).

Observations are *censored*: a link that was not the bottleneck shows only
that it is at least as fast as what it carried, and a worker that was never
kept waiting shows only what it was asked for. So each interval first asks
what limited it; what did not limit it gives a bound, not a figure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hapi_client.metrics.window_metrics import WindowMetrics
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

LINK_LIMITED_SHARE = 0.5
"""Plain reads that wait for bytes this part of their time are limited by
the link (or by Swift, which is the same to the plan)."""
MIN_READING_SHARE = 0.05
"""Of an interval: waiting for bytes in less of it than this tells nothing
of the link."""
MIN_READ_BYTES = 256 * 1024
"""In an interval: fewer tell nothing of how fast the link is."""
MOSTLY_CACHED = 0.5
"""Of the samples: where more were kept, and plain reads do not tell that the
link was the limit, their answers may have been limited by it: it is not taken
to be faster than what is believed."""
SATURATING_FLOWS = 1.5
"""Plain reads at a time, on average, that together fill a link; or one, and
pushed answers that bring half as much meanwhile."""
BLOCKED_SHARE = 0.3
"""Pushed reads that cannot send this part of their time, likewise."""
FULL_QUEUE = 0.75
"""A lane whose threads are busy this part of the time is kept full."""
SCALE_RANGE = (0.2, 10.0)
MIN_EXPECTED_SHARE = 0.02
"""Of a kind of work, by the profile, as a part of the interval: less says
nothing of how wrong the profile is."""
MAX_WAITING_SHARE = 0.1
"""A training loop that waits for spans in less than this part of the time is
what limits the job, or the device it computes on is."""
MIN_LOOP_CORES = 0.3
"""A training loop that uses less of a core than this waits for something
else: its wall time counts, not its CPU time."""


@dataclass
class CostEstimators:
    """The conditions of a job, interval by interval.

    Args:
        push_width: pushed reads that may be under way at a time, now.
        train_on_cpu: whether the training loop computes on the CPU.
        client_threads: cores that it takes then.
        server_threads: cores of one forward of the worker; 0 where it
            computes on an accelerator.
        stream_width: plain reads that may be under way at a time.
        link: what is known of it at the start.

    Attributes:
        server_share: part of the worker's capacity that is ours, 0 to 1.
        train_seconds: of the training loop, per sample.
        handling_seconds: core-seconds of the client per sample, for what is
            neither decoding, nor layers, nor training; negative where the
            loop uses fewer cores than it is charged. None before the first
            interval.
        scale: observed over profiled cost, by kind of work.
    """

    pushdown_concurrency: Callable[[], int]
    train_on_cpu: bool
    client_threads: int = 1
    server_threads: int = 0
    read_concurrency: int = 4
    link: LinkEstimator = field(default_factory=LinkEstimator)
    server_share: float = 1.0
    train_seconds: float = 0.0
    handling_seconds: float | None = None
    scale: dict[str, float] = field(default_factory=dict)

    def conditions(self, scaled: bool = True) -> Conditions:
        """For :func:`hapi_splitter.planner.costs.build_problem`.

        Args:
            scaled: with what was learned of the profiles' errors.
        """
        return Conditions(
            link_bytes_per_second=self.link.bytes_per_second,
            server_share=self.server_share,
            train_seconds=self.train_seconds,
            handling_seconds=self.handling_seconds or 0.0,
            scale=dict(self.scale) if scaled else {},
        )

    def observe_start(self, window: WindowMetrics, profiled: Problem) -> None:
        """Takes the first interval in, in which lines are still filling.

        It shows the link and the training loop; what came was mostly not
        yet computed, so its CPU seconds show nothing.

        Args:
            seen, profiled: as for :meth:`observe`.
        """
        if window.seconds > 0 and window.num_samples:
            self._observe_training(window)
            self._observe_link(window, profiled)

    def observe(
        self, window: WindowMetrics, build: Callable[[Conditions], Problem]
    ) -> None:
        """Takes one interval in.

        Args:
            seen: its sums.
            build: the problem under given conditions.
        """
        if window.seconds <= 0 or not window.num_samples:
            return
        profiled = build(self.conditions(scaled=False))
        self._observe_training(window)
        self._observe_link(window, profiled)
        self._observe_client(window, profiled)
        if window.pushed_samples:
            computed = window.without_cached()
            self._observe_server(computed, profiled)
            self._observe_share(computed, build(self.conditions()))

    def _observe_client(
        self, window: WindowMetrics, profiled: Problem
    ) -> None:
        streamed = _modelled(
            window, profiled, lambda route: route == RAW_ROUTE
        )
        self._rescale(
            CLIENT_DECODING,
            window.decode_cpu_seconds,
            streamed.get(CLIENT_DECODING, 0.0),
            window.seconds,
        )
        if self.train_on_cpu:
            self._rescale(
                CLIENT_LAYERS,
                window.suffix_cpu_seconds,
                _modelled_layers(window, profiled),
                window.seconds,
            )
        else:
            self._observe_accelerator(window, _modelled(window, profiled))
        self._observe_handling(window, profiled)

    def _observe_accelerator(
        self, window: WindowMetrics, modelled: Mapping[str, float]
    ) -> None:
        """How much slower the client's device is than its profile.

        An accelerator computes while the loop goes on, so nobody sees its
        seconds. But when the loop never waits for a span, and cores are not
        what is scarce, it is the device that takes all the time; and it
        never takes more than there is.
        """
        # Spans may have come that the loop has not had, and vice versa.
        had = window.train_samples / window.num_samples
        expected = had * sum(
            modelled.get(kind, 0.0) for kind in (CLIENT_LAYERS, TRAINING)
        )
        limiting = window.waiting_seconds < MAX_WAITING_SHARE * window.seconds
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
        """What the client's cores do beyond what they are charged with.

        Negative where a training step that uses few of the cores was
        charged all of them.
        """
        charged = _modelled(window, profiled)[
            CLIENT_DECODING
        ] * self.scale.get(CLIENT_DECODING, 1.0)
        least = 0.0
        if self.train_on_cpu:
            layers = _modelled_layers(window, profiled)
            charged += self.client_threads * (
                layers * self.scale.get(CLIENT_LAYERS, 1.0)
                + window.train_samples * self.train_seconds
            )
            least = -self.client_threads * self.train_seconds
        each = (window.client_cpu_seconds - charged) / window.num_samples
        if self.handling_seconds is not None:
            each = self.handling_seconds + NEW_WEIGHT * (
                each - self.handling_seconds
            )
        self.handling_seconds = max(least, each)

    def _observe_server(
        self, window: WindowMetrics, profiled: Problem
    ) -> None:
        pushed = _modelled(window, profiled, lambda route: route != RAW_ROUTE)
        decoding = window.server_cpu_seconds
        layers = window.forward_seconds
        if self.server_threads:
            # Wall seconds of a forward that shares its cores with decoding
            # would count the sharing as work.
            layers = window.forward_cpu_seconds / self.server_threads
            decoding -= window.forward_cpu_seconds
        for kind, seconds in (
            (SERVER_DECODING, decoding),
            (SERVER_LAYERS, layers),
        ):
            self._rescale(kind, seconds, pushed.get(kind, 0.0), window.seconds)

    def _observe_training(self, window: WindowMetrics) -> None:
        if not window.train_samples:
            return
        spent = window.train_seconds
        if (
            self.train_on_cpu
            and window.train_cpu_seconds > MIN_LOOP_CORES * spent
        ):
            spent = window.train_cpu_seconds
        each = spent / window.train_samples
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
        # What came while nobody waited for it does not count, for a plan
        # that streams little leaves the link idle in between.
        if waited and window.reading_seconds > 0:
            while_reading = window.reading_bytes / window.reading_seconds
            if window.reading_share <= LINK_LIMITED_SHARE:
                # Bytes that a socket had kept for us come faster than any
                # link: such a rate is believed step by step.
                most = MAX_RATE_RATIO * self.link.bytes_per_second
                if window.reading_bytes >= MIN_READ_BYTES:
                    rate = max(rate, min(while_reading, most))
            elif window.reading_seconds > MIN_READING_SHARE * window.seconds:
                rate = while_reading
                # One flow alone may be slow for reasons of its own; at first
                # it says more than nothing: a job begins with one, and would
                # take the link for endless.
                is_first = not self.link.has_limit and not window.push_seconds
                limited = is_first or window.reading_flows >= min(
                    SATURATING_FLOWS, 0.5 * self.read_concurrency
                )
        if waited and not limited and window.blocked_share > BLOCKED_SHARE:
            rate = window.received_bytes / window.seconds
            limited = window.push_seconds >= window.seconds
        if (
            not limited
            and window.num_cached > MOSTLY_CACHED * window.num_samples
        ):
            self.link.raise_to(rate)
        else:
            self.link.observe(rate, limited, window.seconds)

    def _rescale(
        self, kind: str, seconds: float, expected: float, window: float
    ) -> None:
        """Takes in what a kind of work took, if enough was expected of it.

        Of little, what was seen is mostly what comes with it.
        """
        if seconds <= 0 or expected <= MIN_EXPECTED_SHARE * window:
            return
        low, high = SCALE_RANGE
        found = min(max(seconds / expected, low), high)
        before = self.scale.get(kind)
        if before is not None:
            found = before + NEW_WEIGHT * (found - before)
        self.scale[kind] = found

    def _observe_share(self, window: WindowMetrics, problem: Problem) -> None:
        """How much of the storage tier is ours.

        While our requests queue there we get what we get; else what is
        idle may be had too.
        """
        if window.load is None:
            return
        used = _modelled_use(window, problem)
        resource = _scarcer(problem, used)
        whole = problem.capacity(resource) / self.server_share
        mine = used.get(resource, 0.0) / window.seconds / whole
        busy = (
            window.load.cpu_busy
            if resource == SERVER_CPU
            else window.load.device_busy
        )
        concurrent = window.push_seconds / window.seconds
        # The worker counted streams at one moment, at which all that it saw
        # may have been ours, however seldom that is: not at an epoch's end.
        ours = max(concurrent, window.max_pushed)
        fair = window.load.share * min(1.0, ours / max(window.load.streams, 1))
        queued = (
            concurrent >= FULL_QUEUE * self.pushdown_concurrency()
            and window.blocked_share < BLOCKED_SHARE
        )
        if queued:
            # The worker is at its limit: of all that it gives, our fair
            # part, or what we get, if that is more. While the lane ran
            # empty, at the end of an epoch say, it could have given more.
            full = min(1.0, concurrent / self.pushdown_concurrency())
            swift = 0.0
            if resource == SERVER_CPU:
                swift = self._served(window, problem) / window.seconds / whole
            found = max(mine, fair * max(mine, busy))
            found = swift + max(0.0, found - swift) / full
            weight = NEW_WEIGHT
        else:
            found, weight = max(fair, mine + 1.0 - busy), RELAX_WEIGHT
            if found < self.server_share:
                weight = NEW_WEIGHT
        found = min(max(found, 0.01), 1.0)
        self.server_share += weight * (found - self.server_share)

    def _served(self, window: WindowMetrics, problem: Problem) -> float:
        """Of what was used of the server's cores, Swift's own part."""
        modelled = _modelled(window, problem)
        return self.server_share * modelled.get(SERVING, 0.0)


def _modelled(
    window: WindowMetrics,
    problem: Problem,
    counts: Callable[[Route], bool] = lambda route: True,
) -> dict[str, float]:
    """Seconds by kind of work that the model gives for what came."""
    sums: dict[str, float] = defaultdict(float)
    for option, count in _came(window, problem):
        if counts(option.route):
            for kind, seconds in option.work.items():
                sums[kind] += count * seconds
    return sums


def _modelled_layers(window: WindowMetrics, problem: Problem) -> float:
    """Device-seconds that the model gives for what was finished here."""
    each = {
        option.cut: option.work.get(CLIENT_LAYERS, 0.0)
        for option in problem.options
    }
    return sum(
        each.get(cut, 0.0) * n for cut, n in window.suffix_samples.items()
    )


def _modelled_use(window: WindowMetrics, problem: Problem) -> dict[str, float]:
    """Of each resource, that the model gives for what came."""
    sums: dict[str, float] = defaultdict(float)
    for option, count in _came(window, problem):
        for resource, amount in option.use.items():
            sums[resource] += count * amount
    return sums


def _came(
    window: WindowMetrics, problem: Problem
) -> Iterator[tuple[Option, int]]:
    known = {each.route: each for each in problem.options}
    for route, count in window.samples.items():
        if route in known:
            yield known[route], count


def _scarcer(problem: Problem, used: Mapping[str, float]) -> str:
    """The resource of the storage tier that was used to a higher part."""
    return max(
        (SERVER_CPU, SERVER_DEVICE),
        key=lambda name: used.get(name, 0.0) / problem.capacity(name),
    )
