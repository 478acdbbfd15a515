"""Partial backward passes: seconds that they save, and accuracy.

    python -m benchmarks.partial --json partial.json
    python -m benchmarks.partial --cifar DIR --json partial-accuracy.json

With 8 virtual nodes and one thread; K is the number of segments.

  speed     processor time of a step of the tail of ResNet-18 from layer2 on,
            on random features of images of 224 pixels, over that of a step
            with K segments; the bound is the same of floating-point
            operations.  Saved activations and bytes that four workers send
            are those with K segments over those without.  The control is a
            head of two layers, of which the first costs little.
  accuracy  on the test images of CIFAR-10: ResNet-18 learns five classes, and
            its tail from layer2 on the other five, with one learning rate.
            "all nodes" divides the sums of a segment by all nodes, as the
            author of SPB does, which lowers the rate of the first segments;
            else it is divided by those that train it.  At equal steps, and at
            equal seconds: those of the whole backward pass.

--cifar has cifar10-train-*.tar and cifar10-test-*.tar; with it the accuracy is
measured, and else the speed.

Keys of the JSON: speed (tail, segments, speed_up, bound, part_of_bound,
activations, wire) and goals; or accuracy (optimizer, segments, average,
seconds_per_step, equal_steps, equal_seconds: accuracy by seed, curves).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.command_line import (
    add_rounds,
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.micro.cifar import (
    MOMENTUM,
    NEW_CLASSES,
    OLD_CLASSES,
    TAIL_RATE,
    Examples,
    accuracy_of,
    examples_of,
    features_of,
    pretrained,
    with_new_head,
)
from benchmarks.nodes import bytes_sent, in_namespace, run_workers
from benchmarks.ratios import percents, ratio, rotated
from benchmarks.record import write_results
from hapi_training import PartialBackward, VirtualNodes

NODES, ROUNDS, SAMPLES, WORKERS = 8, 7, 32, 4
SEGMENTS = (2, 4)
MIN_PART_OF_BOUND = 0.9
PRETRAIN_EPOCHS, EPOCHS, SEEDS = 8, 10, 3
ADAMW_RATE = 1e-3
"""torch's default."""
Batch = tuple[torch.Tensor, torch.Tensor]


def divided(model: Any) -> tuple[nn.Module, nn.Module]:
    """ResNet-18 up to layer1, and from layer2 on."""
    stem = (model.conv1, model.bn1, model.relu, model.maxpool)
    last = (model.avgpool, nn.Flatten(), model.fc)
    frozen = nn.Sequential(*stem, model.layer1)
    tail = nn.Sequential(model.layer2, model.layer3, model.layer4, *last)
    return frozen.eval().requires_grad_(False), tail


def tail_of_resnet() -> nn.Module:
    return divided(torchvision.models.resnet18())[1]


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 1000))


TAILS = {
    "ResNet-18 from layer2": (tail_of_resnet, (SAMPLES, 64, 56, 56)),
    "head (control)": (head, (8 * SAMPLES, 512)),
}


def train_step(nodes: VirtualNodes, tail: nn.Module, batch: Batch) -> None:
    tail.zero_grad()
    for step in nodes.steps([batch]):
        for features, labels in step:
            step.backward(cross_entropy(tail(features), labels))


def nodes_of(tail: nn.Module, segments: int) -> VirtualNodes:
    partial = PartialBackward(segments) if segments > 1 else None
    return VirtualNodes(tail, NODES, partial=partial)


