"""A training job over two simulated tiers, span by span.

The planner's own parts are the real ones (mixer, meter, estimates,
re-planning); simulated are the link, one core on each tier, and the threads
that wait for them.  Times come from measurements: see
:mod:`benchmarks.replay`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import simpy

from hapi_client.loading.prefetcher import ReadConfig
from hapi_client.loading.span_source import LANE_PUSH, LANE_STREAM
from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.metrics.window_metrics import SpanMetrics
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.planner import FIRST_LOOK_SECONDS, FIRST_LOOK_SPANS
from hapi_client.planning.replanner import Replanner, ReplanOptions
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_protocol.summary import Load
from hapi_splitter.planner.costs import Conditions
from hapi_splitter.planner.plan import Option, Plan, Problem, Resource
from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    LINK,
    RAW_ROUTE,
    SERVER_CPU,
    SERVER_DEVICE,
    UNITS,
    Route,
)
from hapi_splitter.planner.resource_use import (
    CLIENT_HANDLING,
    SERVING,
    TRAINING,
    resource_use,
    scaled,
)

LOAD_SECONDS = 10.0
"""Window of what the worker says of itself."""
ENDLESS_EPOCHS = 1e5
MAX_STEPS = 1000
PIECES = 4
"""Into which a pushed span is cut: each is sent while others compute."""
NOTHING_SECONDS = 1e-9
"""What would take less is taken to be done: sums are rounded."""

Steps: TypeAlias = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Stage:
    """What one sample took, mean of a measured pass.

    Attributes:
        link_bytes: on the wire.
        storage_seconds: CPU seconds of the storage tier's processes.
        client_seconds: CPU seconds of the training process.
    """

    link_bytes: float
    storage_seconds: float
    client_seconds: float


@dataclass(frozen=True)
class Knowledge:
    """What a planner knows from profiles.

    Attributes:
        capacities: by resource; each tier computes on one core.
        options: as profiled.
        train_seconds: of the training loop, per sample.
    """

    capacities: Mapping[str, float]
    options: Sequence[Option]
    train_seconds: float

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Knowledge:
        """Of what :func:`benchmarks.contenders.problem_json` wrote.

        Raises:
            ValueError: an earlier version did.
        """
        if any("work" not in each for each in body["options"]):
            raise ValueError(
                "the file does not say what kinds of work a sample takes; "
                "measure it again"
            )
        options = [
            Option(
                each["cut"],
                each["encoding"],
                _use(each["link_bytes"], each["work"], 1.0),
                0,
                0,
                each["work"],
            )
            for each in body["options"]
        ]
        return cls(body["capacities"], options, body["train_seconds"])

    def only(
        self, ways: Mapping[Route, object], without: Collection[int] = ()
    ) -> Knowledge:
        """With the options alone for which there are measurements.

        Args:
            ways: these.
            without: cuts that a planner does not know of.
        """
        kept = [
            option
            for option in self.options
            if option.route in ways and option.cut not in without
        ]
        return dataclasses.replace(self, options=kept)

    def problem(self, conditions: Conditions) -> Problem:
        """As :func:`hapi_splitter.planner.costs.build_problem` makes it."""
        share = conditions.server_share
        capacities = {
            **self.capacities,
            LINK: conditions.link_bytes_per_second,
            SERVER_CPU: self.capacities[SERVER_CPU] * share,
            SERVER_DEVICE: self.capacities[SERVER_DEVICE] * share,
        }
        return Problem(
            resources=tuple(
                Resource(name, capacity, UNITS[name])
                for name, capacity in capacities.items()
            ),
            options=tuple(self._option(o, conditions) for o in self.options),
            num_samples=1,
            epochs=ENDLESS_EPOCHS,
            push_one_off_seconds=0.0,
            server_limit_bytes=0,
            client_limit_bytes=0,
            last_cut=max(o.cut for o in self.options),
            server_threads=1,
            client_threads=1,
        )

    def _option(self, option: Option, conditions: Conditions) -> Option:
        work = {
            **option.work,
            TRAINING: conditions.train_seconds,
            CLIENT_HANDLING: conditions.handling_seconds,
        }
        work = scaled(work, conditions.scale)
        use = _use(option.use[LINK], work, conditions.server_share)
        return dataclasses.replace(option, use=use, work=work)


def _use(
    link_bytes: float, work: Mapping[str, float], server_share: float
) -> dict[str, float]:
    return resource_use(
        link_bytes,
        work,
        server_share=server_share,
        server_threads=1,
        client_threads=1,
    )


@dataclass(frozen=True)
class Parts:
    """How the seconds of a way divide, by the profiles.

    Attributes:
        loop: of the client's, what runs in the training loop's thread: the
            layers behind the cut and the training step.
        forward: of the storage tier's, what the worker's forwards take.
        serving: of the storage tier's, what Swift takes.
    """

    loop: float
    forward: float
    serving: float

    @classmethod
    def of(cls, option: Option) -> Parts:
        use = option.use
        forward = use.get(SERVER_DEVICE, 0.0) / use[SERVER_CPU]
        loop = use[CLIENT_DEVICE] / use[CLIENT_CPU]
        serving = option.work.get(SERVING, 0.0) / use[SERVER_CPU]
        return cls(min(1.0, loop), min(1.0, forward), min(1.0, serving))


class _Shared:
    """A link or a core: shared equally by all that need it at a time.

    So do flows of TCP on a link, and threads on a core.

    Args:
        env: of the simulation.
        rate: bytes, or CPU seconds, per second.
    """

    def __init__(self, env: simpy.Environment, rate: float) -> None:
        self._env = env
        self._rate = rate
        self._left: dict[simpy.Event, float] = {}
        self._since = 0.0
        self._changes = 0
        self._done = 0.0

    @property
    def done(self) -> float:
        """Bytes, or CPU seconds, so far."""
        self._advance()
        return self._done

    def take(self, amount: float) -> simpy.Event:
        """Happens when so many bytes, or CPU seconds, are done."""
        self._advance()
        finished = self._env.event()
        self._left[finished] = amount
        self._plan()
        return finished

    def _advance(self) -> None:
        """Takes the time since the last change in."""
        seconds, self._since = self._env.now - self._since, self._env.now
        if not self._left:
            return
        each = seconds * self._rate / len(self._left)
        self._done += seconds * self._rate
        self._left = {who: left - each for who, left in self._left.items()}

    def _plan(self) -> None:
        """Wakes up when the one with the least left is done."""
        self._changes += 1
        if self._left:
            least = max(0.0, min(self._left.values()))
            seconds = least * len(self._left) / self._rate
            self._env.process(self._wake(seconds, self._changes))

    def _wake(self, seconds: float, change: int) -> Steps:
        yield self._env.timeout(seconds)
        if change != self._changes:
            return
        self._advance()
        nothing = NOTHING_SECONDS * self._rate
        finished = [who for who, left in self._left.items() if left < nothing]
        for who in finished:
            del self._left[who]
            who.succeed()
        self._plan()


@dataclass
class _Span:
    route: Route
    stage: Stage
    done: simpy.Event


class SimulatedJob:
    """Trains for ever; ask it how many samples it had.

    Args:
        stages: measured passes, by way.
        parts: of each of these ways.
        knowledge: of the planner.
        link: bytes per second.
        span_samples: of each span.
        batch_size: of the training loop.
        weights: of a fixed mix; None for the planner's.
        options: of the job.
        seed: of the passes drawn and the planner's jitter.
    """

    def __init__(
        self,
        stages: Mapping[Route, Sequence[Stage]],
        parts: Mapping[Route, Parts],
        knowledge: Knowledge,
        link: float,
        *,
        span_samples: int,
        weights: Mapping[Route, float] | None,
        options: ReadConfig,
        seed: int,
    ) -> None:
        self._env = simpy.Environment()
        self._stages = stages
        self._parts = parts
        self._knowledge = knowledge
        self._link = link
        self._span_samples = span_samples
        self._options = options
        self._random = np.random.default_rng(seed)
        self._wire = _Shared(self._env, link)
        self._storage = _Shared(self._env, 1.0)
        self._worker = simpy.Resource(self._env)
        self._client = _Shared(self._env, 1.0)
        self._loop_seconds = 0.0
        self.samples = 0
        self._busy: Counter[str] = Counter()
        self._ahead: deque[_Span] = deque()
        self._more = self._env.event()
        self._loads: deque[tuple[float, float]] = deque([(0.0, 0.0)])
        self._mixer: RouteScheduler[Route] = RouteScheduler(
            weights or {RAW_ROUTE: 1.0}
        )
        self._meter = MetricsCollector(
            lambda: int(self._wire.done),
            clock=lambda: self._env.now,
            cpu_clock=lambda: self._client.done,
            thread_clock=lambda: self._loop_seconds,
        )
        self.replanner: Replanner | None = None
        if weights is None:
            self.replanner = self._make_replanner()
        self._env.process(self._train())

    def _make_replanner(self) -> Replanner:
        return Replanner(
            self._knowledge.problem,
            CostEstimators(
                push_width=lambda: self._options.num_threads,
                train_on_cpu=True,
                server_threads=1,
            ),
            self._mixer,
            self._meter,
            ReplanOptions(),
            clock=lambda: self._env.now,
            random=self._random.random,
        )

    def run(self, seconds: float, turns: int = 0) -> float:
        """Goes on for a while.

        Args:
            seconds: at least.
            turns: of all spans that may be under way, at least: the loop
                takes them in their order, and so has many at once when a
                slow one has come.

        Returns:
            Samples per second of it.

        Raises:
            RuntimeError: these turns take too long.
        """
        before, started = self.samples, self._env.now
        least = turns * self._options.ahead_spans * self._span_samples
        for _ in range(MAX_STEPS):
            self._env.run(self._env.now + seconds)
            if self.samples - before >= least:
                spent = self._env.now - started
                return (self.samples - before) / spent
        raise RuntimeError(
            f"{self.samples - before} samples in {MAX_STEPS * seconds:.0f}"
            f" simulated seconds; {least} were wanted"
        )

    @property
    def plan(self) -> Plan | None:
        return self.replanner.plan if self.replanner else None

    # -- the client ---------------------------------------------------

    def _top_up(self) -> None:
        """As :class:`hapi_client.loading.prefetcher.Fetcher` does it."""
        while len(self._ahead) < self._options.ahead_spans:
            route = self._mixer.choose(
                self._span_samples,
                lambda route: self._has_room(_lane(route)),
            )
            if route is None:
                return
            passes = self._stages[route]
            drawn = passes[int(self._random.integers(len(passes)))]
            span = _Span(route, drawn, self._env.event())
            self._busy[_lane(route)] += 1
            self._ahead.append(span)
            self._env.process(self._load(span))

    def _has_room(self, lane: str) -> bool:
        return self._busy[lane] < self._options.num_threads

    def _load(self, span: _Span) -> Steps:
        env, count = self._env, self._span_samples
        started = env.now
        rest = 1 - self._parts[span.route].loop
        handled = count * rest * span.stage.client_seconds
        if span.route == RAW_ROUTE:
            with self._meter.reading():
                yield self._storage.take(count * span.stage.storage_seconds)
                yield self._wire.take(count * span.stage.link_bytes)
            read = env.now
            yield self._client.take(handled)
            report = self._plain_report(
                span, read - started, env.now - started
            )
        else:
            sending = yield env.process(self._push(span))
            yield self._client.take(handled)
            report = self._pushed_report(span, sending)
        self._meter.record_span(span.route, count, env.now - started, report)
        self._busy[_lane(span.route)] -= 1
        span.done.succeed()
        self._top_up()

    def _push(self, span: _Span) -> Steps:
        """Computes it piece by piece, in turn with other spans.

        Each piece is sent while the next is computed; returns the seconds
        that sending took.
        """
        part = self._span_samples / PIECES
        seconds = part * span.stage.storage_seconds
        serving = self._parts[span.route].serving
        sent = self._env.timeout(0.0, 0.0)
        for _ in range(PIECES):
            with self._worker.request() as turn:
                yield turn
                yield self._storage.take(seconds * (1 - serving))
            sent = self._env.process(
                self._send(
                    sent, seconds * serving, part * span.stage.link_bytes
                )
            )
        return (yield sent)

    def _send(
        self, before: simpy.Event, serving: float, link_bytes: float
    ) -> Steps:
        """Sends a piece after the one before; the seconds of both."""
        sending = yield before
        yield self._storage.take(serving)
        started = self._env.now
        yield self._wire.take(link_bytes)
        return sending + self._env.now - started

    def _plain_report(
        self, span: _Span, read_seconds: float, all_seconds: float
    ) -> SpanMetrics:
        return SpanMetrics(
            read_seconds=read_seconds,
            read_bytes=round(self._span_samples * span.stage.link_bytes),
            raw_seconds=all_seconds,
            decode_cpu_seconds=self._span_samples
            * span.stage.client_seconds
            * (1 - self._parts[span.route].loop),
        )

    def _pushed_report(
        self, span: _Span, sending_seconds: float
    ) -> SpanMetrics:
        parts = self._parts[span.route]
        seconds = span.stage.storage_seconds * self._span_samples
        forward = seconds * parts.forward
        alone = self._span_samples * span.stage.link_bytes / self._link
        return SpanMetrics(
            server_cpu_seconds=seconds * (1 - parts.serving),
            forward_seconds=forward,
            forward_cpu_seconds=forward,
            send_blocked_seconds=max(0.0, sending_seconds - alone),
            load=self._load_now(),
        )

    def _load_now(self) -> Load:
        now, busy = self._env.now, self._storage.done
        self._loads.append((now, busy))
        while len(self._loads) > 1 and now - self._loads[0][0] > LOAD_SECONDS:
            self._loads.popleft()
        then, before = self._loads[0]
        part = (busy - before) / (now - then) if now > then else 0.0
        return Load(
            share=1.0,
            streams=self._busy[LANE_PUSH],
            device_busy=min(1.0, part),
            cpu_busy=min(1.0, part),
        )

    def _plan(self, replanner: Replanner) -> None:
        """As :class:`hapi_client.planning.planner.JobPlanner` does it.

        What a job takes to measure itself and the worker is left out.
        """
        if replanner.plan is not None:
            replanner.span_came()
            return
        watched = self._meter.window_seconds >= FIRST_LOOK_SECONDS
        if watched and self._meter.num_spans >= FIRST_LOOK_SPANS:
            estimates = replanner.estimates
            conditions = estimates.conditions(scaled=False)
            seen = self._meter.take()
            estimates.observe_start(seen, self._knowledge.problem(conditions))
            replanner.begin()

    def _train(self) -> Steps:
        train_seconds = self._knowledge.train_seconds
        with self._meter.loading():
            while True:
                self._top_up()
                span = self._ahead.popleft()
                with self._meter.waiting():
                    yield span.done
                loop = self._parts[span.route].loop * span.stage.client_seconds
                training = min(train_seconds, loop)
                count = self._span_samples
                with self._meter.running_suffix(span.route[0], count):
                    yield self._client.take(count * (loop - training))
                    self._loop_seconds += (loop - training) * count
                if self.replanner is not None:
                    self._plan(self.replanner)
                with self._meter.training(count):
                    yield self._client.take(count * training)
                    self._loop_seconds += training * count
                self.samples += count


def _lane(route: Route) -> str:
    return LANE_STREAM if route == RAW_ROUTE else LANE_PUSH
