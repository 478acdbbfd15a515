"""Extraction by two workers of Ray, over that by one process.

    python -m benchmarks.extraction --data DIR --json extraction.json

The features of ResNet-18 (avgpool) are written as Parquet, from a Swift
without workers on the same two cores.

  process   ``extract`` to a file, on one core
  commands  two processes that ``extract`` to the same folder, a core each
  ray       ``read_features`` and ``write_parquet``, with two CPUs on two cores

Seconds count from when all processes, also the workers of Ray, have imported
torch, until all files are complete.  Rows must be equal.

Keys of the JSON: ways (way, seconds, ratio: rate over that of ``process``),
samples, feature_bytes, equal (rows of all ways), goals.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import torch

from benchmarks.command_line import (
    PHOTOGRAPHS,
    add_rounds,
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.networks import build
from benchmarks.ratios import ratio, rotated
from benchmarks.record import write_results
from benchmarks.testbed.shards import find_tars, write_shards
from hapi_client import (
    FeatureDataset,
    JobConfig,
    TransferJob,
    split_model,
)
from hapi_client.export.extract import extract
from hapi_cluster import Cluster

SAMPLES, QUICK_SAMPLES, SHARD_SAMPLES = 4320, 64, 32
"""Ray needs about five seconds more than a process to begin (measured)."""
ROUNDS, MIN_RATIO, WAIT_SECONDS = 3, 1.5, 600
PROCESS, COMMANDS, RAY = WAYS = ("process", "commands", "ray")
DATA, FREEZE = "swift://extraction", "avgpool"
RAY_VARIABLES = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
"""No token file in the user's home, and no report to Ray's makers."""


def worker(way: str, core: int, path: Path) -> None:
    """Writes the features when a line comes; prints when it can."""
    model = build("resnet18")
    if way != RAY:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
    torch.set_num_threads(1)
    with ready_for(way):
        print("ready", flush=True)
        sys.stdin.readline()
        if way == RAY:
            from hapi_client.integrations.ray import read_features

            frozen, _ = split_model(model, FREEZE)
            with FeatureDataset(DATA, frozen, cut=0) as data:
                read_features(data).write_parquet(str(path))
        else:
            with TransferJob(
                model,
                freeze=FREEZE,
                data=DATA,
                config=JobConfig(cut="stream"),
            ) as job:
                extract(job, path)
        print("written", flush=True)
        sys.stdin.readline()


@contextmanager
def ready_for(way: str) -> Iterator[None]:
    """Runs Ray, if the way needs it."""
    if way != RAY:
        yield
        return
    import ray

    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=256 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.ERROR)
            # Both at once, so that there are two.
            imports = ray.remote(started)
            ray.get([imports.remote(), imports.remote()])
            yield
        finally:
            ray.shutdown()


def started() -> None:
    """Imports what reads features, in a worker of Ray."""
    import hapi_client.integrations.ray  # noqa: F401

    time.sleep(5)


def seconds_of(way: str, cluster: Cluster, path: Path) -> float:
    """Seconds until processes of a way have written their files."""
    environment = {**os.environ, **cluster.environment, **RAY_VARIABLES}
    environment["OMP_NUM_THREADS"] = "1"
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.extraction"),
                *("--worker", way, str(core), str(path)),
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for core in range(1 + (way == COMMANDS))
    ]
    try:
        await_all(processes, "ready")
        began = time.monotonic()
        tell(processes)
        await_all(processes, "written")
        ended = time.monotonic()
        tell(processes)
        if any(x.wait(WAIT_SECONDS) for x in processes):
            raise OSError(f"{way}: a process has failed")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return ended - began


def tell(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        print(file=process.stdin, flush=True)


def await_all(processes: Sequence[subprocess.Popen[str]], wanted: str) -> None:
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline().strip() != wanted:
            raise OSError(f"a process has ended before it was {wanted}")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    samples = QUICK_SAMPLES if options.quick else SAMPLES
    shards = folder / "shards"
    shards.mkdir()
    write_shards(find_tars(options.data), shards, samples, SHARD_SAMPLES)
    tables, equal = {}, True
    plain = {"processes": True, "worker": False, "hapi_filter": False}
    with Cluster.temporary(**plain) as cluster:
        environment = {**os.environ, **cluster.environment}
        command = "from hapi_client.cli.main import main; main()"
        subprocess.run(
            [sys.executable, "-c", command, "upload", shards, DATA],
            env=environment,
            check=True,
            capture_output=True,
        )
        for number in range(options.rounds):
            for way in rotated(WAYS, number):
                path = folder / f"{way}{number}"
                if way == PROCESS:
                    path = path.with_suffix(".parquet")
                else:
                    path.mkdir()
                seconds[way].append(seconds_of(way, cluster, path))
                table = pq.read_table(path)
                tables[way] = table.sort_by(
                    [("object", "ascending"), ("key", "ascending")]
                )
            equal &= all(x.equals(tables[PROCESS]) for x in tables.values())
    ways = [
        {
            "way": way,
            "seconds": seconds[way],
            "ratio": ratio(seconds[PROCESS], seconds[way]),
        }
        for way in WAYS
    ]
    features = tables[PROCESS]["features"]
    return {
        "ways": ways,
        "samples": tables[PROCESS].num_rows,
        "feature_bytes": features.nbytes,
        "equal": equal,
    }


def main() -> int:
    parser = parser_of("extraction", __doc__, data=PHOTOGRAPHS)
    add_rounds(parser, ROUNDS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parse(parser, None)
    if options.worker:
        way, core, path = options.worker
        worker(way, int(core), Path(path))
        return 0
    return exit_status("extraction", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options, Path(folder))
    ways = {x["way"]: x for x in results["ways"]}  # type: ignore[attr-defined]
    results["goals"] = {
        f"ray at least {MIN_RATIO} times as fast as one process": ways[RAY][
            "ratio"
        ]["median"]
        >= MIN_RATIO,
        "equal rows": results["equal"],
    }
    print_table(
        "Extraction",
        ("way", "seconds", "times as fast as a process"),
        [
            (
                way,
                f"{statistics.median(x['seconds']):.1f}",
                f"{x['ratio']['median']:.2f}",
            )
            for way, x in ways.items()
        ],
    )
    print_goals(results["goals"])  # type: ignore[arg-type]
    settings = {"quick": options.quick, "rounds": options.rounds}
    write_results(options.json, "extraction", settings, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
