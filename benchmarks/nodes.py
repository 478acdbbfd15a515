"""Cost of virtual nodes, and what balancing them gains.

    python -m benchmarks.nodes --json nodes.json

The tail is ResNet-18's from layer4 on (8.4 million parameters), on random
features, with one thread.

  seconds      processor time of a step with 8 nodes of 8 samples, over that
               of stock accumulation of the same micro-batches, and over that
               of one batch of 64; on some sizes of features
  wire         bytes that a worker sends in the exchange of a step, over those
               of a ring all-reduce of the same gradients, from the counters of
               a network namespace; the control gathers all partial sums
  activations  bytes that autograd saves at a time, without weights, with 8
               nodes over those with one
  balance      seconds of a step of two workers, one of which shares its core
               with another process, with four nodes each, over those with the
               nodes that balance() gives

Keys of the JSON: seconds (features, over_accumulation, over_batch), wire
(workers, ratio, control), activations (ratio), balance (ratio, expected),
goals.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.command_line import (
    add_rounds,
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.ratios import ratio, rotated
from benchmarks.record import write_results
from hapi_training import VirtualNodes
from hapi_training.virtual_nodes.assignment import even

BATCH, NODES, ROUNDS = 64, 8, 7
SIZES = (10, 14, 4)
"""Widths of features: ResNet-18's after layer3 of images of 160, 224 and 64
pixels."""
WORKERS = (2, 4)
MAX_OVER_ACCUMULATION, MAX_WIRE, MAX_ACTIVATIONS = 1.10, 1.02, 0.2
MIN_BALANCE = 1.25
BALANCE_SIZE = 14
BALANCE_STEPS = 4
"""Steps that are timed together, with each map of nodes."""
LOOPBACK = Path("/proc/self/net/dev")
"""Counters of this process's namespace, unlike those of /sys."""


