"""Throughput of a worker over that of the tightest loop on the same machine.

    python -m benchmarks.worker --data DIR --json worker.json

Samples per second through a worker's socket, divided by those of a loop in one
process that decodes the same photographs and runs the same eager torchvision
model (benchmarks/micro/tight_loop.py).  The loop imports nothing of HAPI; its
batch, memory format and threads are the best of a sweep.  The worker has its
default options.  Both run on the same cores, in turn; so do the clients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.command_line import (
    PHOTOGRAPHS,
    add_rounds,
    exit_status,
    parse,
    parser_of,
    print_table,
)
from benchmarks.ratios import rate_between, summary
from benchmarks.record import write_results
from benchmarks.testbed.remote import Remote
from benchmarks.testbed.shards import find_tars, write_shards
from benchmarks.testbed.two_tiers import ROOT
from benchmarks.testbed.worker_process import (
    ask_all,
    package_model,
    running_worker,
    stream_client,
    temporary_folder,
)

ROUNDS = 5
GOALS: Mapping[str, float] = MappingProxyType({"cpu": 0.90, "cuda": 0.80})
BATCHES = (1, 4, 8, 16, 32)
SECONDS, QUICK_SECONDS = 8.0, 1.0
SWEEP_SECONDS = 2.5
SHARD_SAMPLES = 60
"""About the 64 samples of a training job's span."""
CLIENTS = (1, 4)
STREAMS = 2
WARM_SECONDS = 3.0
QUESTION_SECONDS = 120.0
CONTENDERS = 2
"""Number of settings of the loop in each round; the faster one counts."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A torchvision model: the loop replaces ``head`` by the identity."""

    name: str
    head: str
    freeze: str


NETWORKS: Mapping[str, Sequence[Network]] = MappingProxyType(
    {
        "cpu": (
            Network("resnet18", "fc", "avgpool"),
            Network("mobilenet_v3_small", "classifier", "avgpool"),
        ),
        "cuda": (Network("resnet50", "fc", "avgpool"),),
    }
)
"""Models by device."""


@dataclass
class Bench:
    """Measures one model.

    ``quick`` makes measurements short and tries one setting of the loop.
    """

    network: Network
    device: str
    folder: Path
    shard: Path
    rounds: int
    quick: bool

    def run(self) -> Iterator[dict[str, Any]]:
        """The model's cells, one for each number of clients."""
        package, cut = package_model(
            self.folder, self.network.name, self.network.freeze
        )
        sweep = self._sweep()
        with ExitStack() as stack:
            path = stack.enter_context(
                running_worker(self.folder, self.device, ())
            )
            clients = [
                stack.enter_context(stream_client(f"client {number}"))
                for number in range(max(CLIENTS))
            ]
            for client in clients:
                client.ask(
                    "open",
                    seconds=QUESTION_SECONDS,
                    path=str(path),
                    account="AUTH_bench",
                    package=str(package),
                    shard=str(self.shard),
                    cut=cut,
                    encoding="float32",
                )
            rounds: dict[int, list[dict[str, float]]] = {
                count: [] for count in CLIENTS
            }
            for number in range(self.rounds):
                loop = max(
                    self._loop(chosen, self._seconds)
                    for chosen in sweep[:CONTENDERS]
                )
                for count in CLIENTS if number % 2 else CLIENTS[::-1]:
                    engine = self._engine(clients[:count])
                    rounds[count].append({"engine": engine, "loop": loop})
                    print(
                        f"{self.network.name}, {count} clients:"
                        f" {engine:.1f} of {loop:.1f} samples/s",
                        flush=True,
                    )
        for count in CLIENTS:
            yield cell(self.network.name, count, rounds[count], sweep)

    def _sweep(self) -> list[Settings]:
        """Settings of the loop with their rates, the fastest first."""
        threads = thread_splits(len(os.sched_getaffinity(0)))
        grid: list[Settings] = [
            {"batch": batch, "channels_last": last, **thread}
            for thread in threads
            for last in (True, False)
            for batch in BATCHES
        ]
        if self.quick:
            grid = [point for point in grid if point["torch_threads"] == 1][:1]
        seconds = QUICK_SECONDS if self.quick else SWEEP_SECONDS
        rates = [(self._loop(point, seconds), point) for point in grid]
        return [
            {**cell, "samples_per_second": rate}
            for rate, cell in sorted(rates, key=lambda x: x[0], reverse=True)
        ]

    @property
    def _seconds(self) -> float:
        return QUICK_SECONDS if self.quick else SECONDS

    def _loop(self, settings: Settings, seconds: float) -> float:
        question = {
            **{k: v for k, v in settings.items() if k != "samples_per_second"},
            "tar": str(self.shard),
            "model": self.network.name,
            "head": self.network.head,
            "device": self.device,
            "seconds": seconds,
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.micro.tight_loop"],
                input=json.dumps(question),
                stdout=subprocess.PIPE,
                text=True,
                timeout=QUESTION_SECONDS,
                cwd=ROOT,
                check=True,
            )
        except subprocess.SubprocessError as error:
            raise ValueError(f"tight_loop with {settings}: {error}") from error
        return float(json.loads(done.stdout)["samples_per_second"])

    def _engine(self, clients: Sequence[Remote]) -> float:
        """Samples per second through the worker's socket."""
        begin = time.monotonic() + 0.5
        counted = begin + WARM_SECONDS
        end = counted + self._seconds

        def run(client: Remote) -> Any:
            return client.ask(
                "run",
                seconds=QUESTION_SECONDS,
                begin=begin,
                end=end,
                streams=STREAMS,
            )

        done = ask_all(clients, run)
        return rate_between([d["progress"] for d in done], counted, end)


