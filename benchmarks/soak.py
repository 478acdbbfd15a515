"""A worker that has hardly the memory it needs, for a long time.

Ten accounts with six models read shard after shard.  The worker's
``memory_limit`` is a quarter above what a single sample of the largest model
needs, so that models come and go, jobs are refused for now, and packages are
uploaded again.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contention import ENCODING
from benchmarks.makespan import MODELS, open_tenants, tenants
from benchmarks.memory_probe import loaded, status_bytes, validated
from benchmarks.remote import Remote
from benchmarks.shards import find_tars, write_shards
from benchmarks.worker_process import (
    at_once,
    package_model,
    running_worker,
    worker_pid,
)
from scipy.stats import theilslopes

from hapi_splitter.profiling.memory_model import needs_of

ROOM = 1.25
SHARD_SAMPLES = 16
STREAMS = 1
"""Of each of the accounts."""
UPLOADS = 2
"""That a worker takes at a time."""
COPIES = 2
"""Of a package while it is loaded, and of samples on their way."""
LIBRARIES_BYTES = 256 << 20
"""Code that torch makes and loads as it runs, stacks, and what the allocator
cannot give back."""
MAX_GROWTH = 0.05
MAX_SECONDS = 180.0
"""For one shard, while models take turns."""
SAMPLE_SECONDS = 1.0
GRACE_SECONDS = 300.0
ASK_SECONDS = 120.0
NUM_POINTS = 600
NUM_BLOCKS = 60

Series = Sequence[tuple[float, float]]


@dataclass
class Soak:
    """Runs it.

    Args:
        folder: of packages, shard and worker.
        data: tars of photographs, or their folders.
        options: of the worker.
        malloc: variables of glibc's allocator, for the worker.
        minutes: how long.
    """

    folder: Path
    data: Sequence[Path]
    options: Sequence[str]
    malloc: Mapping[str, str]
    minutes: float

    def run(self) -> dict[str, Any]:
        """The entry in the results."""
        packages = {
            name: package_model(self.folder, name, freeze)
            for name, freeze in MODELS.items()
        }
        memory_limit = int(ROOM * max(map(_needed, packages.values())))
        [shard] = write_shards(
            find_tars(self.data), self.folder, SHARD_SAMPLES, SHARD_SAMPLES
        )
        options = [f"memory_limit = {memory_limit}", *self.options]
        every = tenants()
        with ExitStack() as stack:
            path = stack.enter_context(
                running_worker(self.folder, "cpu", options, self.malloc)
            )
            pid = worker_pid(path)
            parts = {
                "start": status_bytes("VmRSS", str(pid)),
                "memory_limit": memory_limit,
                **other_bytes(
                    [package for package, _ in packages.values()],
                    shard.stat().st_size,
                    len(every) * STREAMS,
                ),
            }
            clients = open_tenants(stack, every, packages, path, shard)
            done, series = self._watch(clients, pid)
        return judge(done, series, parts)

    def _watch(
        self, clients: Sequence[Remote], pid: int
    ) -> tuple[list[Any], Series]:
        begin = time.monotonic()
        end = begin + 60 * self.minutes

        def run(client: Remote) -> Any:
            return client.ask(
                "run",
                seconds=end - begin + GRACE_SECONDS + ASK_SECONDS,
                begin=begin,
                end=end,
                streams=STREAMS,
                grace=GRACE_SECONDS,
            )

        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            sampling = pool.submit(self._sample, pid, begin, over)
            try:
                done = at_once(clients, run)
            finally:
                over.set()
        return done, [e for e in sampling.result() if e[0] <= end - begin]

    def _sample(
        self, pid: int, begin: float, over: threading.Event
    ) -> list[tuple[float, float]]:
        series: list[tuple[float, float]] = []
        while not over.wait(SAMPLE_SECONDS):
            series.append((time.monotonic() - begin, _resident(pid)))
            self._note(series)
        return series

    def _note(self, series: Series) -> None:
        seconds, resident = series[-1]
        if len(series) % 60 == 1:
            print(
                f"soak: {seconds / 60:.0f} of {self.minutes:g} minutes:"
                f" {resident / 2**20:.0f} MiB resident",
                flush=True,
            )


def _needed(package: tuple[Path, int]) -> int:
    path, cut = package
    return needs_of(validated(path), cut, ENCODING).peak_bytes(1)


def _resident(pid: int) -> int:
    try:
        return status_bytes("VmRSS", str(pid))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ValueError(
            f"the worker (process {pid}) is gone; its error output stands"
            " above"
        ) from error


def other_bytes(
    packages: Sequence[Path], shard_bytes: int, streams: int
) -> dict[str, int]:
    """What a worker may have beside models and forward passes, at most.

    Args:
        packages: files.
        shard_bytes: of one job's body.
        streams: at a time.
    """
    largest = max(package.stat().st_size for package in packages)
    decoded = SHARD_SAMPLES * max(
        4 * math.prod(loaded(package).input_shape) for package in packages
    )
    return {
        "uploads": COPIES * UPLOADS * largest,
        "streams": COPIES * streams * (shard_bytes + decoded),
        "libraries": LIBRARIES_BYTES,
    }


def judge(
    done: Sequence[Mapping[str, Any]],
    series: Series,
    parts: Mapping[str, int],
) -> dict[str, Any]:
    """What clients and samples say; see benchmarks/memory.py.

    Args:
        done: of each client.
        series: seconds and bytes.
        parts: of the limit, in bytes.
    """
    limit = sum(parts.values())
    peak = max(size for _, size in series)
    second, last = (_median(_part(series, number)) for number in (1, 4))
    slope, low, high = slope_of(series)
    unfinished = sum(each["unfinished"] for each in done)
    growth = last / second - 1
    longest = max(each["longest_seconds"] for each in done)
    return {
        "memory_limit_bytes": parts["memory_limit"],
        "limit_bytes": limit,
        "parts": dict(parts),
        "peak_bytes": peak,
        "second_fifth_bytes": second,
        "last_fifth_bytes": last,
        "growth": growth,
        "slope_bytes_per_hour": slope,
        "slope_interval": (low, high),
        **{
            key: sum(each[key] for each in done)
            for key in ("refused", "uploads", "shards")
        },
        "samples": sum(each["progress"][-1][1] for each in done),
        "unfinished": unfinished,
        "longest_seconds": longest,
        "goal": {
            "growth": MAX_GROWTH,
            "longest_seconds": MAX_SECONDS,
            "unfinished": 0,
        },
        "met": peak <= limit
        and growth <= MAX_GROWTH
        and longest <= MAX_SECONDS
        and not unfinished,
        "series": thinned(series, NUM_POINTS),
    }


def _part(series: Series, number: int) -> Series:
    """One fifth of it, 0 to 4."""
    count = len(series)
    return series[count * number // 5 : max(count * (number + 1) // 5, 1)]


def _median(series: Series) -> float:
    return statistics.median(size for _, size in series)


def slope_of(series: Series) -> tuple[float, float, float]:
    """Bytes per hour after the first fifth, and their 95 % interval.

    Theil-Sen over medians of blocks, since samples that follow each other say
    much the same.
    """
    later = series[len(series) // 5 :]
    size = -(-len(later) // NUM_BLOCKS)
    blocks = [later[at : at + size] for at in range(0, len(later), size)]
    found = theilslopes(
        [_median(block) for block in blocks],
        [statistics.median(when for when, _ in b) / 3600 for b in blocks],
    )
    return float(found[0]), float(found[2]), float(found[3])


def thinned(series: Series, most: int) -> list[tuple[float, float]]:
    """Some of it, evenly, the first included."""
    step = -(-len(series) // most)
    return [(round(when, 1), size) for when, size in series[::step]]


def report(entry: Mapping[str, Any]) -> str:
    """What matters of the entry."""
    low, high = (each / 2**20 for each in entry["slope_interval"])
    return (
        f"soak: {entry['shards']} shards, {entry['refused']} refusals,"
        f" {entry['uploads']} uploads, {entry['unfinished']} unfinished, at"
        f" most {entry['longest_seconds']:.0f} s for one (goal"
        f" {entry['goal']['longest_seconds']:.0f})\n"
        f"resident: at most {entry['peak_bytes'] / 2**20:.0f} MiB, limit"
        f" {entry['limit_bytes'] / 2**20:.0f}; growth {entry['growth']:.1%}"
        f" (goal at most {entry['goal']['growth']:.0%}), slope"
        f" {entry['slope_bytes_per_hour'] / 2**20:.1f} MiB/h ({low:.1f} to"
        f" {high:.1f}); {'met' if entry['met'] else 'missed'}"
    )
