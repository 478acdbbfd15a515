"""Event simulation of jobs, proxies and storage nodes that compute.

A closed network of queues: each job keeps spans under way.  A span waits for
a process of a proxy, for HEADs of its shard and of the model package, for a
disk, the object server's CPU and the worker of a node, and for the proxy
again.  Service times are exponential.  If only workers take time, and each
span is of a new shard, N nodes and K spans under way have K / (K + N - 1) of
the ideal rate (Gordon and Newell, Operations Research 15, 1967).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heapreplace
from itertools import chain, count
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from hapi_middleware.places.places import spread

REPLICAS, SHARD_SPANS, READS = 3, 16, 3
KNOWN_SECONDS, NEVER_TOLD = 5.0, (-5.0, 0)
RETRY_SECONDS, REFUSAL_SECONDS, SILENCE_SECONDS = 2.0, 0.002, 4.0
SUPPRESS_SECONDS, DAY_SECONDS = 60.0, 86400.0
MIN_SECONDS, MAX_SECONDS = 15.0, 300.0
"""Length of a run.  Queues of nodes that many spans need grow for seconds."""
HASH = -1
"""Slack with which queues are not looked at."""

Row = dict[str, Any]
Flow = Generator[float, None, None]


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Settings:
    """Costs, sizes and choices; the texts are helps of options."""

    node_rate: float = _option(1000.0, "samples/s of a node's worker")
    span_samples: int = _option(64, "samples of a span")
    feature_bytes: float = _option(2048.0, "features of a sample")
    proxy_request_seconds: float = _option(0.0094, "CPU of a proxy, a span")
    proxy_sample_seconds: float = _option(0.00021, "and each sample")
    node_request_seconds: float = _option(0.005, "CPU of a node, a span")
    node_sample_seconds: float = _option(0.00052, "and each sample")
    # Measured: 1.6 to 1.8 ms for eight at a time, on the EPYC of places.json.
    head_seconds: float = _option(0.0017, "CPU of a node, a HEAD")
    # 110 kB at 150 MB/s.
    disk_request_seconds: float = _option(0.008, "seek of a span")
    disk_sample_seconds: float = _option(0.00073, "and each sample")
    package_bytes: float = _option(45e6, "length of the package")
    package_load_seconds: float = _option(2.0, "a worker loads it")
    package_losses: float = _option(10.0, "restarts, evictions / node and day")
    link_bytes_per_second: float = _option(1.25e9, "link of a host")
    node_cores: int = _option(4, "cores of a node's object server")
    disks: int = _option(4, "disks of a node")
    cores_per_host: int = _option(8, "processes of a proxy host")
    proxy_cores: int = _option(8, "processes of all proxies")
    nodes: int = _option(100, "storage nodes")
    jobs: int = _option(0, "jobs; 0: one for each ten nodes")
    shards: int = _option(1400, "shards of a job; 0: one for each span")
    flows: int = _option(8, "spans under way, for each node")
    slack: int = _option(2, "jobs that a node may have more; -1: any")
    head_cache_seconds: float = _option(1.0, "life of a package's HEAD")
    cached: float = _option(0.0, "part of the spans in the page cache")
    dead: float = _option(0.0, "part of the nodes, half of them silent")

    @property
    def ideal_spans_per_second(self) -> float:
        """Spans per second of all living nodes without queues."""
        alive = self.nodes - int(self.nodes * self.dead)
        return alive * self.node_rate / self.span_samples

    @property
    def needed_proxy_cores(self) -> float:
        """Cores of proxies for the ideal rate."""
        samples = self.span_samples * self.proxy_sample_seconds
        seconds = self.proxy_request_seconds + samples
        return self.ideal_spans_per_second * seconds


class Station:
    """Servers of equal speed with one queue, first come, first served."""

    def __init__(self, num_servers: int = 1) -> None:
        self._free_at = [0.0] * num_servers
        self._seconds = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """End of a service that is asked for at ``now``, which only grows."""
        end = max(now, self._free_at[0]) + seconds
        heapreplace(self._free_at, end)
        self._seconds += seconds
        return end

    def busy(self, now: float) -> float:
        """Part of the time from 0 to ``now`` that the servers are busy."""
        later = sum(max(0.0, free_at - now) for free_at in self._free_at)
        return (self._seconds - later) / now / len(self._free_at)


class Node:
    """A storage node: object server, disks, worker, link."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.number = number
        self.cpu = Station(settings.node_cores)
        self.disks = [Station() for _ in range(settings.disks)]
        self.worker, self.link = Station(), Station()
        self.num_jobs = self.num_package_heads = 0
        self.is_dead = False
        self.lacks_package_at = self.has_package_at = 0.0


Replica = tuple[Node, int]
"""A node, and the number of its disk."""


