"""One thread on one core; imports nothing of HAPI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_core() -> Iterator[int]:
    """Keeps the calling thread, and torch, to one core; yields its number.

    Threads and processes that are started inside inherit it.
    """
    cores = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    core = max(cores)
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    try:
        yield core
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)
