"""Decodes and transforms samples on all cores that the process may use."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager

import torch
from torch.utils.data import get_worker_info

from hapi_client.caching.pool import local_ranks
from hapi_protocol.errors import TooSlowError
from hapi_protocol.transforms import Training
from hapi_splitter.host_limits import allowed_cores

# A thread starts in milliseconds; a host that swaps may take seconds.
START_SECONDS = 60.0
"""Deadline for the start of all threads."""
# Pauses are measurements of seconds, and deadlines of a minute or more.
POLL_SECONDS = 0.5
"""Interval at which pauses are noticed."""


class DecodePool:
    """Threads that decode samples; each uses one core.

    Args:
        decode: decodes the bytes of an image or array, given the sample's key
            and seed and epoch of random changes (None for evaluation), to the
            model's input.
        num_threads: number of threads; None for one on each available core,
            divided among the ranks of this host and their loader workers.
    """

    def __init__(
        self,
        decode: Callable[[bytes, str, Training | None], torch.Tensor],
        num_threads: int | None = None,
    ) -> None:
        self._decode = decode
        self.num_threads = num_threads or _own_cores()
        self._pool = ThreadPoolExecutor(
            self.num_threads, thread_name_prefix="hapi-decode"
        )
        self._changed = threading.Condition()
        self._num_busy = 0
        self._num_pauses = 0
        self._closed = False
        self._make_single_threaded()

    @contextmanager
    def paused(self, seconds: float) -> Iterator[None]:
        """Pauses decoding inside the context; submitted samples wait.

        Args:
            seconds: longest wait for samples that are being decoded.
        """
        with self._changed:
            self._num_pauses += 1
            self._changed.wait_for(lambda: not self._num_busy, seconds)
        try:
            yield
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._changed.notify_all()

    def _make_single_threaded(self) -> None:
        # Each thread that calls torch would start its own OpenMP threads,
        # which spin and take cores from the forward pass.
        started = threading.Barrier(self.num_threads + 1)

        def prepare() -> None:
            # A thread inherits the process's number at its first use of
            # torch; only then can it have its own.
            torch.get_num_threads()
            torch.set_num_threads(1)
            started.wait(START_SECONDS)

        # set_num_threads also sets the number that later threads inherit.
        before = torch.get_num_threads()
        for _ in range(self.num_threads):
            self._pool.submit(prepare)
        started.wait(START_SECONDS)
        torch.set_num_threads(before)

    def submit(
        self,
        data: bytes,
        target: torch.Tensor,
        key: str = "",
        training: Training | None = None,
    ) -> Future[float]:
        """Decodes ``data`` into ``target``; the future has CPU seconds."""
        return self._pool.submit(self._into, data, target, key, training)

    def result(self, future: Future[float], seconds: float) -> float:
        """Waits for a sample; returns the CPU seconds of decoding it.

        Args:
            future: result of :meth:`submit`.
            seconds: longest wait, pauses not counted.

        Raises:
            TooSlowError: after that time.
            SampleError: if the sample cannot be decoded.
        """
        left = seconds
        while left > 0:
            step = min(left, POLL_SECONDS)
            try:
                return future.result(step)
            except FutureTimeoutError:
                if not self._num_pauses:
                    left -= step
        raise TooSlowError(
            "too_slow", f"a sample was not decoded in {seconds:g} s"
        )

    def _into(
        self,
        data: bytes,
        target: torch.Tensor,
        key: str,
        training: Training | None,
    ) -> float:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._num_pauses or self._closed
            )
            self._num_busy += 1
        started = time.thread_time()
        try:
            target.copy_(self._decode(data, key, training))
            return time.thread_time() - started
        finally:
            with self._changed:
                self._num_busy -= 1
                if self._num_pauses:
                    self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _own_cores() -> int:
    """Returns this process's share of the available cores, at least 1."""
    info = get_worker_info()
    num_sharing = local_ranks(os.environ) * (info.num_workers if info else 1)
    return max(1, math.ceil(allowed_cores()) // num_sharing)
