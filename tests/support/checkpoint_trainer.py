"""Trains with virtual nodes and a checkpoint at each step, for tests.

    python checkpoint_trainer.py RESULT STEPS OPTIONS

``OPTIONS`` is JSON: arguments of ``CheckpointManager``, ``seconds`` that a
step takes at least, ``restores``, false to begin with what others have, and
``steps_after``, a file and a number of steps after which it ends when there
is the file, and ``queue``, arguments of ``DeviceQueue``.  Prints the step at
which it begins, each step, and that of the last whole checkpoint; ``RESULT``
gets the digest of the run and the counters.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hapi_training import DeviceQueue, VirtualNodes
from hapi_training.checkpoints import folder, segments
from hapi_training.checkpoints.manager import CheckpointManager
from node_training import batches, digest, network, optimizer_of


def print_first(nodes: VirtualNodes, **facts: int) -> None:
    if nodes.is_first:
        print(json.dumps(facts), flush=True)


def main(
    result: Path,
    num_steps: int,
    *,
    seconds: float = 0.0,
    restores: bool = True,
    steps_after: tuple[str, int] | None = None,
    queue: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    # Files of 30 kB have several ranges and segments.
    folder.CORES_PER_WRITER = 0.1
    folder.MIN_RANGE_BYTES = segments.SEGMENT_BYTES = 4 << 10
    module = network()
    updates = optimizer_of(module, "adamw")
    nodes = VirtualNodes(
        module,
        8,
        queue=DeviceQueue(**queue) if queue else None,
        timeout_seconds=5.0 if queue else 30.0,
    )
    state: dict[str, Any] = {
        "module": module,
        "optimizer": updates,
        "nodes": nodes,
        "losses": [],
    }
    data = batches(num_steps)
    with CheckpointManager(state, **options) as checkpoints:
        if restores:
            checkpoints.restore()
        print_first(nodes, restored=nodes.step)
        for step in nodes.steps(data[nodes.step :], state):
            for images, labels in step:
                step.backward(cross_entropy(module(images), labels))
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad += 1e-4 * torch.randn_like(parameter)
            updates.step()
            updates.zero_grad()
            state["losses"].append(step.loss)
            checkpoints.save()
            # The one before is whole by now.
            print_first(
                nodes,
                whole=nodes.step - 1,
                step=nodes.step,
                workers=nodes._group.rank.world_size,
            )
            if steps_after and Path(steps_after[0]).exists():
                num_steps = min(num_steps, nodes.step + steps_after[1])
                if nodes.step == num_steps:
                    break
            time.sleep(seconds)
    facts = {
        "digest": digest(
            module.state_dict(), updates.state_dict(), state["losses"]
        ),
        "step": nodes.step,
        "stats": asdict(checkpoints.stats),
    }
    if nodes.is_first:
        result.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3]))
