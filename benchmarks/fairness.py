"""Whether a worker is fair between accounts, and what sharing it costs.

    python -m benchmarks.fairness --data DIR --json fairness.json

Each scenario has a worker of its own, and its clients are processes on the
same cores.  They speak to its socket as Swift's filter does, and ask again for
what is refused (429, 503) when it says so.

  greedy        one account asks for 16 streams all the time, three for two
  weights       the same with account_weights 4, 2 and 1 of the three
  anonymous     an account with two streams, beside 16 of callers without one
  anonymous-weighted    the same, and these weigh 0.25
  makespan      ten accounts with six models, at once and one by one

The JSON file: ``settings``, ``machine``, ``versions`` and ``scenarios``, a
list of which each has ``scenario``, ``goal``, ``met``, ``rounds`` and, but for
makespan,

  capacity      seconds of work (CPU seconds of decoding and forward passes)
                that the worker does in a second: of all together, or of one
                account alone if that was more; median of the rounds, as all
                that follow
  used          seconds of work in a second that all together had
  jain, jain_interval    Jain's index of the accounts' ratios; 95 % by
                bootstrap
  accounts      [{account, streams, weight; samples_per_second and
                work_per_second, beside the others; demand and
                demand_samples_per_second, alone; share, the max-min fair one
                of the capacity, by weight; ratio, ratios and interval, of
                work_per_second to share; guarded, whether the goal is about
                it; refused, requests in all rounds}]

and for makespan

  makespan_seconds, solo_seconds    of all at once; of all one by one
  ratio, interval    of the first to the second; 95 % by bootstrap
  refused       requests, in all rounds
  tenants       [{account, model, samples, solo_seconds}]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import contention, makespan
from benchmarks.commands import (
    add_data,
    add_rounds,
    add_worker_options,
    check_rounds,
    check_worker_options,
    exit_status,
    parser_of,
    require_data,
)
from benchmarks.folders import new_folder, remove_folder, remove_stale
from benchmarks.results import machine, versions, write_json
from benchmarks.shards import find_tars, write_shards

MAKESPAN = "makespan"
SCENARIOS = (*contention.scenarios(1, 1), MAKESPAN)
SHARD_SAMPLES = 60
"""As the spans of a training job: 64 samples at most."""
SETTINGS = (
    *("greedy", "modest", "model", "options", "quick"),
    *("rounds", "seconds", "shards", "shard_samples"),
)
QUICK = {"rounds": 2, "seconds": 4.0, "shards": 1, "shard_samples": 16}
"""Shows that it runs, and little else."""


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("fairness", __doc__)
    add = parser.add_argument
    add_data(parser)
    add(
        "--scenarios",
        nargs="+",
        choices=SCENARIOS,
        default=list(SCENARIOS),
        help="default: all",
    )
    add_worker_options(parser)
    add(
        "--model",
        default="resnet18",
        choices=("resnet18", "resnet50", "mobilenet_v3_small"),
        help="of all scenarios but makespan (default resnet18)",
    )
    add("--greedy", type=int, default=16, help="streams (default 16)")
    add(
        "--modest",
        type=int,
        default=2,
        help="streams of each other account (default 2)",
    )
    add_rounds(parser)
    add(
        "--seconds",
        type=float,
        default=20.0,
        help="that are counted of each phase (default 20)",
    )
    add(
        "--shards",
        type=int,
        default=5,
        help=f"of {SHARD_SAMPLES} photographs that each tenant of makespan "
        "reads (default 5)",
    )
    add(
        "--quick",
        action="store_true",
        help="try out: two rounds of a few seconds",
    )
    found = parser.parse_args(argv)
    found.shard_samples = SHARD_SAMPLES
    if found.quick:
        vars(found).update(QUICK)
    _check(parser, found)
    require_data(parser, found)
    return found


def _check(parser: argparse.ArgumentParser, found: argparse.Namespace) -> None:
    check_rounds(parser, found)
    if found.seconds < 1:
        parser.error(f"--seconds is {found.seconds:g}; 1 or more")
    for name in ("greedy", "modest", "shards"):
        if vars(found)[name] < 1:
            parser.error(f"--{name} is {vars(found)[name]}; 1 or more")
    check_worker_options(parser, found)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    return exit_status("fairness", lambda: _run(arguments))


def _run(options: argparse.Namespace) -> int:
    tars = find_tars(options.data)
    body: dict[str, Any] = {
        "benchmark": "fairness",
        "settings": {
            **{key: vars(options)[key] for key in SETTINGS},
            "encoding": contention.ENCODING,
            "tars": [tar.name for tar in tars],
        },
        "machine": machine(),
        "versions": versions(),
        "scenarios": [],
    }
    remove_stale()
    folder = new_folder()
    try:
        count = options.shard_samples
        [shard] = write_shards(tars, folder, count, count)
        for name in options.scenarios:
            body["scenarios"].append(_measured(name, options, folder, shard))
            if options.json is not None:
                write_json(options.json, body)
        print("\n".join(map(_report, body["scenarios"])), flush=True)
    finally:
        remove_folder(folder)
    return 0


def _measured(
    name: str, options: argparse.Namespace, folder: Path, shard: Path
) -> dict[str, Any]:
    if name == MAKESPAN:
        return makespan.Makespan(
            folder, shard, options.options, options.rounds, options.shards
        ).run()
    return contention.Contention(
        contention.scenarios(options.greedy, options.modest)[name],
        folder,
        shard,
        options.model,
        options.options,
        options.rounds,
        options.seconds,
    ).run()


def _report(entry: Mapping[str, Any]) -> str:
    if entry["scenario"] == MAKESPAN:
        return makespan.report(entry)
    return contention.report(entry)


if __name__ == "__main__":
    sys.exit(main())
