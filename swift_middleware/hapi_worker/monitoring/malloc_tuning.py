"""Tuning of glibc's malloc: it keeps free memory while there is work.

By default glibc returns free memory to the kernel after each micro-batch, and
the next one takes tens of thousands of page faults: it maps large blocks one
by one, trims the end of its heap, and unmaps empty heaps of threads.  Here all
blocks share one heap that is not trimmed by malloc.  Its free memory,
including the holes that evicted models leave, is returned when the worker is
idle and once a minute.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
M_ARENA_MAX = -8
"""Options of glibc's malloc.h; see mallopt(3)."""
TRIM_THRESHOLD_BYTES = 512 << 20
CHECK_SECONDS = 2.0
"""Interval of the checks for an idle worker."""
TRIM_SECONDS = 60.0
"""Interval of trims while there is work."""

logger = logging.getLogger(__name__)


def keep_heap() -> bool:
    """Makes malloc keep free memory; returns True if this C library can.

    Call it before threads start: those keep their own heaps.
    """
    libc = _glibc()
    if libc is None:
        return False
    options = {
        M_ARENA_MAX: 1,
        M_MMAP_MAX: 0,
        M_TRIM_THRESHOLD: TRIM_THRESHOLD_BYTES,
    }
    return all(libc.mallopt(*option) for option in options.items())


def trim_heap() -> None:
    """Returns free memory to the kernel."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


class HeapTrimmer:
    """Trims the heap when a worker becomes idle, and once a minute.

    Args:
        is_busy: returns True if there is work.
        trim: returns free memory to the kernel.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        is_busy: Callable[[], bool],
        trim: Callable[[], None] = trim_heap,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_busy = is_busy
        self._trim = trim
        self._clock = clock
        self._trimmed = clock()
        self._was_busy = False
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="heap", daemon=True
        )

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Trims if work has ended since the last check, or lasts long."""
        busy, now = self._is_busy(), self._clock()
        if self._was_busy and not (
            busy and now - self._trimmed < TRIM_SECONDS
        ):
            self._trim()
            self._trimmed = now
        self._was_busy = busy

    def _watch(self) -> None:
        while not self._ended.wait(CHECK_SECONDS):
            self.check()


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    known = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
    return libc if known else None
