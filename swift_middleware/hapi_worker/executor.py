"""The threads that compute: a pool for decoding and one thread per device.

Both take their work from a queue that is fair between accounts
(:mod:`hapi_worker.scheduler`), so that many jobs share few threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import torch

from hapi_splitter.host import allowed_memory_bytes
from hapi_worker.load import LoadMeter
from hapi_worker.scheduler import FairQueue

Work = Callable[[], None]
JOIN_SECONDS = 5.0

logger = logging.getLogger(__name__)


class FairPool:
    """Threads that run work in the order of a :class:`FairQueue`.

    Work reports its own failures; what it lets through is our bug, is
    logged, and costs no thread.

    Args:
        name: of the threads.
        num_threads: how many run at a time.
        torch_threads: intra-operation threads of torch in each of them.
        meter: told of each piece of work.
        on_device: whether its threads are those of devices.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        torch_threads: int = 1,
        meter: LoadMeter | None = None,
        on_device: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_threads = num_threads
        self._queue: FairQueue[Work] = FairQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._num_busy = 0
        self._num_pauses = 0
        self._torch_threads = torch_threads
        self._meter = meter
        self._on_device = on_device
        self._clock = clock
        self._threads = [
            threading.Thread(
                target=self._serve, name=f"{name}-{number}", daemon=True
            )
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, account: str, work: Work) -> None:
        """Queues work; ``account`` pays for the seconds it runs.

        Raises:
            RuntimeError: when the pool is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("this pool is closed")
            self._queue.push(account, work)
            self._changed.notify()

    def __len__(self) -> int:
        with self._changed:
            return len(self._queue)

    @contextlib.contextmanager
    def paused(self, seconds: float) -> Iterator[bool]:
        """No work runs inside; what is queued meanwhile waits.

        Args:
            seconds: to wait for the work that runs.

        Yields:
            Whether that has ended; if not, it goes on inside.
        """
        with self._changed:
            self._num_pauses += 1
            idle = self._changed.wait_for(
                lambda: not self._num_busy or self._closed, seconds
            )
        try:
            yield idle and not self._closed
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Drops what waits and joins the threads, for at most 5 s each."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
            if thread.is_alive():
                logger.warning("thread %s is still busy", thread.name)

    def _serve(self) -> None:
        # torch copies the process-wide setting into a thread at its first
        # use there; only afterwards can the thread have a setting of its
        # own.
        torch.get_num_threads()
        torch.set_num_threads(self._torch_threads)
        while (found := self._next()) is not None:
            account, work = found
            started = self._clock()
            try:
                with self._metered(account):
                    work()
            except Exception:
                logger.exception("a defect: work raised in a pool")
            del work, found
            with self._changed:
                self._queue.charge(account, self._clock() - started)
                self._num_busy -= 1
                if self._num_pauses:
                    self._changed.notify_all()

    @contextlib.contextmanager
    def _metered(self, account: str) -> Iterator[None]:
        if self._meter is None:
            yield
            return
        begun = self._meter.began(account, on_device=self._on_device)
        try:
            yield
        finally:
            self._meter.ended(begun)

    def _next(self) -> tuple[str, Work] | None:
        with self._changed:
            while not self._closed:
                found = None if self._num_pauses else self._queue.pop()
                if found is not None:
                    self._num_busy += 1
                    return found
                self._changed.wait()
            return None


def choose_device(wanted: str) -> torch.device:
    """The torch device that an operator's ``device`` option means.

    Raises:
        ValueError: when this host has no such device.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", device.index or 0)
        if (device.index or 0) >= count:
            raise ValueError(
                f"option 'device' is {wanted!r}; torch sees {count} CUDA "
                "devices here"
            )
    return device


def device_memory_bytes(device: torch.device) -> int:
    """What ``memory_limit = auto`` stands for.

    Nine tenths of a GPU's free memory; on the CPU half of what the host,
    or the control group the process runs in, has.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.9)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(host, allowed_memory_bytes() or host) // 2
