"""Trains with virtual nodes, alone or under torchrun, for tests.

    python node_ranks.py RESULT RUNS

``RUNS`` is JSON: options of :func:`train` for each run.  Rank 0 writes the
result of each run to ``RESULT``, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from hapi_client import (
    Augmentation,
    CacheConfig,
    FeatureDataset,
    split_model,
)
from hapi_client.caching.pool import POOL
from hapi_training import VirtualNodes
from hapi_training.virtual_nodes.assignment import divided
from networks import small_transform
from node_training import digest, optimizer_of

DATA = "swift://nodes/train"
BATCH = 24
EPOCHS = 3


class Network(nn.Module):
    """Batch norm and dropout behind a frozen body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.Hardswish(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=16),
            nn.Conv2d(32, 32, 1),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 300),
        )
        self.hidden = nn.Linear(300, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(32, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.hidden(self.body(images))))
        return self.head(self.drop(hidden))


def train(
    *,
    cut: str | int = "freeze",
    optimizer: str = "sgd",
    num_nodes: int = 8,
    counts: list[int] | None = None,
    memory_bytes: int | None = 0,
    directory: str | None = None,
    augment: bool = False,
    threads: int = 1,
    restart_at: int | None = None,
    forget_at: int | None = None,
    tool: str | None = None,
) -> dict[str, Any]:
    """Trains some epochs; returns digests and counters.

    Args:
        cut: cut of the features.
        optimizer: ``sgd`` or ``adamw``.
        num_nodes: number of virtual nodes.
        counts: nodes of each rank, other than even ones.
        memory_bytes: of the cache in memory.
        directory: of the cache on disk.
        augment: crop and flip images at random.
        threads: torch's threads.
        restart_at: step after which a new job goes on.
        forget_at: epoch before which the caches are lost.
        tool: ``lightning`` or ``accelerate``, which runs the loop.
    """
    POOL.clear()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    frozen, tail = split_model(
        Network(),
        "body",
        transform=small_transform(),
        augment=Augmentation() if augment else None,
        augment_period_epochs=2 if augment else None,
    )
    updates = optimizer_of(tail, optimizer)
    saved: dict[str, Any] | None = None
    losses: list[float] = []
    stats: dict[str, int] = {"local_hits": 0, "fallbacks": 0}
    while True:
        data = FeatureDataset(
            DATA,
            frozen,
            batch_size=BATCH,
            cut=cut,
            cache=CacheConfig(memory_bytes=memory_bytes, directory=directory),
        )
        nodes = VirtualNodes(tail, num_nodes)
        if counts:
            nodes._group.assign(divided(num_nodes, counts))
        if saved:
            data.load_state_dict(saved["data"])
            nodes.load_state_dict(saved["nodes"])
        with data:
            if tool == "lightning":
                from node_lightning import fit

                fit(data, nodes, tail, updates, losses, EPOCHS)
                done = True
            else:
                if tool == "accelerate":
                    from accelerate import Accelerator

                    updates = Accelerator(cpu=True).prepare(updates)
                done = _run(
                    data, nodes, tail, updates, losses, restart_at, forget_at
                )
            saved = {"data": data.state_dict(), "nodes": nodes.state_dict()}
            stats["local_hits"] += data.stats.local_hits
            stats["fallbacks"] += data.stats.fallbacks
        if done:
            break
        restart_at = None
    return {
        "digest": digest(tail.state_dict(), updates.state_dict(), losses),
        "losses": losses,
        **{name: int(nodes.sum(count)) for name, count in stats.items()},
    }


def _run(
    data: FeatureDataset,
    nodes: VirtualNodes,
    tail: nn.Module,
    updates: torch.optim.Optimizer,
    losses: list[float],
    restart_at: int | None,
    forget_at: int | None,
) -> bool:
    for epoch in range(data.epoch, EPOCHS):
        data.set_epoch(epoch)
        if epoch == forget_at:
            POOL.clear()
        for step in nodes.steps(data):
            for features, labels in step:
                step.backward(cross_entropy(tail(features), labels))
            updates.step()
            updates.zero_grad()
            losses.append(step.loss)
            if restart_at is not None and len(losses) > restart_at:
                return False
    return True


def main(result: Path, runs: str) -> None:
    results = [train(**options) for options in json.loads(runs)]
    if not dist.is_initialized():
        result.write_text(json.dumps(results))
        return
    if dist.get_rank() == 0:
        result.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
