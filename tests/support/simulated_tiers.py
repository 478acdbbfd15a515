"""Simulates jobs with real planners that share a worker.

In each round all jobs run with their current weights.  The worker is shared
fairly, and each job has its own link and client.  Then each planner gets the
window that a recorder would have measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog

from clock import Clock
from hapi_client.metrics.events import (
    SpanEvent,
    StageEvent,
    WindowMetrics,
)
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.replanner import Replanner, ReplanOptions
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_protocol.summary import WorkerLoad
from hapi_splitter.planner.costs import Conditions
from hapi_splitter.planner.plan import Option, Problem, Resource
from hapi_splitter.planner.problem import Route
from hapi_splitter.planner.resource_use import (
    CLIENT_HANDLING,
    CLIENT_LAYERS,
    SERVER_DECODING,
    TRAINING,
    resource_use,
    scaled,
)

WIDTH = 4
NUM_SAMPLES = 10**9


@dataclass(frozen=True)
class Truth:
    """True cost of a sample by route.

    Attributes:
        link: bytes.
        server: core-seconds of the worker.
        client: core-seconds of the client, without training.
        train: core-seconds of the training loop on every route.
        link_capacity: bytes per second of the link.
        client_cores: cores of the client.
    """

    link: Mapping[Route, float]
    server: Mapping[Route, float]
    client: Mapping[Route, float]
    train: float
    link_capacity: float
    client_cores: float = 1.0


@dataclass
class SimulatedMetrics:
    """Gives the planner the window that the simulation has made."""

    clock: Clock
    pending: WindowMetrics = field(default_factory=lambda: WindowMetrics(0.0))
    taken_at: float = 0.0
    planned_rate: float = 0.0

    @property
    def window_seconds(self) -> float:
        return self.clock.now - self.taken_at

    def take(self) -> WindowMetrics:
        self.taken_at = self.clock.now
        taken, self.pending = self.pending, WindowMetrics(0.0)
        return taken


RAW = Route(0, "raw")
PUSH = Route(9, "float32")
BALANCED = Truth(
    link={RAW: 110e3, PUSH: 2e3},
    server={RAW: 0.3e-3, PUSH: 12e-3},
    client={RAW: 12e-3, PUSH: 0.2e-3},
    train=0.5e-3,
    link_capacity=1e9,
)


class SimulatedJob:
    """A job with a real planner over simulated tiers.

    Args:
        truth: true costs.
        clock: simulated time.
        profiled: error factors of profiles, of ``server decoding`` and
            ``client layers``.
        server_cores: cores of the worker.
        seed: seed of the jitter.
        tracker: tracker of the store's cache; None for a job without.
        epochs: remaining epochs.
    """

    def __init__(
        self,
        truth: Truth,
        clock: Clock,
        *,
        profiled: Mapping[str, float] | None = None,
        server_cores: float = 1.0,
        seed: int = 0,
        tracker: CacheTracker | None = None,
        epochs: float = 1.0,
    ) -> None:
        self.epochs = epochs
        self.truth = truth
        self.clock = clock
        self._wrong = profiled or {}
        self._server_cores = server_cores
        self.estimates = CostEstimators(
            pushdown_concurrency=lambda: WIDTH, train_on_cpu=True
        )
        self.scheduler: RouteScheduler[Route] = RouteScheduler({RAW: 1.0})
        self.metrics = SimulatedMetrics(clock)
        random = np.random.default_rng(seed)
        self.replanner = Replanner(
            build=self.build,
            estimates=self.estimates,
            scheduler=self.scheduler,
            recorder=self.metrics,  # type: ignore[arg-type]
            options=ReplanOptions(seconds=5.0, min_spans=1),
            clock=clock,
            random=random.random,
            tracker=tracker or CacheTracker(),
        )

    def build(self, conditions: Conditions) -> Problem:
        truth = self.truth
        options = [self._option(route, conditions) for route in truth.link]
        share = conditions.server_share
        return Problem(
            resources=(
                Resource("link", conditions.link_bytes_per_second, "bytes/s"),
                Resource("server cpu", self._server_cores * share, "cores"),
                Resource("server device", share, "devices"),
                Resource("client cpu", truth.client_cores, "cores"),
                Resource("client device", truth.client_cores, "devices"),
            ),
            options=tuple(options),
            num_samples=NUM_SAMPLES,
            epochs=self.epochs,
            server_limit_bytes=0,
            client_limit_bytes=0,
            last_cut=max(route[0] for route in truth.link),
        )

    def _option(self, route: Route, conditions: Conditions) -> Option:
        truth = self.truth
        profiled = {
            # One component per tier is enough.
            SERVER_DECODING: truth.server[route],
            CLIENT_LAYERS: truth.client[route],
        }
        work = scaled(
            {
                kind: each * self._wrong.get(kind, 1.0)
                for kind, each in profiled.items()
            },
            conditions.scale,
        )
        work[TRAINING] = conditions.train_seconds
        work[CLIENT_HANDLING] = conditions.handling_seconds
        use = resource_use(
            truth.link[route],
            work,
            server_share=conditions.server_share,
            server_threads=0,
            client_threads=1,
        )
        return Option(route[0], route[1], use, 0, 0, work)

    def use(self, costs: Mapping[Route, float]) -> float:
        """Mean cost of a sample under the current weights."""
        weights = self.scheduler.weights
        return sum(weight * costs[route] for route, weight in weights.items())

    @property
    def own_rate(self) -> float:
        """Samples per second with an infinitely fast worker."""
        client = self.use(self.truth.client) + self.truth.train
        link = self.use(self.truth.link)
        return min(
            self.truth.client_cores / client, self.truth.link_capacity / link
        )


def run(
    jobs: Sequence[SimulatedJob],
    clock: Clock,
    *,
    rounds: int,
    seconds: float = 5.0,
    server_cores: float = 1.0,
) -> list[float]:
    """Runs all jobs; returns their total samples per second by round."""
    totals = []
    for _ in range(rounds):
        clock.now += seconds
        rates = _rates(jobs, server_cores)
        totals.append(sum(rates))
        busy = sum(
            rate * job.use(job.truth.server)
            for rate, job in zip(rates, jobs, strict=True)
        )
        limited = [
            rate < 0.999 * job.own_rate
            for rate, job in zip(rates, jobs, strict=True)
        ]
        streams = [
            _pushing(job) * (WIDTH if full else 1.5)
            for job, full in zip(jobs, limited, strict=True)
        ]
        for job, rate, full, mine in zip(
            jobs, rates, limited, streams, strict=True
        ):
            job.metrics.pending = _observation(
                job,
                rate,
                seconds,
                full,
                mine,
                WorkerLoad(
                    share=1.0,
                    streams=round(sum(streams)),
                    device_busy=0.0,
                    cpu_busy=min(1.0, busy / server_cores),
                ),
            )
            job.replanner.span_arrived()
    return totals


def _pushing(job: SimulatedJob) -> float:
    return float(any(route[0] for route in job.scheduler.weights))


def _rates(jobs: Sequence[SimulatedJob], server_cores: float) -> list[float]:
    """Returns rates of jobs that share the worker max-min fairly."""
    left = server_cores
    rates = [0.0] * len(jobs)
    wants = sorted(
        range(len(jobs)),
        key=lambda n: jobs[n].own_rate * jobs[n].use(jobs[n].truth.server),
    )
    for position, number in enumerate(wants):
        job = jobs[number]
        each = job.use(job.truth.server)
        fair = left / (len(wants) - position)
        taken = min(job.own_rate * each, fair)
        rates[number] = taken / each if each else job.own_rate
        left -= taken
    return rates


def _observation(
    job: SimulatedJob,
    rate: float,
    seconds: float,
    server_limited: bool,
    streams: float,
    load: WorkerLoad,
) -> WindowMetrics:
    truth, count = job.truth, rate * seconds
    weights = job.scheduler.weights
    client = job.use(truth.client) + truth.train
    link_limited = (
        not server_limited
        and truth.link_capacity / job.use(truth.link)
        <= truth.client_cores / client
    )
    reading_seconds = count * job.use(truth.link) / truth.link_capacity
    if link_limited or reading_seconds > seconds:
        reading_seconds = seconds
    pushed = {route: w for route, w in weights.items() if route[0]}
    return WindowMetrics(
        seconds=seconds,
        samples={route: round(w * count) for route, w in weights.items()},
        received_bytes=round(count * job.use(truth.link)),
        client_cpu_seconds=count * client,
        layers=StageEvent(
            cpu_seconds=count * (client - truth.train),
            samples_by_cut={
                route[0]: round(w * count) for route, w in weights.items()
            },
        ),
        training=StageEvent(
            count * truth.train, count * truth.train, round(count)
        ),
        raw=SpanEvent(
            read_seconds=0.9 if link_limited else 0.2, raw_seconds=1.0
        ),
        reading_seconds=reading_seconds,
        flow_seconds=4.0 * reading_seconds,
        reading_bytes=round(count * job.use(truth.link)),
        pushed=SpanEvent(
            round(sum(pushed.values()) * count),
            streams * seconds,
            server_cpu_seconds=sum(
                w * count * truth.server[route] for route, w in pushed.items()
            ),
        ),
        load=load,
    )


def joint_optimum(truths: Sequence[Truth], server_cores: float = 1.0) -> float:
    """Returns the highest total of samples per second of all jobs."""
    columns = [(j, route) for j, t in enumerate(truths) for route in t.link]
    rows = [[truths[j].server[route] for j, route in columns]]
    limits = [server_cores]
    for number, truth in enumerate(truths):
        rows.append([truth.link[w] * (j == number) for j, w in columns])
        limits.append(truth.link_capacity)
        rows.append(
            [
                (truth.client[w] + truth.train) * (j == number)
                for j, w in columns
            ]
        )
        limits.append(truth.client_cores)
    found = linprog([-1.0] * len(columns), A_ub=rows, b_ub=limits)
    return float(-found.fun)
