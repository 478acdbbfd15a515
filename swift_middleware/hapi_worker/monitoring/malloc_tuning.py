"""Tuning of glibc's malloc: it keeps free memory while there is work.

By default glibc returns free memory to the kernel after each micro-batch, and
the next one takes tens of thousands of page faults: it maps large blocks one
by one, trims the end of its heap, and unmaps empty heaps of threads.  Here all
blocks share one heap that is not trimmed by malloc.  Its free memory,
including the holes that evicted models leave, is returned when the worker is
idle and once a minute.

torch aligns tensors, so malloc cuts some bytes off their blocks.  With caches
of small blocks these never rejoin them, and the next tensor of the size does
not fit there: a pass of ViT-B/16 took 3 times the memory of its tensors, and
1.5 times without caches, in the same time (glibc 2.36, 24 samples).
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

M_MXFAST = 1
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
M_ARENA_MAX = -8
"""Options of glibc's malloc.h; see mallopt(3)."""
TUNABLES = "GLIBC_TUNABLES"
"""The variable that glibc reads when a program starts, and only then."""
RESTARTED = "HAPI_WORKER_RESTARTED"
"""Variable by which a program knows that it has been started again."""
TRIM_THRESHOLD_BYTES = 512 << 20
"""Free memory at the end of the heap that malloc never returns itself: more
than the blocks of a micro-batch, so that :class:`HeapTrimmer` decides."""
TRIM_SECONDS = 60.0
"""Interval of trims while there is work."""


def keep_heap() -> bool:
    """Makes malloc keep free memory; returns True if this C library can.

    Call it before threads start: those keep their own heaps.
    """
    libc = ctypes.CDLL(None)
    options = {
        M_ARENA_MAX: 1,
        M_MXFAST: 0,
        M_MMAP_MAX: 0,
        M_TRIM_THRESHOLD: TRIM_THRESHOLD_BYTES,
    }
    return hasattr(libc, "mallopt") and all(
        libc.mallopt(*option) for option in options.items()
    )


def restart_without_thread_caches() -> None:
    """Starts this program again, in its process, if malloc has caches."""
    tunables = os.environ.get(TUNABLES, "")
    # glibc removes the variable for programs with capabilities of their own.
    is_done = "tcache" in tunables or RESTARTED in os.environ
    if hasattr(ctypes.CDLL(None), "mallopt") and not is_done:
        values = ("glibc.malloc.tcache_count=0", tunables)
        os.environ[TUNABLES] = ":".join(filter(None, values))
        os.environ[RESTARTED] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def trim_heap() -> None:
    """Returns free memory to the kernel, if this C library can."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@dataclass
class HeapTrimmer:
    """Trims the heap when a worker becomes idle, and once a minute.

    Args:
        is_busy: returns True if there is work.
        trim: returns free memory to the kernel.
        clock: monotonic seconds.
    """

    is_busy: Callable[[], bool]
    trim: Callable[[], None] = trim_heap
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._trimmed = self.clock()
        self._was_busy = False

    def check(self) -> None:
        """Trims if work has ended since the last check, or lasts long."""
        busy, now = self.is_busy(), self.clock()
        is_late = now - self._trimmed >= TRIM_SECONDS
        if self._was_busy and (is_late or not busy):
            self.trim()
            self._trimmed = now
        self._was_busy = busy