class Tail(nn.Module):
    """ResNet-18 from layer4 on."""

    def __init__(self) -> None:
        super().__init__()
        model = torchvision.models.resnet18()
        self.layers = nn.Sequential(
            model.layer4, model.avgpool, nn.Flatten(), model.fc
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(features)
        return scores


Batch = tuple[torch.Tensor, torch.Tensor]


def batch_of(size: int) -> Batch:
    return torch.randn(BATCH, 256, size, size), torch.randint(1000, (BATCH,))


def with_nodes(nodes: VirtualNodes, tail: Tail, batch: Batch) -> None:
    for step in nodes.steps([batch]):
        for features, labels in step:
            step.backward(cross_entropy(tail(features), labels))


def accumulated(tail: Tail, batch: Batch, num_parts: int) -> None:
    features, labels = batch
    for part in range(num_parts):
        loss = cross_entropy(
            tail(features[part::num_parts]), labels[part::num_parts]
        )
        (loss / num_parts).backward()


def measure_seconds(size: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    tail, batch = Tail(), batch_of(size)
    nodes = VirtualNodes(tail, NODES)
    contenders: dict[str, Callable[[], None]] = {
        "nodes": lambda: with_nodes(nodes, tail, batch),
        "accumulation": lambda: accumulated(tail, batch, NODES),
        "batch": lambda: accumulated(tail, batch, 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, rounds):
        for name in rotated(list(contenders), number):
            tail.zero_grad()
            started = time.process_time()
            contenders[name]()
            if number >= 0:  # The first round warms up.
                seconds[name].append(time.process_time() - started)
    return {
        "features": f"256x{size}x{size}",
        "over_accumulation": ratio(seconds["nodes"], seconds["accumulation"]),
        "over_batch": ratio(seconds["nodes"], seconds["batch"]),
    }


def measure_activations() -> float:
    """Most bytes saved at a time with 8 nodes over those with one."""
    tail, batch = Tail(), batch_of(SIZES[0])
    weights = {p.untyped_storage().data_ptr() for p in tail.parameters()}
    most = []
    for num_nodes in (1, NODES):
        alive: dict[int, int] = {}

        def save(tensor: torch.Tensor, alive: Any = alive) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                alive[storage.data_ptr()] = storage.nbytes()
            return tensor

        nodes, peak = VirtualNodes(tail, num_nodes), 0
        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            for step in nodes.steps([batch]):
                for features, labels in step:
                    alive.clear()
                    loss = cross_entropy(tail(features), labels)
                    peak = max(peak, sum(alive.values()))
                    step.backward(loss)
        most.append(peak)
    return most[1] / most[0]


def measure_wire(num_workers: int) -> dict[str, float]:
    """Starts workers in a network namespace, whose bytes it counts."""
    ring, ours, control = run_workers(
        num_workers, ["--worker", "wire"], in_namespace()
    )
    return {
        "workers": num_workers,
        "ratio": ours / ring,
        "control": control / ring,
    }


def in_namespace() -> list[str]:
    """Begin of a command line that runs in a network namespace."""
    return [
        *("unshare", "--net", "--map-root-user", "sh", "-c"),
        'ip link set lo up && exec "$@"',
        "sh",
    ]


def run_workers(
    num_workers: int,
    what: Sequence[str],
    before: Sequence[str] = (),
    module: str = "benchmarks.nodes",
) -> list[float]:
    """Returns the numbers that the workers of torchrun print."""
    done = subprocess.run(
        [
            *before,
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={num_workers}", "-m", module, *what),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    if done.returncode:
        raise OSError(f"workers failed: {done.stderr[-2000:]}")
    numbers: list[float] = json.loads(done.stdout)
    return numbers


def measure_balance(rounds: int, size: int) -> dict[str, Any]:
    """Two workers on a core each; another process runs on the second."""
    numbers = run_workers(
        2,
        ["--worker", "balance", *f"--rounds {rounds} --size {size}".split()],
    )
    return {
        "ratio": ratio(numbers[::3], numbers[1::3]),
        "expected": statistics.median(numbers[2::3]),
    }


def bytes_sent() -> int:
    """Bytes that have left by the loopback device."""
    (line,) = (x for x in LOOPBACK.read_text().splitlines() if "lo:" in x)
    return int(line.partition(":")[2].split()[8])


def wire_worker() -> list[float]:
    """Returns the bytes of an all-reduce, of a step and of the control."""
    tail, batch = Tail().eval(), batch_of(SIZES[-1])
    nodes = VirtualNodes(tail, NODES)
    flat = torch.cat([p.detach().reshape(-1) for p in tail.parameters()])
    gathered = flat.new_empty(dist.get_world_size() * len(flat))

    def sent(run: Callable[[], Any]) -> int:
        dist.barrier()
        before = bytes_sent()
        for _ in range(3):
            run()
        dist.barrier()
        time.sleep(0.5)  # All ranks have read the counter by then.
        return bytes_sent() - before

    with_nodes(nodes, tail, batch)
    return [
        sent(lambda: dist.all_reduce(flat)),
        sent(lambda: with_nodes(nodes, tail, batch)),
        sent(lambda: dist.all_gather_into_tensor(gathered, flat)),
    ]


def balance_worker(rounds: int, size: int) -> list[float]:
    """Returns seconds with equal and balanced nodes, and the expected gain.

    One after the other for each round.
    """
    tail, batch = Tail(), batch_of(size)
    nodes = VirtualNodes(tail, NODES)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    core = sorted(os.sched_getaffinity(0))[rank]
    os.sched_setaffinity(0, {core})

    def seconds() -> float:
        dist.barrier()
        started = time.monotonic()
        for _ in range(BALANCE_STEPS):
            with_nodes(nodes, tail, batch)
        return time.monotonic() - started

    with_nodes(nodes, tail, batch)
    numbers = []
    # On the core of the worker that starts it.
    busy = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(busy) if rank else nullcontext() as process:
        for _ in range(rounds):
            nodes._group.assign(even(NODES, num_ranks))
            equal = seconds()
            gain = nodes.balance()
            numbers += [equal, seconds(), gain]
        if process is not None:
            process.kill()
    return numbers


def worker(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers = (
        wire_worker()
        if options.worker == "wire"
        else balance_worker(options.rounds, options.size)
    )
    if dist.get_rank() == 0:
        print(json.dumps(numbers))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("nodes", __doc__)
    add_rounds(parser, ROUNDS)
    parser.add_argument("--worker", help="internal")
    parser.add_argument("--size", type=int, help="internal")
    options = parse(parser, argv)
    if options.worker:
        worker(options)
        return 0
    return exit_status("nodes", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    quick = options.quick
    sizes = SIZES[-1:] if quick else SIZES
    seconds = [measure_seconds(size, options.rounds) for size in sizes]
    wire = [
        measure_wire(count) for count in (WORKERS[:1] if quick else WORKERS)
    ]
    activations = measure_activations()
    balance = measure_balance(
        options.rounds, SIZES[-1] if quick else BALANCE_SIZE
    )
    goals = {
        f"seconds at most {MAX_OVER_ACCUMULATION} of accumulation": all(
            row["over_accumulation"]["median"] <= MAX_OVER_ACCUMULATION
            for row in seconds
        ),
        f"bytes at most {MAX_WIRE} of a ring all-reduce": all(
            row["ratio"] <= MAX_WIRE for row in wire
        ),
        f"saved activations at most {MAX_ACTIVATIONS}": (
            activations <= MAX_ACTIVATIONS
        ),
        f"balanced nodes at least {MIN_BALANCE} times as fast": (
            balance["ratio"]["median"] >= MIN_BALANCE
        ),
    }
    print_table(
        "Processor time of a step with 8 nodes of 8 samples",
        ("features", "over accumulation", "over one batch of 64"),
        [
            (
                row["features"],
                f"{row['over_accumulation']['median']:.3f}",
                f"{row['over_batch']['median']:.3f}",
            )
            for row in seconds
        ],
    )
    print_table(
        "Bytes sent, over those of a ring all-reduce",
        ("workers", "nodes", "all partial sums (control)"),
        [
            (
                str(row["workers"]),
                f"{row['ratio']:.3f}",
                f"{row['control']:.3f}",
            )
            for row in wire
        ],
    )
    print(f"saved activations with 8 nodes over one: {activations:.3f}")
    print(
        "speed-up by balance() with a worker on half a core: "
        f"{balance['ratio']['median']:.2f}, expected {balance['expected']:.2f}"
    )
    print_goals(goals)
    write_results(
        options.json,
        "nodes",
        {"quick": quick, "rounds": options.rounds},
        {
            "seconds": seconds,
            "wire": wire,
            "activations": {"ratio": activations},
            "balance": balance,
            "goals": goals,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
