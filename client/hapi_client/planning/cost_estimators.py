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
    BUSY,
    MAX_OVER,
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

READING = 0.5
"""Plain reads that wait for bytes this part of their time are limited by
the link (or by Swift, which is the same to the plan)."""
MIN_READING = 0.05
"""Of an interval: waiting for bytes in less of it than this tells nothing
of the link."""
MIN_READ_BYTES = 256 * 1024
"""In an interval: fewer tell nothing of how fast the link is."""
MOSTLY_KEPT = 0.5
"""Of the samples: where more were kept, and plain reads do not tell that the
link was the limit, their answers may have been limited by it: it is not taken
to be faster than what is believed."""
MANY_FLOWS = 1.5
"""Plain reads at a time, on average, that together fill a link; or one, and
pushed answers that bring half as much meanwhile."""
BLOCKED = 0.3
"""Pushed reads that cannot send this part of their time, likewise."""
FULL_LANE = 0.75
"""A lane whose threads are busy this part of the time is kept full."""
SCALE_RANGE = (0.2, 10.0)
MIN_EXPECTED = 0.02
"""Of a kind of work, by the profile, as a part of the interval: less says
nothing of how wrong the profile is."""
SELDOM_WAITING = 0.1
"""A training loop that waits for spans in less than this part of the time is
what limits the job, or the device it computes on is."""
WAITING_LOOP = 0.3
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

    push_width: Callable[[], int]
    train_on_cpu: bool
    client_threads: int = 1
    server_threads: int = 0
    stream_width: int = 4
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

    def observe_start(self, seen: WindowMetrics, profiled: Problem) -> None:
        """Takes the first interval in, in which lines are still filling.

        It shows the link and the training loop; what came was mostly not
        yet computed, so its CPU seconds show nothing.

        Args:
            seen, profiled: as for :meth:`observe`.
        """
        if seen.seconds > 0 and seen.num_samples:
            self._observe_training(seen)
            self._observe_link(seen, profiled)

    def observe(
        self, seen: WindowMetrics, build: Callable[[Conditions], Problem]
    ) -> None:
        """Takes one interval in.

        Args:
            seen: its sums.
            build: the problem under given conditions.
        """
        if seen.seconds <= 0 or not seen.num_samples:
            return
        profiled = build(self.conditions(scaled=False))
        self._observe_training(seen)
        self._observe_link(seen, profiled)
        self._observe_client(seen, profiled)
        if seen.pushed_samples:
            computed = seen.without_cached()
            self._observe_server(computed, profiled)
            self._observe_share(computed, build(self.conditions()))

    def _observe_client(self, seen: WindowMetrics, profiled: Problem) -> None:
        streamed = _modelled(seen, profiled, lambda route: route == RAW_ROUTE)
        self._rescale(
            CLIENT_DECODING,
            seen.decode_cpu_seconds,
            streamed.get(CLIENT_DECODING, 0.0),
            seen.seconds,
        )
        if self.train_on_cpu:
            self._rescale(
                CLIENT_LAYERS,
                seen.suffix_cpu_seconds,
                _modelled_layers(seen, profiled),
                seen.seconds,
            )
        else:
            self._observe_accelerator(seen, _modelled(seen, profiled))
        self._observe_handling(seen, profiled)

    def _observe_accelerator(
        self, seen: WindowMetrics, modelled: Mapping[str, float]
    ) -> None:
        """How much slower the client's device is than its profile.

        An accelerator computes while the loop goes on, so nobody sees its
        seconds. But when the loop never waits for a span, and cores are not
        what is scarce, it is the device that takes all the time; and it
        never takes more than there is.
        """
        # Spans may have come that the loop has not had, and vice versa.
        had = seen.train_samples / seen.num_samples
        expected = had * sum(
            modelled.get(kind, 0.0) for kind in (CLIENT_LAYERS, TRAINING)
        )
        limiting = seen.waiting_seconds < SELDOM_WAITING * seen.seconds
        scaled = expected * self.scale.get(CLIENT_LAYERS, 1.0)
        if limiting or scaled > seen.seconds:
            self._rescale(CLIENT_LAYERS, seen.seconds, expected, seen.seconds)
            if CLIENT_LAYERS in self.scale:
                self.scale[TRAINING] = self.scale[CLIENT_LAYERS]

    def _observe_handling(
        self, seen: WindowMetrics, profiled: Problem
    ) -> None:
        """What the client's cores do beyond what they are charged with.

        Negative where a training step that uses few of the cores was
        charged all of them.
        """
        charged = _modelled(seen, profiled)[CLIENT_DECODING] * self.scale.get(
            CLIENT_DECODING, 1.0
        )
        least = 0.0
        if self.train_on_cpu:
            layers = _modelled_layers(seen, profiled)
            charged += self.client_threads * (
                layers * self.scale.get(CLIENT_LAYERS, 1.0)
                + seen.train_samples * self.train_seconds
            )
            least = -self.client_threads * self.train_seconds
        each = (seen.client_cpu_seconds - charged) / seen.num_samples
        if self.handling_seconds is not None:
            each = self.handling_seconds + NEW_WEIGHT * (
                each - self.handling_seconds
            )
        self.handling_seconds = max(least, each)

    def _observe_server(self, seen: WindowMetrics, profiled: Problem) -> None:
        pushed = _modelled(seen, profiled, lambda route: route != RAW_ROUTE)
        decoding = seen.server_cpu_seconds
        layers = seen.forward_seconds
        if self.server_threads:
            # Wall seconds of a forward that shares its cores with decoding
            # would count the sharing as work.
            layers = seen.forward_cpu_seconds / self.server_threads
            decoding -= seen.forward_cpu_seconds
        for kind, seconds in (
            (SERVER_DECODING, decoding),
            (SERVER_LAYERS, layers),
        ):
            self._rescale(kind, seconds, pushed.get(kind, 0.0), seen.seconds)

    def _observe_training(self, seen: WindowMetrics) -> None:
        if not seen.train_samples:
            return
        spent = seen.train_seconds
        if self.train_on_cpu and seen.train_cpu_seconds > WAITING_LOOP * spent:
            spent = seen.train_cpu_seconds
        each = spent / seen.train_samples
        if self.train_seconds:
            each = self.train_seconds + NEW_WEIGHT * (
                each - self.train_seconds
            )
        self.train_seconds = each

    def _observe_link(self, seen: WindowMetrics, profiled: Problem) -> None:
        cores = profiled.capacity(CLIENT_CPU)
        waited = (
            seen.client_cpu_seconds < BUSY * seen.seconds * cores
            and seen.received_bytes > 0
        )
        rate, limited = seen.received_bytes / seen.seconds, False
        # What came while nobody waited for it does not count, for a plan
        # that streams little leaves the link idle in between.
        if waited and seen.reading_seconds > 0:
            while_reading = seen.reading_bytes / seen.reading_seconds
            if seen.reading_share <= READING:
                # Bytes that a socket had kept for us come faster than any
                # link: such a rate is believed step by step.
                most = MAX_OVER * self.link.bytes_per_second
                if seen.reading_bytes >= MIN_READ_BYTES:
                    rate = max(rate, min(while_reading, most))
            elif seen.reading_seconds > MIN_READING * seen.seconds:
                rate = while_reading
                # One flow alone may be slow for reasons of its own; at first
                # it says more than nothing: a job begins with one, and would
                # take the link for endless.
                is_first = not self.link.is_seen and not seen.push_seconds
                limited = is_first or seen.reading_flows >= min(
                    MANY_FLOWS, 0.5 * self.stream_width
                )
        if waited and not limited and seen.blocked_share > BLOCKED:
            rate = seen.received_bytes / seen.seconds
            limited = seen.push_seconds >= seen.seconds
        if not limited and seen.num_cached > MOSTLY_KEPT * seen.num_samples:
            self.link.at_least(rate)
        else:
            self.link.observe(rate, limited, seen.seconds)

    def _rescale(
        self, kind: str, seconds: float, expected: float, window: float
    ) -> None:
        """Takes in what a kind of work took, if enough was expected of it.

        Of little, what was seen is mostly what comes with it.
        """
        if seconds <= 0 or expected <= MIN_EXPECTED * window:
            return
        low, high = SCALE_RANGE
        found = min(max(seconds / expected, low), high)
        before = self.scale.get(kind)
        if before is not None:
            found = before + NEW_WEIGHT * (found - before)
        self.scale[kind] = found

    def _observe_share(self, seen: WindowMetrics, problem: Problem) -> None:
        """How much of the storage tier is ours.

        While our requests queue there we get what we get; else what is
        idle may be had too.
        """
        if seen.load is None:
            return
        used = _used(seen, problem)
        resource = _scarcer(problem, used)
        whole = problem.capacity(resource) / self.server_share
        mine = used.get(resource, 0.0) / seen.seconds / whole
        busy = (
            seen.load.cpu_busy
            if resource == SERVER_CPU
            else seen.load.device_busy
        )
        concurrent = seen.push_seconds / seen.seconds
        # The worker counted streams at one moment, at which all that it saw
        # may have been ours, however seldom that is: not at an epoch's end.
        ours = max(concurrent, seen.max_pushed)
        fair = seen.load.share * min(1.0, ours / max(seen.load.streams, 1))
        queued = (
            concurrent >= FULL_LANE * self.push_width()
            and seen.blocked_share < BLOCKED
        )
        if queued:
            # The worker is at its limit: of all that it gives, our fair
            # part, or what we get, if that is more. While the lane ran
            # empty, at the end of an epoch say, it could have given more.
            full = min(1.0, concurrent / self.push_width())
            swift = 0.0
            if resource == SERVER_CPU:
                swift = self._served(seen, problem) / seen.seconds / whole
            found = max(mine, fair * max(mine, busy))
            found = swift + max(0.0, found - swift) / full
            weight = NEW_WEIGHT
        else:
            found, weight = max(fair, mine + 1.0 - busy), RELAX_WEIGHT
            if found < self.server_share:
                weight = NEW_WEIGHT
        found = min(max(found, 0.01), 1.0)
        self.server_share += weight * (found - self.server_share)

    def _served(self, seen: WindowMetrics, problem: Problem) -> float:
        """Of what was used of the server's cores, Swift's own part."""
        modelled = _modelled(seen, problem)
        return self.server_share * modelled.get(SERVING, 0.0)


