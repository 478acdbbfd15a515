"""Ranks of torch.distributed as processes that start at once."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hapi_training import VirtualNodes
from hapi_training.store import RENDEZVOUS_VARIABLE
from waiting import SECONDS


def run_workers(num_workers: int, function: Callable[[int], Any]) -> list[Any]:
    """Calls a function in workers of a rendezvous, which join one by one."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RENDEZVOUS_VARIABLE, f"127.0.0.1:{store.port}")
        return run_ranks(num_workers, function)


def run_ranks(num_ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Calls a function with each rank, in a process and a gloo group.

    Args:
        num_ranks: number of processes; one has no group.
        function: can be pickled.

    Returns:
        The results of all ranks, or the exception of each that failed.
    """
    # Forks of a server that has imported all, but has not used its threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([VirtualNodes.__module__])
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        children = [
            context.Process(
                target=_run,
                args=(
                    rank,
                    num_ranks,
                    Path(folder) / "store",
                    function,
                    os.environ.get(RENDEZVOUS_VARIABLE),
                    queue,
                ),
            )
            for rank in range(num_ranks)
        ]
        for child in children:
            child.start()
        results = dict(queue.get() for _ in children)
        for child in children:
            child.join(SECONDS)
            assert child.exitcode == 0
    return [results[rank] for rank in range(num_ranks)]


def _run(
    rank: int,
    num_ranks: int,
    store: Path,
    function: Callable[[int], Any],
    rendezvous: str | None,
    queue: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        if rendezvous:
            # The server of forks has the variables of its start.
            os.environ[RENDEZVOUS_VARIABLE] = rendezvous
        elif num_ranks > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), num_ranks),
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=SECONDS),
            )
            # One that ended before would leave others connecting to it.
            dist.barrier()
        result = function(rank)
    except BaseException as error:
        traceback.print_exc()
        result = error
    queue.put((rank, result))
    # Without waiting for gloo's threads: others may have failed.
    os._exit(0)
