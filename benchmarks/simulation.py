"""Simulates 1 to 1,000 storage nodes with measured costs of each stage.

    python -m benchmarks.simulation --costs places.json --json simulation.json

Closed loop: each node is offered some spans at a time.  A span waits for a
core of a proxy, then for the worker of the node that the real order of object
servers gives (:func:`hapi_middleware.places.places.spread`, three replicas on
random nodes), then its features cross the proxy's link.  Costs of proxies and
of the link are those of ``benchmarks.places``; the speed of a node's worker is
an option.  Times have no noise: what is lost is lost to queues.

The table shows, for each number of nodes, samples per second over those of as
many nodes without queues; the cores of proxies, their links, and the part that
the uneven placement takes; and what it takes to bring one package to all.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command_line import (
    exit_status,
    parse,
    parser_of,
    print_table,
)
from benchmarks.record import write_results
from hapi_middleware.places.places import spread

NODES = (1, 10, 100, 1000)
REPLICAS = 3
SECONDS = 20.0
SEED = 0


@dataclass(frozen=True)
class Costs:
    """Costs of a span, and what a cluster has.

    Attributes:
        span_samples: samples of a span.
        feature_bytes: features of a sample, on the wire.
        proxy_seconds: CPU seconds of a proxy for a span.
        node_rate: samples per second of a node's worker.
        link_bytes_per_second: of a proxy host, towards clients.
        package_bytes: length of a model package.
        flows: spans asked for at a time, for each node.
        proxy_cores: cores of all proxies.
        cores_per_host: cores of a proxy host, which has one link.
    """

    span_samples: int = 64
    feature_bytes: int = 2048
    proxy_seconds: float = 0.012
    node_rate: float = 1000.0
    link_bytes_per_second: float = 1.25e9
    package_bytes: float = 45e6
    flows: int = 4
    proxy_cores: int = 8
    cores_per_host: int = 8


def simulate(costs: Costs, num_nodes: int) -> float:
    """Samples per second of all nodes.

    Args:
        costs: costs and sizes.
        num_nodes: storage nodes, each with a worker.
    """
    chance = random.Random(SEED)
    hosts = max(1, costs.proxy_cores // costs.cores_per_host)
    span_seconds = costs.span_samples / costs.node_rate
    link_seconds = (
        costs.span_samples * costs.feature_bytes / costs.link_bytes_per_second
    )
    cores = [0.0] * costs.proxy_cores
    nodes = [0.0] * num_nodes
    links = [0.0] * hosts
    done = number = 0
    # When a span next needs something: a core, then a node, then a link.
    events = [(0.0, each, 0) for each in range(costs.flows * num_nodes)]
    while events[0][0] < SECONDS:
        now, flow, stage = heapq.heappop(events)
        if stage == 0:
            core = heapq.heappop(cores)
            end = max(now, core) + costs.proxy_seconds
            heapq.heappush(cores, end)
        elif stage == 1:
            number += 1
            name = f"/AUTH_a/c/shard-{number}"
            count = min(REPLICAS, num_nodes)
            replicas = chance.sample(range(num_nodes), count)
            node = min(replicas, key=partial(spread, name, 0))
            end = nodes[node] = max(now, nodes[node]) + span_seconds
        else:
            link = flow % hosts
            end = links[link] = max(now, links[link]) + link_seconds
            done += costs.span_samples
        heapq.heappush(events, (end, flow, (stage + 1) % 3))
    return done / SECONDS


def row_of(costs: Costs, num_nodes: int) -> dict[str, Any]:
    """Figures of a number of nodes."""
    ideal = num_nodes * costs.node_rate
    spans = ideal / costs.span_samples
    enough = replace(
        costs, proxy_cores=max(8, 2 * int(spans * costs.proxy_seconds + 1))
    )
    feature_rate = ideal * costs.feature_bytes
    return {
        "nodes": num_nodes,
        "share": simulate(costs, num_nodes) / ideal,
        "share_with_proxies": simulate(enough, num_nodes) / ideal,
        "proxy_cores": spans * costs.proxy_seconds,
        "feature_bytes_per_second": feature_rate,
        "proxy_links": feature_rate / costs.link_bytes_per_second,
        "package_bytes": num_nodes * costs.package_bytes,
        "package_seconds": num_nodes
        * costs.package_bytes
        / costs.link_bytes_per_second,
    }


def read_costs(path: Path | None, costs: Costs) -> Costs:
    """The costs that ``benchmarks.places`` measured, in place of defaults."""
    if path is None:
        return costs
    figures = json.loads(path.read_text())["figures"]
    return replace(
        costs,
        proxy_seconds=figures["shard_proxy_cpu_seconds"]["object"]["median"],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("simulation", __doc__)
    add = parser.add_argument
    add("--costs", type=Path, help="JSON of benchmarks.places")
    add("--node-rate", type=float, default=Costs.node_rate, help="samples/s")
    add("--proxy-cores", type=int, default=Costs.proxy_cores)
    options = parse(parser, argv)
    return exit_status("simulation", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    costs = read_costs(
        options.costs,
        Costs(node_rate=options.node_rate, proxy_cores=options.proxy_cores),
    )
    rows = [
        row_of(costs, nodes) for nodes in NODES[: 2 if options.quick else 4]
    ]
    print_table(
        f"Storage nodes of {costs.node_rate:g} samples/s, "
        f"{costs.proxy_cores} cores of proxies",
        (
            "nodes",
            "of the ideal",
            "with enough proxies",
            "cores of proxies",
            "links of proxies",
            "package to all, s",
        ),
        [
            (
                str(row["nodes"]),
                f"{row['share']:.2f}",
                f"{row['share_with_proxies']:.2f}",
                f"{row['proxy_cores']:.1f}",
                f"{row['proxy_links']:.2f}",
                f"{row['package_seconds']:.1f}",
            )
            for row in rows
        ],
    )
    settings = {"quick": options.quick, "costs": asdict(costs)}
    write_results(options.json, "simulation", settings, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
