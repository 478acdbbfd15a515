"""How near a worker comes to the tightest loop on the same machine.

    python -m benchmarks.worker --data DIR --json worker.json

Samples per second through a worker's socket, over those of a loop in one
process that decodes the same photographs and runs the same eager torchvision
model (benchmarks/tight_loop.py).  The loop imports nothing of HAPI; its batch,
memory format and threads are the best of a sweep.  The worker has the options
that operators get by default, or those of ``--options``.  Both run on the same
cores, in turn, and the worker's clients on these cores too.

The JSON file: ``settings``, ``machine``, ``versions`` and ``cells``, a list of

  model, clients    torchvision's name; processes that read features, each of
                    ``settings.streams`` streams at a time
  engine_samples_per_second, loop_samples_per_second    medians of the rounds
  efficiency, interval    median of the rounds' ratios; 95 % by bootstrap
  rounds            [{engine, loop, client_seconds}]: samples per second, and
                    CPU seconds of the clients for each sample
  sweep             [{batch, channels_last, decode_threads, forward_threads,
                    torch_threads, samples_per_second}]: all settings of the
                    loop that were tried, the best first
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
from typing import Any

import numpy as np
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
from benchmarks.regret import interval_of
from benchmarks.remote import Remote
from benchmarks.results import machine, versions, write_json
from benchmarks.shards import find_tars, write_shards
from benchmarks.tenants import rate_of
from benchmarks.worker_process import (
    ROOT,
    at_once,
    client_process,
    package_model,
    running_worker,
)

GOALS = {"cpu": 0.90, "cuda": 0.80}
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHARD_SAMPLES = 60
"""As the spans of a training job: 64 samples at most."""
CLIENTS = (1, 4)
STREAMS = 2
ENCODING = "float32"
WARM_SECONDS = 3.0
LOOP_SECONDS = 120.0
CONTENDERS = 2
"""Settings of the loop that take part in the rounds; the better one of each
round counts."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A torchvision model, cut before its last layers.

    Attributes:
        head: the attribute that the loop leaves out.
        freeze: the module after which the worker's features are.
    """

    name: str
    head: str
    freeze: str


NETWORKS = {
    each.name: each
    for each in (
        Network("resnet18", "fc", "avgpool"),
        Network("mobilenet_v3_small", "classifier", "avgpool"),
        Network("resnet50", "fc", "avgpool"),
    )
}
USUAL = {
    "cpu": ("resnet18", "mobilenet_v3_small"),
    "cuda": ("resnet50",),
}


@dataclass
class Bench:
    """Measures one model.

    Args:
        network: the model.
        folder: of the package, the shard and the worker.
        shard: tar of photographs.
        options: of the command.
    """

    network: Network
    folder: Path
    shard: Path
    options: argparse.Namespace

    def run(self) -> Iterator[dict[str, Any]]:
        """The model's cells."""
        package, cut = package_model(
            self.folder, self.network.name, self.network.freeze
        )
        sweep = self._sweep()
        best = sweep[:CONTENDERS]
        with ExitStack() as stack:
            path = stack.enter_context(
                running_worker(
                    self.folder, self.options.device, self.options.options
                )
            )
            clients = [
                stack.enter_context(client_process(f"client {number}"))
                for number in range(max(CLIENTS))
            ]
            for client in clients:
                _ask(
                    client,
                    "open",
                    path=str(path),
                    account="AUTH_bench",
                    package=str(package),
                    shard=str(self.shard),
                    cut=cut,
                    encoding=ENCODING,
                )
            rounds: dict[int, list[dict[str, float]]] = {
                n: [] for n in CLIENTS
            }
            for number in range(self.options.rounds):
                loop = max(map(self._loop, best))
                order = CLIENTS if number % 2 else CLIENTS[::-1]
                for count in order:
                    found = self._engine(clients[:count])
                    rounds[count].append({**found, "loop": loop})
                    print(
                        f"{self.network.name}, {count} clients: "
                        f"{found['engine']:.1f} of {loop:.1f} samples/s",
                        flush=True,
                    )
        for count in CLIENTS:
            yield cell(self.network.name, count, rounds[count], sweep)

    def _sweep(self) -> list[Settings]:
        """The loop's settings with what they reach, the best first."""
        cores = len(os.sched_getaffinity(0))
        tried = [
            self._tried({"batch": 8, "channels_last": last, **threads})
            for threads in thread_splits(cores)
            for last in (False, True)
        ]
        best = max(tried, key=_rate)
        tried += [
            self._tried({**_settings(best), "batch": b, "channels_last": last})
            for b in BATCHES
            for last in (False, True)
            if (b, last) != (best["batch"], best["channels_last"])
        ]
        return sorted(tried, key=_rate, reverse=True)

    def _tried(self, settings: Settings) -> Settings:
        rate = self._loop(settings, self.options.sweep_seconds)
        print(f"{self.network.name}: {settings}: {rate:.1f}", flush=True)
        return {**settings, "samples_per_second": rate}

    def _loop(self, settings: Settings, seconds: float | None = None) -> float:
        question = {
            **_settings(settings),
            "tar": str(self.shard),
            "model": self.network.name,
            "head": self.network.head,
            "device": self.options.device,
            "seconds": seconds or self.options.seconds,
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.tight_loop"],
                input=json.dumps(question),
                stdout=subprocess.PIPE,
                text=True,
                timeout=LOOP_SECONDS,
                cwd=ROOT,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"the loop with {settings} took more than {LOOP_SECONDS:g} s"
            ) from error
        if done.returncode:
            raise ValueError(
                f"the loop with {settings} ended with status"
                f" {done.returncode}; its error output stands above"
            )
        return float(json.loads(done.stdout)["samples_per_second"])

    def _engine(self, clients: Sequence[Remote]) -> dict[str, float]:
        begin = time.monotonic() + 0.5
        counted = begin + WARM_SECONDS
        end = counted + self.options.seconds

        def run(client: Remote) -> Any:
            return _ask(client, "run", begin=begin, end=end, streams=STREAMS)

        done = at_once(clients, run)
        samples = sum(each["progress"][-1][1] for each in done)
        return {
            "engine": rate_of([d["progress"] for d in done], counted, end),
            "client_seconds": sum(d["cpu_seconds"] for d in done) / samples,
        }


