"""Saves and loads a model that ranks share, for tests.

    torchrun sharded_trainer.py PLACE ACTION [ACTION ...]

``ACTION`` is ``save``, ``thread`` or ``process`` (``dcp.async_save``),
``killed`` (one rank ends while it writes) or ``load``.  Each begins with
other parameters; the first rank prints a line with the digest of those it
ends with, and of the optimizer's state.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hapi_training import SwiftStorageReader, SwiftStorageWriter
from hapi_training.checkpoints import object_files
from node_training import digest


def main(place: str, actions: list[str]) -> None:
    dist.init_process_group("cpu:gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for action in actions:
        # With its optimizer 48 MiB, so that a rank has several segments.
        model = torch.nn.Sequential(
            torch.nn.Linear(1000, 4001), torch.nn.Linear(4001, 10)
        )
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 1000)).sum().backward()
        optimizer.step()
        act(action, place, model, optimizer)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_state_dict(model, optimizer, options=options)
        if not dist.get_rank():
            print(digest(*whole), flush=True)
    dist.barrier()
    # gloo's threads are not ended: on a busy machine it may abort.
    os._exit(0)


def act(
    action: str,
    place: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    tensors, values = get_state_dict(model, optimizer)
    state = {"model": tensors, "optimizer": values, "text": action}
    writer = SwiftStorageWriter(place)
    if action == "thread":
        dcp.async_save(state, storage_writer=writer).result()
    elif action == "process":
        # From torch 2.7.
        kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
        dcp.async_save(
            state, storage_writer=writer, async_checkpointer_type=kind
        ).result()
    elif action == "load":
        dcp.load(state, storage_reader=SwiftStorageReader(place))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=tensors,
            optim_state_dict=values,
        )
        assert state["text"] != "load"
    else:
        if action == "killed" and dist.get_rank():
            # When all segments are there.
            object_files.put_manifest = lambda *_: os._exit(1)
        dcp.save(state, storage_writer=writer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
