"""A worker of a rendezvous, or alone, for tests.

    python elastic_worker.py RESULT EPOCHS HURRY

Prints a line at each step, and writes the digest of the run to ``RESULT``.
Steps are slow until there is a file ``HURRY``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from hapi_client import FeatureDataset, split_model
from hapi_training import VirtualNodes
from networks import small_transform
from node_ranks import BATCH, DATA, Network
from node_training import digest, optimizer_of

STEP_SECONDS = 0.4


def main(result: Path, epochs: int, hurry: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    frozen, tail = split_model(Network(), "body", transform=small_transform())
    updates = optimizer_of(tail, "adamw")
    nodes = VirtualNodes(tail, 8, timeout_seconds=10)
    schedule = torch.optim.lr_scheduler.StepLR(updates, 5, 0.9)
    state = {
        "tail": tail,
        "optimizer": updates,
        "schedule": schedule,
        "losses": [],
    }
    begun = 0
    with FeatureDataset(DATA, frozen, batch_size=BATCH, cut="stream") as data:
        for epoch in range(epochs):
            data.set_epoch(epoch)
            for step in nodes.steps(data, state):
                for features, labels in step:
                    begun += 1
                    step.backward(cross_entropy(tail(features), labels))
                    step.add(len(labels))
                # Gradients of two steps, with noise: a worker that joins gets
                # gradients and random numbers, too.
                if nodes.step % 2:
                    for parameter in tail.parameters():
                        parameter.grad += 1e-4 * torch.randn_like(parameter)
                    updates.step()
                    updates.zero_grad()
                state["losses"].append(step.loss)
                print(
                    json.dumps(
                        {
                            "step": nodes.step,
                            "epoch": epoch,
                            "samples": step.added,
                            "size": len(nodes.mine),
                            "time": time.time(),
                        }
                    ),
                    flush=True,
                )
                if not hurry.exists():
                    time.sleep(STEP_SECONDS)
            schedule.step()
    facts = {
        "digest": digest(
            tail.state_dict(), updates.state_dict(), state["losses"]
        ),
        "losses": state["losses"],
        "begun": begun,
    }
    result.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
