"""What a job knows of its conditions, from what it observes (pure).

Observations are *censored*: a link that was not the bottleneck shows only
that it is at least as fast as what it carried, and a worker that was never
kept waiting shows only what it was asked for. So each interval first asks
what limited it; what did not limit it gives a bound, not a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hapi_client.meter import STREAMED, Observation
from hapi_splitter.costs import Conditions
from hapi_splitter.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    SERVER_CPU,
    SERVER_DEVICE,
    Problem,
)

UNKNOWN_LINK = 1e12
"""Bytes per second of a link that has not been a limit yet."""
BUSY = 0.9
"""A resource used to this part of its capacity may be what limits."""
READING = 0.5
"""Plain reads that wait for bytes this part of their time are limited by
the link (or by Swift, which is the same to the plan)."""
LEAST_READING = 0.05
"""Of an interval: waiting for bytes in less of it than this tells nothing
of the link."""
LEAST_READ_BYTES = 256 * 1024
"""In an interval: fewer tell nothing of how fast the link is."""
MANY_FLOWS = 1.5
"""Plain reads at a time, on average, that together fill a link."""
BLOCKED = 0.3
"""Pushed reads that cannot send this part of their time, likewise."""
FULL_LANE = 0.75
"""A lane whose threads are busy this part of the time is kept full."""

NEW_WEIGHT = 0.5
"""Of the newest interval in an average."""
RELAX_WEIGHT = 0.1
"""Of the newest interval where it only shows that there may be more."""
LINK_MEMORY_SECONDS = 60.0
LINK_GROWTH = 0.1
"""A link not seen at its limit for that long is taken to be faster by this
part, and by twice as much each further interval, so that one that became
faster is found."""
MOST_OVER = 1.5
"""What a link at its limit carries tells so well how fast it is that an
older estimate is kept within this factor of it."""
SCALE_RANGE = (0.2, 10.0)
SELDOM_WAITING = 0.1
"""A training loop that waits for spans in less than this part of the time is
what limits the job, or the device it computes on is."""
WAITING_LOOP = 0.3
"""A training loop that uses less of a core than this waits for something
else: its wall time counts, not its CPU time."""


@dataclass
class LinkEstimate:
    """Bytes per second of the job's path to Swift, all flows together."""

    bytes_per_second: float = UNKNOWN_LINK
    _since_limited: float = 0.0
    _growth: float = LINK_GROWTH

    def observe(self, rate: float, limited: bool, seconds: float) -> None:
        """Takes one interval in.

        Args:
            rate: bytes per second that it carried.
            limited: whether the link was what limited it.
            seconds: its length.
        """
        if not limited:
            self._since_limited += seconds
            if self._since_limited > LINK_MEMORY_SECONDS:
                full = rate >= BUSY * self.bytes_per_second
                self.bytes_per_second *= 1 + self._growth
                self._growth *= 2
                if full:
                    # It may well be what is believed: one small step.
                    self._since_limited = 0.0
                    self._growth = LINK_GROWTH
            self.bytes_per_second = min(
                max(self.bytes_per_second, rate), UNKNOWN_LINK
            )
            return
        self._since_limited = 0.0
        self._growth = LINK_GROWTH
        before = min(self.bytes_per_second, MOST_OVER * rate)
        if self.bytes_per_second >= UNKNOWN_LINK:
            before = rate
        self.bytes_per_second = before + NEW_WEIGHT * (rate - before)


