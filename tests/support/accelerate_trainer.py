"""Trains with accelerate, and evaluates all samples in two ways; the main
process saves the losses, and the labels that each way has seen."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from equal_training import EPOCHS, RATE, job_of
from hapi_client import Connection
from hapi_client.integrations.accelerate import FeatureDataLoader


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
        data = job.dataset(shuffle=False)
        loader, batches, samples = accelerator.prepare(
            FeatureDataLoader(job.dataset()),
            FeatureDataLoader(data),
            DataLoader(data.samples(), batch_size=8),
        )
        with accelerator.join_uneven_inputs([tail], even_batches=False):
            for _ in range(EPOCHS):
                for features, labels in loader:
                    with accelerator.accumulate(tail):
                        loss = cross_entropy(tail(features), labels)
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                    losses.append(loss.item())
        losses = accelerator.reduce(torch.tensor(losses), "mean").tolist()
        seen: list[list[int]] = [[], []]
        for _, labels in batches:
            gathered = accelerator.gather_for_metrics(
                labels, use_gather_object=True
            )
            seen[0] += map(int, gathered)
        for _, labels in samples:
            seen[1] += accelerator.gather_for_metrics(labels).tolist()
        if accelerator.is_main_process:
            torch.save((losses, seen), result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
