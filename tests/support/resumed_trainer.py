"""Trains in one of three ways, saves each step, and goes on, for tests.

    python resumed_trainer.py WAY FOLDER REMOTE [STEP]

``WAY`` is ``plain``, ``accelerate`` or ``lightning``.  With ``STEP`` the
process kills itself after that step; the one before is in Swift then.
Prints the step at which it begins, and the losses and a digest of the
weights at the end.  Under torchrun each rank of ``plain`` and ``lightning``
has its part of the data, and prints its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from equal_training import job_of
from hapi_client import Connection, FeatureDataset
from hapi_training import CheckpointManager
from node_training import digest

EPOCHS = 2
DATA = {"train": "swift://frameworks/train"}
Parts: TypeAlias = tuple[
    torch.nn.Module, torch.optim.Optimizer, FeatureDataset
]


class Checks:
    """Kills the process after a step."""

    def __init__(self, last: int | None) -> None:
        self._last = last

    def __call__(self, step: int, checkpoints: Any) -> None:
        if self._last is not None and step == self._last - 1:
            checkpoints.wait()
        if step == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def print_json(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def in_a_loop(
    parts: Parts, folder: str, remote: str, check: Checks, backward: Any
) -> list[float]:
    tail, optimizer, data = parts
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        tail = DistributedDataParallel(tail)
    state: dict[str, Any] = {
        "tail": tail,
        "optimizer": optimizer,
        "data": data,
        "losses": [],
    }
    with CheckpointManager(state, local=folder, remote=remote) as checkpoints:
        checkpoints.restore()
        print_json(begins=len(state["losses"]))
        for epoch in range(data.epoch, EPOCHS):
            data.set_epoch(epoch)
            for features, labels in data:
                loss = cross_entropy(tail(features), labels)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
                state["losses"].append(loss.item())
                checkpoints.save()
                check(len(state["losses"]), checkpoints)
    if dist.is_initialized():
        # A process that ends without may abort in gloo's threads.
        dist.destroy_process_group()
    losses: list[float] = state["losses"]
    return losses


def main(way: str, folder: str, remote: str, last: str | None = None) -> None:
    check = Checks(None if last is None else int(last))
    with (
        Connection() as connection,
        job_of(connection, "freeze", data=DATA) as job,
    ):
        optimizer = torch.optim.AdamW(job.tail.parameters())
        parts = job.tail, optimizer, job.dataset()
        if way == "lightning":
            # Seconds to import, as below.
            from resumed_lightning import by_lightning

            losses = by_lightning(parts, folder, remote, check)
        elif way == "accelerate":
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            prepared = *accelerator.prepare(*parts[:2]), parts[2]
            losses = in_a_loop(
                prepared, folder, remote, check, accelerator.backward
            )
        else:
            losses = in_a_loop(
                parts, folder, remote, check, torch.Tensor.backward
            )
        print_json(losses=losses, digest=digest(job.tail.state_dict()))


if __name__ == "__main__":
    main(*sys.argv[1:])
