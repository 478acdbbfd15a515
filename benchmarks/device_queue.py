"""Jobs that share two cores by device queues, over one after another.

    python -m benchmarks.device_queue --json device_queue.json

Six jobs train the tail of ResNet-18 from layer4 on, each with two workers on
a core each and one virtual node for each worker, of which one goes through
all layers backwards and the other through the second half: the first takes
longer, and takes turns.  Each core is a device.

  gang  one job after another, the shortest first, each with both cores
  srtf  all at once, by ``hapi device-queue --policy srtf`` for each core
  fair  the same with ``--policy fair``

The makespan is the time from the start until the last job ends, of processes
that have taken their first step already.  Each job's weights must have the
same digest in all ways.  A share is the seconds of a job's turns until the
first job ends, over those of equal shares.

Keys of the JSON: ways (way, makespan, mean_jct: over those of gang; lowest
share), decision_ms_p99 (of the queues), equal (digests), goals.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.command_line import (
    add_rounds,
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.nodes import Tail
from benchmarks.ratios import ratio, rotated
from benchmarks.record import write_results
from hapi_training import DeviceQueue, PartialBackward, VirtualNodes
from hapi_training.device_queue import status_of

STEPS = (4, 5, 6, 7, 8, 9)
WORKERS, SAMPLES, ROUNDS = 2, 32, 3
GANG, SRTF, FAIR = WAYS = ("gang", "srtf", "fair")
MAX_MAKESPAN, MAX_DECISION_MS, MIN_SHARE = 0.92, 1.0, 0.5
START_SECONDS = 120


def worker(rank: int, number: int, folder: Path) -> None:
    """Trains in each way that it reads; prints the digest."""
    core = sorted(os.sched_getaffinity(0))[rank]
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / f"group{number}"), WORKERS),
        rank=rank,
        world_size=WORKERS,
    )
    torch.manual_seed(number)
    first, steps = Tail(), STEPS[number]
    batch = torch.randn(SAMPLES, 256, 14, 14), torch.randint(1000, (SAMPLES,))
    for way in iter(sys.stdin.readline, ""):
        tail = copy.deepcopy(first)
        updates = torch.optim.SGD(tail.parameters(), lr=0.01, momentum=0.9)
        way = way.strip()
        queue = None
        if way != GANG:
            path = folder / f"{way}{rank}"
            queue = DeviceQueue(path, name=f"job{number}", steps=1 + steps)
        nodes = VirtualNodes(
            tail, WORKERS, partial=PartialBackward(2), queue=queue
        )
        # The first step has a whole backward pass, which measures layers.
        for count in (1, steps):
            for step in nodes.steps([batch] * count):
                for features, labels in step:
                    step.backward(cross_entropy(tail(features), labels))
                updates.step()
                updates.zero_grad()
            if count == 1:
                print("ready", flush=True)
                sys.stdin.readline()
        weights = b"".join(
            p.detach().numpy().tobytes() for p in tail.parameters()
        )
        nodes.close()
        print(hashlib.sha256(weights).hexdigest(), flush=True)


class Job:
    """The two processes of a job."""

    def __init__(self, number: int, folder: Path) -> None:
        self._workers = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.device_queue"),
                    *("--worker", str(rank), str(number), str(folder)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for rank in range(WORKERS)
        ]

    def tell(self, line: str) -> None:
        for process in self._workers:
            assert process.stdin is not None, "is a pipe"
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

    def answer(self) -> str:
        """The line that both workers print."""
        lines = set()
        for process in self._workers:
            assert process.stdout is not None, "is a pipe"
            lines.add(process.stdout.readline().strip())
        if len(lines) > 1 or "" in lines:
            raise OSError(f"workers of a job have printed {lines}")
        return lines.pop()

    def end(self) -> None:
        for process in self._workers:
            with process:
                process.kill()


@contextmanager
def queue(folder: Path, way: str, rank: int) -> Iterator[Path]:
    """A queue's process, and its socket."""
    path = folder / f"{way}{rank}"
    command = ("-m", "hapi_client.cli.main", "device-queue", path)
    with subprocess.Popen(
        [sys.executable, *map(str, command), "--policy", way],
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not path.exists():
                if time.monotonic() > deadline or process.poll() is not None:
                    raise OSError("hapi device-queue does not start")
                time.sleep(0.1)
            yield path
        finally:
            process.terminate()


def measure(rounds: int, steps: Sequence[int]) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        queues = {
            way: [
                stack.enter_context(queue(folder, way, rank))
                for rank in range(WORKERS)
            ]
            for way in WAYS[1:]
        }
        jobs = [Job(number, folder) for number in range(len(steps))]
        for job in jobs:
            stack.callback(job.end)
        makespans: dict[str, list[float]] = {way: [] for way in WAYS}
        jcts: dict[str, list[float]] = {way: [] for way in WAYS}
        digests: dict[str, list[str]] = {}
        shares: list[float] = []
        for number in range(rounds):
            for way in rotated(list(WAYS), number):
                ends, found, share = run(jobs, way, queues.get(way, []))
                digests[way] = found
                makespans[way].append(max(ends))
                jcts[way].append(statistics.mean(ends))
                if way == FAIR:
                    shares.append(share)
        decisions = [
            status_of(path)["decision_ms_p99"]
            for paths in queues.values()
            for path in paths
        ]
    return {
        "ways": [
            {
                "way": way,
                "makespan": ratio(makespans[way], makespans[GANG]),
                "mean_jct": ratio(jcts[way], jcts[GANG]),
                "lowest_share": min(shares) if way == FAIR else None,
            }
            for way in WAYS
        ],
        "decision_ms_p99": max(decisions),
        "equal": len({tuple(found) for found in digests.values()}) == 1,
    }


def run(
    jobs: Sequence[Job], way: str, queues: Sequence[Path]
) -> tuple[list[float], list[str], float]:
    """Ends and digests of all jobs, and the lowest share of a core."""
    for job in jobs:
        job.tell(way)
    for job in jobs:
        if job.answer() != "ready":
            raise OSError("a worker is not ready")
    started = time.monotonic()
    ends, digests, share = [], [], 0.0
    if way != GANG:
        for job in jobs:
            job.tell("go")
    for number, job in enumerate(jobs):
        if way == GANG:
            job.tell("go")
        digests.append(job.answer())
        ends.append(time.monotonic() - started)
        if number == 0 and queues:
            seconds = [
                [j["turn_seconds"] for j in status_of(path)["jobs"]]
                for path in queues
            ]
            share = min(min(s) * len(s) / sum(s) for s in seconds)
    return ends, digests, share


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("device_queue", __doc__)
    add_rounds(parser, ROUNDS)
    parser.add_argument("--worker", nargs=3, help="internal")
    options = parse(parser, argv)
    if options.worker:
        rank, number, folder = options.worker
        worker(int(rank), int(number), Path(folder))
        return 0
    return exit_status("device_queue", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    results = measure(options.rounds, STEPS[:2] if options.quick else STEPS)
    print_table(
        "Six jobs, over one after another",
        ("way", "makespan", "mean time of a job", "lowest share"),
        [
            (
                row["way"],
                f"{row['makespan']['median']:.2f}",
                f"{row['mean_jct']['median']:.2f}",
                ""
                if row["lowest_share"] is None
                else f"{row['lowest_share']:.2f}",
            )
            for row in results["ways"]
        ],
    )
    _, srtf, fair = results["ways"]
    goals = {
        f"makespan by srtf at most {MAX_MAKESPAN} of gang": (
            srtf["makespan"]["median"] <= MAX_MAKESPAN
        ),
        "the digests of alone": results["equal"],
        f"99 % of decisions within {MAX_DECISION_MS:g} ms": (
            results["decision_ms_p99"] <= MAX_DECISION_MS
        ),
        f"each job at least {MIN_SHARE} of an equal share": (
            fair["lowest_share"] >= MIN_SHARE
        ),
    }
    print(f"decisions, 99th percentile: {results['decision_ms_p99']:.3f} ms")
    print_goals(goals)
    write_results(
        options.json,
        "device_queue",
        {"quick": options.quick, "rounds": options.rounds},
        {**results, "goals": goals},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
