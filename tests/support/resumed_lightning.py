"""The loop of ``resumed_trainer`` in the words of Lightning."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

from hapi_training.lightning import HapiCheckpointIO


class Module(lightning.LightningModule):
    def __init__(
        self, parts: Any, io: Any, check: Callable[[int, Any], None]
    ) -> None:
        super().__init__()
        self.tail, self._optimizer, _ = parts
        self._io, self._check = io, check
        self.losses: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.set_epoch(self.current_epoch)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if len(self.losses) == self.trainer.global_step > 0:
            self._check(len(self.losses), self._io)
        features, labels = batch
        loss = cross_entropy(self.tail(features), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = checkpoint["losses"]


def by_lightning(
    parts: Any, folder: str, remote: str, check: Callable[[int, Any], None]
) -> list[float]:
    io = HapiCheckpointIO(remote)
    module = Module(parts, io, check)
    saved = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        plugins=[io],
        callbacks=[io, saved],
    )
    newest = io.fetch_latest(folder)
    begins = 0 if newest is None else io.load_checkpoint(newest)["global_step"]
    print(json.dumps({"begins": begins}), flush=True)
    trainer.fit(module, parts[2], ckpt_path=newest)
    saves = len(module.losses) - begins if trainer.is_global_zero else 0
    assert io.stats.saved == saves
    return module.losses
