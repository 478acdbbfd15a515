"""Cost of the filter for requests that are not annotated.

    python -m benchmarks.filter --json filter.json

``call``: CPU seconds that the filter adds to one call; the goal is at most 30
microseconds.  ``proxy``: CPU seconds of a proxy for GETs and PUTs of 4 KiB on
a persistent connection, with the filter over without it; the goal is at most
1.02.  Three proxies in front of the same Swift servers take turns, two of them
without the filter; ``noise`` is one of these over the other.  Swift's servers
have one core, the client has another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.command_line import (
    add_rounds,
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.micro.filter_cost import Round, call_rounds, proxy_rounds
from benchmarks.ratios import ratio, summary
from benchmarks.record import write_results
from benchmarks.testbed.two_tiers import two_tiers

ROUNDS = 30
MAX_CALL_SECONDS = 30e-6
MAX_PROXY_RATIO = 1.02
VERBS = ("get", "put")


def judge_call(rounds: Sequence[Round]) -> dict[str, Any]:
    """Seconds that a call takes longer with the filter."""
    added = summary([run["with"] - run["without"] for run in rounds])
    return {
        "added_seconds": added,
        "met": added["median"] <= MAX_CALL_SECONDS,
        "rounds": list(rounds),
    }


def judge_proxy(rounds: Sequence[Round]) -> dict[str, Any]:
    """Ratios of a proxy's CPU seconds, and the noise."""
    cell: dict[str, Any] = {}
    for verb in VERBS:
        without = [run[f"{verb}_without"] for run in rounds]
        for name, other in (("ratio", "with"), ("noise", "again")):
            values = [run[f"{verb}_{other}"] for run in rounds]
            cell[f"{verb}_{name}"] = ratio(values, without)
        cell[f"{verb}_seconds"] = summary(without)
    met = all(
        cell[f"{verb}_ratio"]["median"] <= MAX_PROXY_RATIO for verb in VERBS
    )
    return {**cell, "met": met, "rounds": list(rounds)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("filter", __doc__)
    add_rounds(parser, ROUNDS)
    options = parse(parser, argv)
    return exit_status("filter", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    call = judge_call(list(_shown(call_rounds(options.rounds))))
    with two_tiers(netns=False, worker=False) as bed:
        proxy = judge_proxy(list(_shown(proxy_rounds(bed, options.rounds))))
    print_table(
        "Cost of the filter",
        ("figure", "median", "interval"),
        [
            _row("added to a call, µs", call["added_seconds"], 1e6),
            *(
                _row(f"{verb.upper()} {name}", proxy[f"{verb}_{name}"], 1.0)
                for verb in VERBS
                for name in ("ratio", "noise")
            ),
        ],
    )
    print_goals(
        {
            f"at most {MAX_CALL_SECONDS * 1e6:g} µs a call": call["met"],
            f"at most {MAX_PROXY_RATIO} of a proxy's CPU": proxy["met"],
        }
    )
    write_results(
        options.json,
        "filter",
        {"quick": options.quick, "rounds": options.rounds},
        {"call": call, "proxy": proxy},
    )
    return 0


def _shown(rounds: Iterable[Round]) -> Iterable[Round]:
    for run in rounds:
        print(", ".join(f"{k} {v:.3g} s" for k, v in run.items()), flush=True)
        yield run


def _row(name: str, cell: dict[str, Any], scale: float) -> Sequence[str]:
    low, high = (scale * limit for limit in cell["interval"])
    median = scale * cell["median"]
    return name, f"{median:.3f}", f"{low:.3f} … {high:.3f}"


if __name__ == "__main__":
    sys.exit(main())