def _modelled(
    seen: WindowMetrics,
    problem: Problem,
    counts: Callable[[Route], bool] = lambda route: True,
) -> dict[str, float]:
    """Seconds by kind of work that the model gives for what came."""
    sums: dict[str, float] = defaultdict(float)
    for option, count in _came(seen, problem):
        if counts(option.route):
            for kind, seconds in option.work.items():
                sums[kind] += count * seconds
    return sums


def _modelled_layers(seen: WindowMetrics, problem: Problem) -> float:
    """Device-seconds that the model gives for what was finished here."""
    each = {
        option.cut: option.work.get(CLIENT_LAYERS, 0.0)
        for option in problem.options
    }
    return sum(
        each.get(cut, 0.0) * n for cut, n in seen.suffix_samples.items()
    )


def _used(seen: WindowMetrics, problem: Problem) -> dict[str, float]:
    """Of each resource, that the model gives for what came."""
    sums: dict[str, float] = defaultdict(float)
    for option, count in _came(seen, problem):
        for resource, amount in option.use.items():
            sums[resource] += count * amount
    return sums


def _came(
    seen: WindowMetrics, problem: Problem
) -> Iterator[tuple[Option, int]]:
    known = {each.route: each for each in problem.options}
    for route, count in seen.samples.items():
        if route in known:
            yield known[route], count


def _scarcer(problem: Problem, used: Mapping[str, float]) -> str:
    """The resource of the storage tier that was used to a higher part."""
    return max(
        (SERVER_CPU, SERVER_DEVICE),
        key=lambda name: used.get(name, 0.0) / problem.capacity(name),
    )