@dataclass
class Estimates:
    """The conditions of a job, interval by interval.

    Args:
        push_width: pushed reads that may be under way at a time, now.
        train_on_cpu: whether the training loop computes on the CPU.
        server_threads: cores of one forward of the worker; 0 where it
            computes on an accelerator.
        stream_width: plain reads that may be under way at a time.
        link: what is known of it at the start.
    """

    push_width: Callable[[], int]
    train_on_cpu: bool
    server_threads: int = 0
    stream_width: int = 4
    link: LinkEstimate = field(default_factory=LinkEstimate)
    server_share: float = 1.0
    train_seconds: float = 0.0
    scale: dict[str, float] = field(default_factory=dict)

    def conditions(self, scaled: bool = True) -> Conditions:
        """For :func:`hapi_splitter.costs.build_problem`.

        Args:
            scaled: with what was learned of the profiles' errors.
        """
        return Conditions(
            link_bytes_per_second=self.link.bytes_per_second,
            server_share=self.server_share,
            train_seconds=self.train_seconds,
            scale=dict(self.scale) if scaled else {},
        )

    def observe_start(self, seen: Observation, profiled: Problem) -> None:
        """Takes the first interval in, in which lines are still filling.

        It shows the link and the training loop; what came was mostly not
        yet computed, so its CPU seconds show nothing.

        Args:
            seen, profiled: as for :meth:`observe`.
        """
        if seen.seconds > 0 and seen.num_samples:
            self._observe_training(seen)
            self._observe_link(seen, profiled)

    def observe(self, seen: Observation, profiled: Problem) -> None:
        """Takes one interval in.

        Args:
            seen: its sums.
            profiled: the problem under the present conditions, but not
                scaled.
        """
        if seen.seconds <= 0 or not seen.num_samples:
            return
        self._observe_training(seen)
        modelled = _modelled(seen, profiled)
        self._observe_link(seen, profiled)
        self._rescale(CLIENT_CPU, seen.client_cpu_seconds, modelled)
        self._observe_client_device(seen, modelled)
        if seen.pushed_samples:
            pushed = _modelled(seen, profiled, without=STREAMED)
            self._rescale(SERVER_CPU, seen.server_cpu_seconds, pushed)
            self._rescale(SERVER_DEVICE, self._device_seconds(seen), pushed)
            self._observe_share(seen, profiled, modelled)

    def _observe_client_device(
        self, seen: Observation, modelled: Mapping[str, float]
    ) -> None:
        """How much slower the client's device is than its profile.

        An accelerator computes while the loop goes on, so nobody sees its
        seconds. But when the loop never waits for a span, and cores are not
        what is scarce, it is the device that takes all the time; and it
        never takes more than there is.
        """
        if self.train_on_cpu:
            if CLIENT_CPU in self.scale:
                self.scale[CLIENT_DEVICE] = self.scale[CLIENT_CPU]
            return
        # Spans may have come that the loop has not had, and vice versa.
        had = seen.train_samples / seen.num_samples
        expected = had * modelled.get(CLIENT_DEVICE, 0.0)
        limiting = seen.waiting_seconds < SELDOM_WAITING * seen.seconds
        scaled = expected * self.scale.get(CLIENT_DEVICE, 1.0)
        if limiting or scaled > seen.seconds:
            self._rescale(
                CLIENT_DEVICE, seen.seconds, {CLIENT_DEVICE: expected}
            )

    def _observe_training(self, seen: Observation) -> None:
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

    def _observe_link(self, seen: Observation, profiled: Problem) -> None:
        cores = _capacity(profiled, CLIENT_CPU)
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
                most = MOST_OVER * self.link.bytes_per_second
                if seen.reading_bytes >= LEAST_READ_BYTES:
                    rate = max(rate, min(while_reading, most))
            elif seen.reading_seconds > LEAST_READING * seen.seconds:
                rate = while_reading
                # One flow alone may be slow for reasons of its own.
                limited = seen.reading_flows >= min(
                    MANY_FLOWS, 0.5 * self.stream_width
                )
        if waited and not limited and seen.blocked_share > BLOCKED:
            rate = seen.received_bytes / seen.seconds
            limited = seen.push_seconds >= seen.seconds
        self.link.observe(rate, limited, seen.seconds)

    def _device_seconds(self, seen: Observation) -> float:
        if not self.server_threads:
            return seen.forward_seconds
        # Wall seconds of a forward that shares its cores with decoding
        # would count the sharing as work.
        return seen.forward_cpu_seconds / self.server_threads

    def _rescale(
        self, resource: str, seconds: float, modelled: Mapping[str, float]
    ) -> None:
        expected = modelled.get(resource, 0.0)
        if seconds <= 0 or expected <= 0:
            return
        low, high = SCALE_RANGE
        found = min(max(seconds / expected, low), high)
        before = self.scale.get(resource)
        if before is not None:
            found = before + NEW_WEIGHT * (found - before)
        self.scale[resource] = found

    def _observe_share(
        self,
        seen: Observation,
        profiled: Problem,
        modelled: Mapping[str, float],
    ) -> None:
        """How much of the storage tier is ours.

        While our requests queue there we get what we get; else what is
        idle may be had too.
        """
        if seen.load is None:
            return
        resource = _scarcer(profiled, modelled, self.scale)
        whole = _capacity(profiled, resource) / self.server_share
        used = modelled[resource] * self.scale.get(resource, 1.0)
        mine = used / seen.seconds / whole
        busy = (
            seen.load.cpu_busy
            if resource == SERVER_CPU
            else seen.load.device_busy
        )
        concurrent = seen.push_seconds / seen.seconds
        fair = seen.load.share * min(
            1.0, concurrent / max(seen.load.streams, 1)
        )
        queued = (
            concurrent >= FULL_LANE * self.push_width()
            and seen.blocked_share < BLOCKED
        )
        if queued:
            # The worker is at its limit: of all that it gives, our fair
            # part, or what we get, if that is more.
            part = min(1.0, mine / busy) if busy > 0 else 1.0
            found, weight = max(mine, fair * mine / part), NEW_WEIGHT
        else:
            found, weight = max(fair, mine + 1.0 - busy), RELAX_WEIGHT
            if found < self.server_share:
                weight = NEW_WEIGHT
        found = min(max(found, 0.01), 1.0)
        self.server_share += weight * (found - self.server_share)


def _modelled(
    seen: Observation, problem: Problem, without: object = None
) -> dict[str, float]:
    """Seconds on each resource that the model gives for what came."""
    use = {(each.cut, each.encoding): each.use for each in problem.options}
    sums: dict[str, float] = {}
    for way, count in seen.samples.items():
        if way == without:
            continue
        for resource, seconds in use.get(way, {}).items():
            sums[resource] = sums.get(resource, 0.0) + count * seconds
    return sums


def _capacity(problem: Problem, name: str) -> float:
    for resource in problem.resources:
        if resource.name == name:
            return resource.capacity
    raise KeyError(name)


def _scarcer(
    problem: Problem, modelled: Mapping[str, float], scale: Mapping[str, float]
) -> str:
    """The resource of the storage tier that was used to a higher part."""

    def part(name: str) -> float:
        used = modelled.get(name, 0.0) * scale.get(name, 1.0)
        return used / _capacity(problem, name)

    return max((SERVER_CPU, SERVER_DEVICE), key=part)
