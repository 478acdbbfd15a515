"""Simulates 1 to 1,000 storage nodes with measured costs of each stage.

    python -m benchmarks.simulation --costs places.json --json simulation.json

Closed loop: jobs keep spans under way.  A span waits for a process of a proxy,
for HEADs of its shard and of the model package (all jobs use the same one),
for a disk, the object server's CPU and the worker of a node, and for the proxy
again.  A job reads shards of its own, 16 spans each, on three random nodes
each, in shuffled epochs.  Service times are exponential.

With --slack -1 the first node in the order of the hash gets a span
(hapi_middleware.places.places.spread).  Otherwise it is left for the shortest
queue of the three if its own is longer by more than the slack.  A proxy knows
of queues how many jobs a node had when it last answered this host, up to five
seconds ago, and how many the process has sent there since.

Tables vary some options; the others are as given.  All tables, and all of
"rows" but "share", have twice the cores of proxies that the ideal rate needs.
The first table has 1 to 1,000 nodes, later ones 10 to 1,000 or --nodes.
The second half of a run counts.  Keys of the JSON's rows are options, and

share                 of the rate of all living nodes without queues
share_with_proxies    the same with enough proxies, in "rows"
proxy_cores           cores of proxies that the ideal rate needs
proxy_links           links that its features fill
package_seconds       until all nodes have loaded the package, in "rows"
*_busy                part of the time that proxies, cores of all nodes and of
                      those that store the package, disks and workers work
heads_per_second      HEADs of the package at each host that stores it
nodes_used            part of the nodes that computed something
moved                 part of the spans not at the first node of their hash
nodes_per_span        different nodes that read a span three times
span_p99_seconds      99th percentile of a span's time
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.command_line import exit_status, parse, parser_of, print_table
from benchmarks.micro.storage_nodes import HASH, Row, Settings, Simulation
from benchmarks.places import SHARD_SAMPLES, SPAN_SAMPLES
from benchmarks.record import write_results

NODES = (1, 10, 100, 1000)
SPANS = 60_000
QUICK_NODES, QUICK_SPANS = 10, 500
ONE_JOB: Mapping[str, list[Any]] = {"jobs": [1]}
"""All nodes for one job."""


def cases(**choices: Iterable[Any]) -> list[Row]:
    """All combinations of values of options."""
    values = product(*choices.values())
    return [dict(zip(choices, value, strict=True)) for value in values]


ROWS = (
    "share share_with_proxies proxy_cores proxy_links proxies_busy nodes_busy"
    " package_nodes_busy disks_busy workers_busy package_seconds"
)
TABLES: Mapping[str, tuple[str, list[Row], str]] = {
    "heads": (
        "HEADs of the package",
        cases(nodes=NODES[1:], jobs=(1, 0), head_cache_seconds=(0.0, 1.0)),
        "heads_per_second package_nodes_busy share",
    ),
    "shards": (
        "One job: number of shards",
        cases(
            nodes=NODES[1:],
            shards=(1400, 100, 30),
            slack=(HASH, 2),
            **ONE_JOB,
        ),
        "share nodes_used span_p99_seconds",
    ),
    "jobs": (
        "Number of jobs with few shards",
        cases(shards=[30], jobs=(1, 10, 100), slack=(HASH, 2)),
        "share nodes_used",
    ),
    "choices": (
        "One job: choice of the replica",
        cases(nodes=NODES[1:], slack=(HASH, 0, 1, 2, 4), **ONE_JOB),
        "share moved nodes_per_span span_p99_seconds",
    ),
    "flows": (
        "Spans under way for each node",
        cases(flows=(4, 8, 16, 32), slack=(HASH, 2)),
        "share moved span_p99_seconds",
    ),
    "spans": (
        "Samples of a span",
        cases(span_samples=(4, 16, 64, 256)),
        "proxy_cores heads_per_second package_nodes_busy share",
    ),
    "disks": (
        "Disks, and part of the spans in the page cache of their first node",
        cases(disks=(1, 4), cached=(0.0, 1.0), slack=(HASH, 2)),
        "disks_busy share",
    ),
    "dead": (
        "Part of the nodes that is dead",
        cases(dead=(0.0, 0.01, 0.05, 0.2)),
        "share span_p99_seconds",
    ),
}


def with_proxies(settings: Settings) -> Settings:
    """The same with twice the proxies that are needed."""
    cores = 2 * int(settings.needed_proxy_cores + 1)
    return replace(settings, proxy_cores=max(cores, settings.cores_per_host))


@cache
def figures(settings: Settings, num_spans: int) -> Row:
    """Figures with enough proxies; tables have some runs in common."""
    return Simulation(with_proxies(settings), num_spans).run()


def row_of(settings: Settings, num_spans: int) -> Row:
    """Figures of a number of nodes."""
    few = Simulation(settings, num_spans).run()
    many = figures(settings, num_spans)
    start = Simulation(with_proxies(settings), 0, is_cold=True).run()
    features = settings.ideal_spans_per_second * settings.span_samples
    features *= settings.feature_bytes
    return {
        **many,
        "nodes": settings.nodes,
        "share": few["share"],
        "share_with_proxies": many["share"],
        "feature_bytes_per_second": features,
        "proxy_links": features / settings.link_bytes_per_second,
        "package_bytes": settings.nodes * settings.package_bytes,
        "package_seconds": start["package_seconds"],
    }


def read_costs(path: Path | None) -> dict[str, float]:
    """The costs that ``benchmarks.places`` measured, in place of defaults."""
    if path is None:
        return {}
    measured = json.loads(path.read_text())["figures"]
    costs = {}
    for name, server in (("proxy", "proxy"), ("node", "object_servers")):
        few, many = (
            measured[f"{kind}_{server}_cpu_seconds"]["object"]["median"]
            for kind in ("span", "shard")
        )
        sample = (many - few) / (SHARD_SAMPLES - SPAN_SAMPLES)
        costs[f"{name}_sample_seconds"] = sample
        costs[f"{name}_request_seconds"] = few - SPAN_SAMPLES * sample
    # The simulation has the HEADs of shard and package apart.
    costs["node_request_seconds"] -= 2 * Settings.head_seconds
    return costs


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("simulation", __doc__)
    parser.add_argument("--costs", type=Path, help="JSON of benchmarks.places")
    for option in fields(Settings):
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=type(option.default),
            metavar="N",
            help=f"{option.metadata['help']} (default {option.default})",
        )
    options = parse(parser, argv)
    return exit_status("simulation", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    names = [option.name for option in fields(Settings)]
    given = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    base = Settings(**{**read_costs(options.costs), **given})
    most, spans = NODES[-1], SPANS
    if options.quick:
        most, spans = QUICK_NODES, QUICK_SPANS
        base = replace(base, nodes=min(most, base.nodes))
    report = {
        "rows": [
            row_of(replace(base, nodes=nodes), spans)
            for nodes in NODES
            if nodes <= most
        ]
    }
    _print("Storage nodes", report["rows"], ["nodes", *ROWS.split()])
    for name, (title, changes, columns) in TABLES.items():
        choices = [{"nodes": base.nodes, **change} for change in changes]
        report[name] = rows = [
            {**choice, **figures(replace(base, **choice), spans)}
            for choice in choices
            if choice["nodes"] <= most
        ]
        _print(title, rows, [*choices[0], *columns.split()])
    used = {"quick": options.quick, "costs": asdict(base)}
    write_results(options.json, "simulation", used, report)
    return 0


def _print(title: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    names = [name.replace("_", " ") for name in columns]
    texts = [[_text(row[name]) for name in columns] for row in rows]
    print_table(title, names, texts)


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
