"""Trains two epochs, with a checkpoint behind each step; may be killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from hapi_client import ReadConfig
from jobs import small_job

EPOCHS = 2


def main(data: str, folder: Path) -> None:
    """Prints each step's number and loss before its checkpoint."""
    folder.mkdir(exist_ok=True)
    checkpoint = folder / "last.pt"
    torch.manual_seed(0)
    with small_job(
        data,
        batch_size=8,
        cut="freeze",
        read=ReadConfig(num_threads=2),
    ) as job:
        optimizer = torch.optim.SGD(job.tail.parameters(), lr=0.1)
        number = 0
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            job.tail.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            job.load_state_dict(saved["data"])
            number = saved["number"]
        for epoch in range(job.epoch, EPOCHS):
            for features, labels in job.pipeline.loader(epoch):
                loss = torch.nn.functional.cross_entropy(
                    job.tail(features), labels
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                number += 1
                print(number, f"{loss.item():.5f}", flush=True)
                saved = {
                    "model": job.tail.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "data": job.state_dict(),
                    "number": number,
                }
                torch.save(saved, folder / "next.pt")
                os.replace(folder / "next.pt", checkpoint)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