class Span(NamedTuple):
    """A part of a shard, and its replicas in the order of their hash."""

    shard: str
    number: int
    replicas: list[Replica]


class Proxy:
    """A process of a proxy host, and the tables that it shares there."""

    def __init__(
        self,
        told: dict[Node, tuple[float, int]],
        suppressed: dict[Node, float],
    ) -> None:
        self.told, self.suppressed = told, suppressed
        self.cpu = Station()
        self.head_until = 0.0
        self.sent: Counter[tuple[Node, float]] = Counter()

    def known_jobs(self, node: Node, now: float) -> int:
        """Jobs that a node told of, and those that were sent since."""
        told_at, jobs = self.told.get(node, NEVER_TOLD)
        is_known = now - told_at < KNOWN_SECONDS
        return self.sent.get((node, told_at), 0) + (jobs if is_known else 0)


class Simulation:
    """One run.

    Args:
        settings: costs, sizes and choices.
        num_spans: length, at the rate that nodes and proxies allow.
        is_cold: no node has the package at first.
    """

    def __init__(
        self, settings: Settings, num_spans: int, *, is_cold: bool = False
    ) -> None:
        self._settings = s = settings
        self._random = random.Random(0)
        self._now = 0.0
        possible = min(1.0, s.proxy_cores / max(s.needed_proxy_cores, 1e-9))
        seconds = num_spans / s.ideal_spans_per_second / possible
        self._end = min(max(seconds, MIN_SECONDS), MAX_SECONDS)
        self._warm_at = self._end / 2
        self._nodes = [Node(number, s) for number in range(s.nodes)]
        self._owners = self._nodes[:REPLICAS]
        alive = max(REPLICAS, s.nodes - int(s.nodes * s.dead))
        for node in self._nodes:
            node.is_dead = node.number >= alive
            node.lacks_package_at = 0.0 if is_cold else self._next_loss()
        self._proxies: list[Proxy] = []
        while len(self._proxies) < s.proxy_cores:
            # As if each host had met each dead node in the last minute.
            suppressed = {
                node: self._random.uniform(0.0, SUPPRESS_SECONDS)
                for node in self._nodes[alive:]
            }
            told: dict[Node, tuple[float, int]] = {}
            for _ in range(s.cores_per_host):
                self._proxies.append(Proxy(told, suppressed))
        self._seconds: list[float] = []
        self._served: dict[tuple[str, int], list[Node]] = defaultdict(list)
        self._num_asked = self._num_moved = 0

    def run(self) -> Row:
        """Figures of the run."""
        s = self._settings
        num_jobs = s.jobs or max(1, s.nodes // 10)
        jobs = [self._spans(number) for number in range(num_jobs)]
        events = [
            # They do not all start at once.
            (self._random.uniform(0.0, 0.5), n, self._flow(n % num_jobs, jobs))
            for n in range(s.flows * s.nodes)
        ]
        heapify(events)
        while events[0][0] < self._end:
            self._now, number, flow = events[0]
            heapreplace(events, (next(flow), number, flow))
        return self._figures()

    def _spans(self, job: int) -> Iterator[Span]:
        """A job's spans, in shuffled epochs."""
        spans = SHARD_SPANS * self._settings.shards
        shuffle = np.random.default_rng(job).permutation
        placed: dict[str, list[Replica]] = {}
        for epoch in count(1):
            order = shuffle(spans).tolist() if spans else [epoch * SHARD_SPANS]
            for number in order:
                shard, part = divmod(number, SHARD_SPANS)
                name = f"/AUTH_{job}/c/shard-{shard}"
                if name not in placed:
                    placed[name] = self._place()
                rank = partial(_rank, name, part, self._settings.disks)
                yield Span(name, part, sorted(placed[name], key=rank))

    def _place(self) -> list[Replica]:
        """Replicas of a new shard, on different nodes."""
        num_replicas = min(REPLICAS, len(self._nodes))
        return [
            (node, self._random.randrange(self._settings.disks))
            for node in self._random.sample(self._nodes, num_replicas)
        ]

    def _flow(self, job: int, jobs: Sequence[Iterator[Span]]) -> Flow:
        """One span of a job after another; yields the times of its events."""
        s = self._settings
        while True:
            begun, span = self._now, next(jobs[job])
            proxy = self._random.choice(self._proxies)
            yield self._serve(proxy.cpu, s.proxy_request_seconds)
            yield self._head([node for node, _ in span.replicas])
            if proxy.head_until <= self._now:
                yield self._head(self._owners)
                proxy.head_until = self._now + s.head_cache_seconds
            node, disk = yield from self._find(span, proxy)
            yield from self._compute(span, proxy, node, disk)
            yield self._serve(
                proxy.cpu, s.span_samples * s.proxy_sample_seconds
            )
            if self._now > self._warm_at:
                self._seconds.append(self._now - begun)

    def _find(
        self, span: Span, proxy: Proxy
    ) -> Generator[float, None, Replica]:
        """The first replica that answers."""
        while True:
            asked = self._order(span, proxy)
            if not asked:
                yield self._now + RETRY_SECONDS
                continue
            node, _ = asked[0]
            if not node.is_dead:
                return asked[0]
            is_silent = node.number % 2
            wait = SILENCE_SECONDS if is_silent else REFUSAL_SECONDS
            yield self._now + wait
            proxy.suppressed[node] = self._now + SUPPRESS_SECONDS

    def _order(self, span: Span, proxy: Proxy) -> list[Replica]:
        """Replicas in the order in which a proxy asks them now."""
        asked = [
            replica
            for replica in span.replicas
            if proxy.suppressed.get(replica[0], 0.0) <= self._now
        ]
        if self._settings.slack != HASH and asked:
            jobs = {n: proxy.known_jobs(n, self._now) for n, _ in asked}
            most = min(jobs.values()) + self._settings.slack
            if jobs[asked[0][0]] > most:
                asked.sort(key=lambda candidate: jobs[candidate[0]])
        return asked

    def _compute(
        self, span: Span, proxy: Proxy, node: Node, disk: int
    ) -> Flow:
        """Reads and computes a span at its node."""
        s = self._settings
        proxy.sent[node, proxy.told.get(node, NEVER_TOLD)[0]] += 1
        node.num_jobs += 1
        is_moved = node is not span.replicas[0][0]
        self._num_asked += 1
        self._num_moved += is_moved
        self._served[span.shard, span.number].append(node)
        # Its pages are where it is usually read.
        if is_moved or self._random.random() >= s.cached:
            seconds = s.span_samples * s.disk_sample_seconds
            seconds += s.disk_request_seconds
            yield self._serve(node.disks[disk], seconds)
        seconds = s.span_samples * s.node_sample_seconds
        yield self._serve(node.cpu, s.node_request_seconds + seconds)
        if node.lacks_package_at <= self._now:
            owner = self._random.choice(self._owners)
            seconds = s.package_bytes / s.link_bytes_per_second
            came = owner.link.serve(self._now, seconds)
            node.has_package_at = came + s.package_load_seconds
            node.lacks_package_at = node.has_package_at + self._next_loss()
        if node.has_package_at > self._now:
            yield node.has_package_at
        yield self._serve(node.worker, s.span_samples / s.node_rate)
        node.num_jobs -= 1
        proxy.told[node] = self._now, node.num_jobs

    def _head(self, nodes: Sequence[Node]) -> float:
        node = self._random.choice(nodes)
        node.num_package_heads += nodes is self._owners
        return self._serve(node.cpu, self._settings.head_seconds)

    def _serve(self, station: Station, mean_seconds: float) -> float:
        seconds = self._random.expovariate(1.0) * mean_seconds
        return station.serve(self._now, seconds)

    def _next_loss(self) -> float:
        """Seconds until a node lacks its package again."""
        per_day = max(self._settings.package_losses, 1e-9)
        return self._random.expovariate(per_day / DAY_SECONDS)

    def _figures(self) -> Row:
        def busy(stations: Iterable[Station]) -> float:
            return fmean(station.busy(self._end) for station in stations)

        s = self._settings
        alive = [node for node in self._nodes if not node.is_dead]
        often = [
            len({*nodes[:READS]})
            for nodes in self._served.values()
            if len(nodes) >= READS
        ]
        rate = len(self._seconds) / (self._end - self._warm_at)
        heads = fmean(node.num_package_heads for node in self._owners)
        return {
            "share": rate / s.ideal_spans_per_second,
            "proxy_cores": s.needed_proxy_cores,
            "span_p99_seconds": float(np.percentile(self._seconds, 99)),
            "nodes_used": len({*chain(*self._served.values())}) / len(alive),
            "moved": self._num_moved / self._num_asked,
            "nodes_per_span": fmean(often) if often else None,
            "heads_per_second": heads / self._end,
            "package_seconds": max(node.has_package_at for node in alive),
            "proxies_busy": busy(proxy.cpu for proxy in self._proxies),
            "nodes_busy": busy(node.cpu for node in alive),
            "package_nodes_busy": busy(node.cpu for node in self._owners),
            "disks_busy": busy(disk for node in alive for disk in node.disks),
            "workers_busy": busy(node.worker for node in alive),
        }


def _rank(name: str, part: int, num_disks: int, replica: Replica) -> bytes:
    node, disk = replica
    return spread(name, part, node.number * num_disks + disk)
