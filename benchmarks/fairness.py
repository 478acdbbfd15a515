"""Shares of accounts that use one worker at the same time.

    python -m benchmarks.fairness --data DIR --json fairness.json

Each scenario has a worker of its own; its clients are processes on the same
cores, which use its socket as Swift's filter does and repeat refused requests.

  greedy     one account always requests 16 streams, three request two each
  weights    the same, with account_weights 4, 2 and 1 of the three
  anonymous  an account with two streams, and 16 streams of anonymous callers
             with weight 0.25

The goal is 0.90 of the max-min fair share for all but the greedy and the
anonymous ones, and 0.95 for Jain's index of all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.command_line import (
    PHOTOGRAPHS,
    add_rounds,
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.micro.contention import SCENARIOS, Contention
from benchmarks.record import write_results
from benchmarks.testbed.shards import find_tars, write_shards
from benchmarks.testbed.worker_process import temporary_folder

ROUNDS = 5
SECONDS, QUICK_SECONDS = 20.0, 3.0
SHARD_SAMPLES, QUICK_SHARD_SAMPLES = 60, 16


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("fairness", __doc__, data=PHOTOGRAPHS)
    add_rounds(parser, ROUNDS)
    options = parse(parser, argv)
    return exit_status("fairness", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    quick = options.quick
    settings = {"quick": quick, "rounds": options.rounds}
    seconds = QUICK_SECONDS if quick else SECONDS
    samples = QUICK_SHARD_SAMPLES if quick else SHARD_SAMPLES
    rows: list[dict[str, Any]] = []
    with temporary_folder() as folder:
        tars = find_tars(options.data)
        [shard] = write_shards(tars, folder, samples, samples)
        for scenario in SCENARIOS[: 1 if quick else None]:
            rows.append(
                Contention(
                    scenario, folder, shard, options.rounds, seconds
                ).run()
            )
            write_results(
                options.json, "fairness", settings, {"scenarios": rows}
            )
    print_table(
        "Cost that an account caused, over its fair share",
        ("scenario", "account", "streams", "weight", "ratio", "interval"),
        [
            (
                entry["scenario"],
                account["account"],
                str(account["streams"]),
                f"{account['weight']:g}",
                f"{account['ratio']['median']:.3f}",
                "{:.3f} … {:.3f}".format(*account["ratio"]["interval"]),
            )
            for entry in rows
            for account in entry["accounts"]
        ],
    )
    print_goals(
        {
            f"{row['scenario']}: Jain's index {row['jain']['median']:.4f}": (
                row["met"]
            )
            for row in rows
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