def thread_splits(cores: int) -> list[dict[str, int]]:
    """Ways to share cores between decoding and forward passes."""
    splits = {(0, cores, 1), (0, 1, cores), (cores, cores, 1)}
    for decoding in range(1, cores + 1):
        splits |= {(decoding, 1, threads) for threads in (1, cores)}
    names = ("decode_threads", "forward_threads", "torch_threads")
    return [dict(zip(names, each, strict=True)) for each in sorted(splits)]


def cell(
    model: str,
    clients: int,
    rounds: Sequence[Mapping[str, float]],
    sweep: Sequence[Settings],
) -> dict[str, Any]:
    """What the rounds say."""
    ratios = [each["engine"] / each["loop"] for each in rounds]
    return {
        "model": model,
        "clients": clients,
        "engine_samples_per_second": statistics.median(
            each["engine"] for each in rounds
        ),
        "loop_samples_per_second": statistics.median(
            each["loop"] for each in rounds
        ),
        "efficiency": statistics.median(ratios),
        "interval": interval_of(ratios, np.median),
        "rounds": list(rounds),
        "sweep": list(sweep),
    }


def report(cells: Sequence[Mapping[str, Any]], goal: float) -> str:
    """One line for each cell."""
    return "\n".join(
        f"{each['model']}, {each['clients']} clients: "
        f"{each['engine_samples_per_second']:.1f} samples/s through the "
        f"socket, {each['loop_samples_per_second']:.1f} in the loop: "
        f"{each['efficiency']:.3f} ({each['interval'][0]:.3f} to "
        f"{each['interval'][1]:.3f}); goal {goal}"
        for each in cells
    )


def _ask(client: Remote, do: str, **arguments: Any) -> Any:
    return client.ask(do, seconds=LOOP_SECONDS, **arguments)


def _settings(tried: Settings) -> Settings:
    return {k: v for k, v in tried.items() if k != "samples_per_second"}


def _rate(tried: Settings) -> float:
    return float(tried["samples_per_second"])


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("worker", __doc__)
    add = parser.add_argument
    add_data(parser)
    add(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="of worker and loop (default cpu)",
    )
    add(
        "--models",
        nargs="+",
        choices=sorted(NETWORKS),
        help="default: resnet18 mobilenet_v3_small; resnet50 on a GPU",
    )
    add_worker_options(parser)
    add_rounds(parser)
    add(
        "--seconds",
        type=float,
        default=8.0,
        help="that are counted, of each contender in a round (default 8)",
    )
    add(
        "--sweep-seconds",
        type=float,
        default=2.5,
        help="for each setting of the loop (default 2.5)",
    )
    found = parser.parse_args(argv)
    check_rounds(parser, found)
    if min(found.seconds, found.sweep_seconds) < 1:
        parser.error("--seconds and --sweep-seconds must be 1 or more")
    check_worker_options(parser, found)
    found.models = found.models or list(USUAL[found.device])
    require_data(parser, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    return exit_status("worker", lambda: _run(arguments))


def _run(options: argparse.Namespace) -> int:
    tars = find_tars(options.data)
    goal = GOALS[options.device]
    body: dict[str, Any] = {
        "benchmark": "worker",
        "settings": {
            "device": options.device,
            "options": options.options,
            "encoding": ENCODING,
            "goal": goal,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "shard_samples": SHARD_SAMPLES,
            "streams": STREAMS,
            "tars": [tar.name for tar in tars],
        },
        "machine": machine(),
        "versions": versions(),
        "cells": [],
    }
    remove_stale()
    folder = new_folder()
    try:
        [shard] = write_shards(tars, folder, SHARD_SAMPLES, SHARD_SAMPLES)
        for name in options.models:
            bench = Bench(NETWORKS[name], folder, shard, options)
            for found in bench.run():
                body["cells"].append(found)
                if options.json is not None:
                    write_json(options.json, body)
        print(report(body["cells"], goal), flush=True)
    finally:
        remove_folder(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
