"""A worker of a rendezvous, of torchrun, or alone, for tests.

    python elastic_worker.py RESULT EPOCHS HURRY [STATE [late]]

Prints a line at each step, and writes the digest of the run to ``RESULT``.
Steps are slow until there is a file ``HURRY``.  ``STATE`` is a file that the
first worker writes every second step, and with which all begin; with ``late``
its position in the data is that of the step before, as a control.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hapi_client import FeatureDataset, split_model
from hapi_training import PartialBackward, VirtualNodes
from networks import small_transform
from node_ranks import BATCH, DATA, Network
from node_training import digest, optimizer_of

STEP_SECONDS = 0.4


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in state.items()
    }


def load_values(state: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(state[name], "load_state_dict"):
            state[name].load_state_dict(value)
        else:
            state[name] = value


def main(
    result: Path,
    epochs: int,
    hurry: Path,
    file: Path | None = None,
    *,
    late: bool = False,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    frozen, tail = split_model(Network(), "body", transform=small_transform())
    updates = optimizer_of(tail, "adamw")
    nodes = VirtualNodes(
        tail, 8, partial=PartialBackward(2), timeout_seconds=10
    )
    schedule = torch.optim.lr_scheduler.StepLR(updates, 5, 0.9)
    state: dict[str, Any] = {
        "tail": tail,
        "optimizer": updates,
        "schedule": schedule,
        "losses": [],
    }
    with FeatureDataset(DATA, frozen, batch_size=BATCH, cut="stream") as data:
        own = {"nodes": nodes, "data": data}
        if file is not None and file.exists():
            content = torch.load(file, weights_only=True)
            load_values(state, content["state"])
            load_values(own, content["own"])
            torch.set_rng_state(content["random"])
        position = data.state_dict()
        for epoch in range(data.epoch, epochs):
            data.set_epoch(epoch)
            for step in nodes.steps(data, state):
                samples = {}
                for features, labels in step:
                    samples[step._node.node] = [
                        zlib.crc32(row.numpy()) for row in features
                    ]
                    step.backward(cross_entropy(tail(features), labels))
                # Gradients of two steps, with noise: a worker that joins gets
                # gradients and random numbers, too.
                if nodes.step % 2:
                    for parameter in tail.parameters():
                        parameter.grad += 1e-4 * torch.randn_like(parameter)
                    updates.step()
                    updates.zero_grad()
                state["losses"].append(step.loss)
                # At an epoch's end the schedule is a step behind.
                following = data.state_dict()
                is_due = nodes.step % 2 and following["epoch"] == epoch
                if file is not None and nodes.is_first and is_due:
                    content = {
                        "state": values_of(state),
                        "own": values_of(own),
                        "random": torch.get_rng_state(),
                    }
                    if late:
                        content["own"]["data"] = position
                    torch.save(content, file.with_suffix(".new"))
                    file.with_suffix(".new").replace(file)
                position = following
                print(
                    json.dumps(
                        {
                            "step": nodes.step,
                            "epoch": epoch,
                            "samples": samples,
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
    }
    result.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        Path(sys.argv[4]) if len(sys.argv) > 4 else None,
        late=sys.argv[5:] == ["late"],
    )
