"""The loop over virtual nodes in the words of Lightning, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hapi_client import FeatureDataset
from hapi_training import VirtualNodes


class Module(lightning.LightningModule):
    """Takes its batches itself: Lightning would fetch one ahead."""

    def __init__(
        self,
        nodes: VirtualNodes,
        tail: nn.Module,
        updates: torch.optim.Optimizer,
        losses: list[float],
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nodes, self.tail = nodes, tail
        self._updates, self._losses = updates, losses

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.set_epoch(self.current_epoch)

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:
        step, *_ = next(dataloader_iter)
        for features, labels in step:
            step.backward(cross_entropy(self.tail(features), labels))
        updates: Any = self.optimizers()
        updates.step()
        updates.zero_grad()
        self._losses.append(step.loss)
        self.log("loss", step.loss, batch_size=step.num_samples)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._updates


class Steps:
    """Gives Lightning the steps of an epoch."""

    def __init__(self, nodes: VirtualNodes, data: FeatureDataset) -> None:
        self._nodes, self._data = nodes, data

    def set_epoch(self, epoch: int) -> None:
        self._data.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return self._nodes.steps(self._data)


def fit(
    data: FeatureDataset,
    nodes: VirtualNodes,
    tail: nn.Module,
    updates: torch.optim.Optimizer,
    losses: list[float],
    epochs: int,
) -> None:
    """Trains with manual optimisation."""
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(nodes, tail, updates, losses), Steps(nodes, data))
