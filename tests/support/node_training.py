"""Training with virtual nodes on batches from memory, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from hapi_training import PartialBackward, VirtualNodes

BATCH = 24
CLASSES = 5


class Net(nn.Module):
    """Has what makes bits depend on the division of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * 36, CLASSES)
        self.unused = nn.Linear(3, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


def network(kind: type[nn.Module] = Net) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return kind()


def batches(
    count: int = 4, last: int = BATCH, seed: int = 7
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of which the last may be short."""
    random = torch.Generator().manual_seed(seed)
    sizes = [BATCH] * (count - 1) + [last]
    return [
        (
            torch.randn((size, 3, 8, 8), generator=random),
            torch.randint(CLASSES, (size,), generator=random),
        )
        for size in sizes
    ]


def optimizer_of(module: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def digest(*values: Any) -> str:
    """SHA-256 of tensors and numbers in nested containers."""
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().flatten()
            sha.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for name, item in value.items():
                sha.update(str(name).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            sha.update(repr(value).encode())

    add(values)
    return sha.hexdigest()


def train(
    rank: int,
    num_nodes: int = 8,
    optimizer: str = "sgd",
    *,
    counts: Sequence[int] | None = None,
    data: Iterable[Any] | None = None,
    balance_at: int | None = None,
    module: nn.Module | None = None,
    partial: PartialBackward | None = None,
) -> str:
    """Trains an epoch; returns the digest of all that it computed.

    Args:
        rank: ignored.
        num_nodes: number of virtual nodes.
        optimizer: ``sgd`` or ``adamw``.
        counts: nodes of each rank, other than even ones.
        data: global batches.
        balance_at: step after which other nodes are given.
        module: the module.
        partial: of the nodes.
    """
    from hapi_training.virtual_nodes.assignment import divided

    module = module or network()
    updates = optimizer_of(module, optimizer)
    nodes = VirtualNodes(module, num_nodes, seed=1, partial=partial)
    if counts:
        nodes._group.assign(divided(num_nodes, counts))
    losses = []
    for number, step in enumerate(nodes.steps(data or batches(last=13))):
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        updates.step()
        updates.zero_grad()
        losses.append(step.loss)
        if number == balance_at:
            nodes._group.assign(
                divided(num_nodes, [num_nodes - 1, 1])
                if dist.get_rank() >= 0
                else ()
            )
    return digest(module.state_dict(), updates.state_dict(), losses)
