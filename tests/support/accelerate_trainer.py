"""Trains with accelerate, and looks at all samples; the main process saves
the losses, and the labels that were seen."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from equal_training import EPOCHS, RATE, job_of
from hapi_client import Connection


def main(result: Path) -> None:
    accelerator = Accelerator(cpu=True)
    train(accelerator, result)
    # As in rank_trainer: DDP's objects end before the process group.
    accelerator.free_memory()
    accelerator.end_training()


def train(accelerator: Accelerator, result: Path) -> None:
    with (
        Connection() as connection,
        job_of(connection, "freeze", device=accelerator.device) as job,
    ):
        tail, optimizer = accelerator.prepare(
            job.tail,
            torch.optim.SGD(job.tail.parameters(), lr=RATE, momentum=0.9),
        )
        losses = []
        data = accelerator.prepare(job.dataset())
        for epoch in range(EPOCHS):
            data.set_epoch(epoch)
            for features, labels in data:
                loss = torch.nn.functional.cross_entropy(
                    tail(features), labels
                )
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                mean = accelerator.reduce(loss.detach(), reduction="mean")
                losses.append(mean.item())
        seen = []
        samples = DataLoader(
            job.dataset(shuffle=False).samples(), batch_size=8
        )
        for _, labels in accelerator.prepare(samples):
            seen += accelerator.gather_for_metrics(labels).tolist()
        if accelerator.is_main_process:
            torch.save((losses, seen), result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
