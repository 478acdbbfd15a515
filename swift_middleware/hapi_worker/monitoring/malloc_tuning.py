"""The C library's heap keeps its memory while there is work.

glibc gives memory back to the kernel whenever enough of it is free, which is
after each micro-batch: the next one then takes tens of thousands of page
faults.  It maps large blocks one by one, ends its heap where its last block
does, and gives threads heaps of 64 MB of which it returns each that is empty.
Here there is one heap that large blocks lie in too, and its end is returned
at rest and once a minute, together with the holes that models leave which
come and go.
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
"""Of glibc's malloc.h; mallopt(3)."""
KEPT_BYTES = 512 << 20
REST_SECONDS = 2.0
TRIM_SECONDS = 60.0
"""Between two times that it is trimmed while there is work."""

logger = logging.getLogger(__name__)


def keep_heap() -> bool:
    """Makes malloc keep free memory; whether this C library can.

    Threads that have allocated before keep heaps of their own.
    """
    libc = _glibc()
    if libc is None:
        return False
    options = {M_ARENA_MAX: 1, M_MMAP_MAX: 0, M_TRIM_THRESHOLD: KEPT_BYTES}
    return all(libc.mallopt(*option) for option in options.items())


def trim_heap() -> None:
    """Gives what is free back to the kernel."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


class RestingHeap:
    """Trims the heap when a worker comes to rest, and now and then.

    Args:
        is_busy: whether there is work.
        trim: gives memory back.
        clock: seconds that never go back.
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
        """Watches from now on, in a thread of its own."""
        self._thread.start()

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Trims if there was work at the last look, and is none now or was
        for long."""
        busy, now = self._is_busy(), self._clock()
        if self._was_busy and not (
            busy and now - self._trimmed < TRIM_SECONDS
        ):
            self._trim()
            self._trimmed = now
        self._was_busy = busy

    def _watch(self) -> None:
        while not self._ended.wait(REST_SECONDS):
            self.look()


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    known = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
    return libc if known else None
