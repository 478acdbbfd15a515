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

import torch
import torch.distributed as dist

from hapi_training import VirtualNodes

SECONDS = 100


def run_ranks(
    num_ranks: int, function: Callable[[int], Any], threads: int = 1
) -> list[Any]:
    """Calls a function with each rank, in a process and a gloo group.

    Args:
        num_ranks: number of processes; one has no group.
        function: can be pickled.
        threads: torch's threads in each.

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
                    threads,
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
    threads: int,
    queue: Any,
) -> None:
    torch.set_num_threads(threads)
    try:
        if num_ranks > 1:
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