def measure_speed(rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for name, (make, shape) in TAILS.items():
        torch.manual_seed(0)
        tail = make()
        batch = torch.randn(shape), torch.randint(1000, shape[:1])
        kinds = {k: nodes_of(tail, k) for k in (1, *SEGMENTS)}
        if name != next(iter(TAILS)):
            del kinds[SEGMENTS[-1]]  # It has two layers.
        seconds: dict[int, list[float]] = {k: [] for k in kinds}
        for number in range(-2, rounds):  # The first two measure and warm up.
            for k in rotated(list(kinds), number):
                started = time.process_time()
                train_step(kinds[k], tail, batch)
                if number >= 0:
                    seconds[k].append(time.process_time() - started)
        operations, saved = {}, {}
        for k, nodes in kinds.items():
            with FlopCounterMode(display=False) as counter:
                train_step(nodes, tail, batch)
            operations[k] = counter.get_total_flops()
            saved[k] = saved_bytes(nodes, tail, batch)
        for k in [*kinds][1:]:
            bound = operations[1] / operations[k]
            speed_up = ratio(seconds[1], seconds[k])
            rows.append(
                {
                    "tail": name,
                    "segments": k,
                    "speed_up": speed_up,
                    "bound": bound,
                    "part_of_bound": speed_up["median"] / bound,
                    "activations": saved[k] / saved[1],
                    "wire": None
                    if quick or name != next(iter(TAILS))
                    else sent_bytes(k) / sent_bytes(1),
                }
            )
    return rows


def saved_bytes(nodes: VirtualNodes, tail: nn.Module, batch: Batch) -> int:
    """Bytes that autograd saves in a step, without weights, of all nodes."""
    weights = {p.untyped_storage().data_ptr() for p in tail.parameters()}
    sizes: dict[int, int] = {}
    total = 0

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        for step in nodes.steps([batch]):
            for features, labels in step:
                sizes.clear()
                loss = cross_entropy(tail(features), labels)
                total += sum(sizes.values())
                step.backward(loss)
    return total


def sent_bytes(segments: int) -> float:
    """Bytes that four workers send in a step."""
    (number,) = run_workers(
        WORKERS,
        ["--worker", str(segments)],
        in_namespace(),
        module="benchmarks.partial",
    )
    return number


def worker(segments: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tail = tail_of_resnet()
    batch = torch.randn(NODES, 64, 8, 8), torch.randint(1000, (NODES,))
    nodes = nodes_of(tail.eval(), segments)
    train_step(nodes, tail, batch)
    dist.barrier()
    before = bytes_sent()
    for _ in range(max(SEGMENTS)):
        train_step(nodes, tail, batch)
    dist.barrier()
    time.sleep(0.5)  # All ranks have read the counter by then.
    if dist.get_rank() == 0:
        print(json.dumps([(bytes_sent() - before) / max(SEGMENTS)]))
    dist.destroy_process_group()


def optimizer_of(tail: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(
            tail.parameters(), lr=TAIL_RATE, momentum=MOMENTUM
        )
    return torch.optim.AdamW(tail.parameters(), lr=ADAMW_RATE)


def curve(
    tail: nn.Module,
    data: Sequence[Examples],
    optimizer: str,
    segments: int,
    *,
    by_all: bool,
    epochs: int,
    seed: int,
) -> tuple[list[float], float]:
    """Trains; returns the accuracy by epoch, and seconds per step."""
    train, test = data
    updates = optimizer_of(tail, optimizer)
    nodes = nodes_of(tail, segments)
    generator = torch.Generator().manual_seed(seed)
    accuracies, seconds = [], []
    for _ in range(epochs):
        tail.train()
        batches = [(b.values, b.labels) for b in train.epoch(generator)]
        started = time.process_time()
        for step in nodes.steps(batches):
            for features, labels in step:
                step.backward(cross_entropy(tail(features), labels))
            if by_all:
                for name, segment in nodes._segments.table.items():
                    gradient = tail.get_parameter(name).grad
                    assert gradient is not None, "all segments are trained"
                    gradient.mul_((segment + 1) / segments)
            updates.step()
            updates.zero_grad()
        seconds.append((time.process_time() - started) / len(batches))
        accuracies.append(accuracy_of(tail, test))
    return accuracies, statistics.median(seconds)


def measure_accuracy(
    tars: Sequence[Path], *, quick: bool
) -> list[dict[str, Any]]:
    """Trains all tails of all seeds."""
    pretrain_epochs, epochs, seeds, most = (
        (1, 1, 1, 192) if quick else (PRETRAIN_EPOCHS, EPOCHS, SEEDS, None)
    )
    train, test = (examples_of(tars, name) for name in ("train", "test"))
    new = [data.only(NEW_CLASSES, most) for data in (train, test)]
    ways = [(1, False), *((k, a) for k in SEGMENTS for a in (False, True))]
    found: dict[tuple[str, int, bool], list[Any]] = {}
    for seed in range(seeds):
        old = train.only(OLD_CLASSES, most)
        model = with_new_head(pretrained(old, pretrain_epochs, seed), seed)
        frozen, tail = divided(model)
        features = [features_of(frozen, part) for part in new]
        for optimizer in ("SGD", "AdamW"):
            for k, by_all in ways:
                print(
                    f"seed {seed}: {optimizer}, {k} segments", file=sys.stderr
                )
                found.setdefault((optimizer, k, by_all), []).append(
                    curve(
                        copy.deepcopy(tail),
                        features,
                        optimizer,
                        k,
                        by_all=by_all,
                        # Enough for as many seconds as the whole pass takes.
                        epochs=epochs if k == 1 else -(-4 * epochs // 3),
                        seed=seed,
                    )
                )
    rows = []
    for (optimizer, k, by_all), curves in found.items():
        whole = statistics.median(s for _, s in found[optimizer, 1, False])
        seconds = statistics.median(s for _, s in curves)
        within = min(int(epochs * whole / seconds), len(curves[0][0]))
        rows.append(
            {
                "optimizer": optimizer,
                "segments": k,
                "average": "all nodes" if by_all else "contributors",
                "seconds_per_step": seconds / whole,
                "equal_steps": [c[epochs - 1] for c, _ in curves],
                "equal_seconds": [c[max(within, 1) - 1] for c, _ in curves],
                "curves": [c for c, _ in curves],
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("partial", __doc__)
    add_rounds(parser, ROUNDS)
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-10's tars")
    parser.add_argument("--worker", type=int, help="internal")
    options = parse(parser, argv)
    if options.worker:
        worker(options.worker)
        return 0
    return exit_status("partial", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    if options.cifar is None:
        report = _report_speed(options)
    else:
        report = _report_accuracy(options)
    write_results(
        options.json,
        "partial",
        {"quick": options.quick, "rounds": options.rounds},
        report,
    )
    return 0


def _report_speed(options: argparse.Namespace) -> dict[str, Any]:
    speed = measure_speed(options.rounds, quick=options.quick)
    print_table(
        "Step with K segments",
        ("tail", "K", "speed-up", "bound", "activations", "bytes sent"),
        [
            (
                *(row["tail"], str(row["segments"])),
                f"{row['speed_up']['median']:.2f}",
                f"{row['bound']:.2f}",
                f"{row['activations']:.2f}",
                "" if row["wire"] is None else f"{row['wire']:.2f}",
            )
            for row in speed
        ],
    )
    name = next(iter(TAILS))
    goals: dict[str, bool | None] = {
        f"{name}: at least {MIN_PART_OF_BOUND} of the bound": all(
            row["part_of_bound"] >= MIN_PART_OF_BOUND
            for row in speed
            if row["tail"] == name
        )
    }
    print_goals(goals)
    return {"speed": speed, "goals": goals}


def _report_accuracy(options: argparse.Namespace) -> dict[str, Any]:
    tars = sorted(options.cifar.glob("cifar10-*.tar"))
    accuracy = measure_accuracy(tars, quick=options.quick)
    print_table(
        "Accuracy in percent: mean and range of seeds",
        ("optimizer", "K", "divided by", "seconds", "steps", "time"),
        [
            (
                *(row["optimizer"], str(row["segments"]), row["average"]),
                f"{row['seconds_per_step']:.2f}",
                percents(row["equal_steps"]),
                percents(row["equal_seconds"]),
            )
            for row in accuracy
        ],
    )
    return {"accuracy": accuracy}


if __name__ == "__main__":
    sys.exit(main())