def thread_splits(cores: int) -> list[dict[str, int]]:
    """Divisions of the cores between decoding and forward passes."""
    splits = {(0, cores, 1), (0, 1, cores), (cores, cores, 1)}
    for decoding in range(1, cores + 1):
        splits |= {(decoding, 1, threads) for threads in (1, cores)}
    names = ("decode_threads", "forward_threads", "torch_threads")
    return [dict(zip(names, split, strict=True)) for split in sorted(splits)]


def cell(
    model: str,
    clients: int,
    rounds: Sequence[Mapping[str, float]],
    sweep: Sequence[Settings],
) -> dict[str, Any]:
    """Medians of the rounds; efficiency is that of their ratios."""
    ratios = summary([trial["engine"] / trial["loop"] for trial in rounds])
    return {
        "model": model,
        "clients": clients,
        "engine_samples_per_second": statistics.median(
            trial["engine"] for trial in rounds
        ),
        "loop_samples_per_second": statistics.median(
            trial["loop"] for trial in rounds
        ),
        "efficiency": ratios["median"],
        "interval": ratios["interval"],
        "rounds": list(rounds),
        "sweep": list(sweep),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("worker", __doc__, data=PHOTOGRAPHS)
    add_rounds(parser, ROUNDS)
    parser.add_argument(
        "--device",
        default="cpu",
        choices=sorted(GOALS),
        help="device of worker and loop (default cpu)",
    )
    options = parse(parser, argv)
    return exit_status("worker", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    goal = GOALS[options.device]
    cells: list[dict[str, Any]] = []
    settings = {
        "device": options.device,
        "quick": options.quick,
        "goal": goal,
        "rounds": options.rounds,
    }
    networks = NETWORKS[options.device]
    with temporary_folder() as folder:
        [shard] = write_shards(
            find_tars(options.data), folder, SHARD_SAMPLES, SHARD_SAMPLES
        )
        for network in networks[-1:] if options.quick else networks:
            bench = Bench(
                network,
                options.device,
                folder,
                shard,
                options.rounds,
                options.quick,
            )
            for cell in bench.run():
                cells.append(cell)
                write_results(
                    options.json, "worker", settings, {"cells": cells}
                )
    print_table(
        f"Samples per second; the goal of the efficiency is {goal}",
        ("model", "clients", "worker", "loop", "efficiency", "interval"),
        [
            (
                cell["model"],
                str(cell["clients"]),
                f"{cell['engine_samples_per_second']:.1f}",
                f"{cell['loop_samples_per_second']:.1f}",
                f"{cell['efficiency']:.3f}",
                "{:.3f} … {:.3f}".format(*cell["interval"]),
            )
            for cell in cells
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
