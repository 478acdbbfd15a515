"""Decoding and transforming on all cores that the process may use."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager

import torch

from hapi_protocol.errors import TooSlowError
from hapi_protocol.transforms import Training
from hapi_splitter.host_limits import allowed_cores

START_SECONDS = 60.0
POLL_SECONDS = 0.5
"""Between looks at whether decoding is paused."""


class DecodePool:
    """Threads that decode samples; each uses one core.

    Args:
        decode: from the bytes of an image or an array, its sample's key, and
            seed and epoch of random changes (None for evaluation) to what the
            model takes.
        num_threads: None for one on each available core.
    """

    def __init__(
        self,
        decode: Callable[[bytes, str, Training | None], torch.Tensor],
        num_threads: int | None = None,
    ) -> None:
        self._decode = decode
        self.num_threads = num_threads or math.ceil(allowed_cores())
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
        """Nothing is decoded inside; what is submitted waits.

        Args:
            seconds: to wait at most for what is being decoded.
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
        # Each thread that calls torch would start OpenMP threads of its
        # own, cores² in all, which spin and steal the forward's cores.
        started = threading.Barrier(self.num_threads + 1)

        def prepare() -> None:
            # A thread takes over the process's number at its first use of
            # torch; only afterwards can it have one of its own.
            torch.get_num_threads()
            torch.set_num_threads(1)
            started.wait(START_SECONDS)

        # set_num_threads also sets what threads to come take over.
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
        """Decodes ``data`` into ``target``; the CPU seconds that it took."""
        return self._pool.submit(self._into, data, target, key, training)

    def result(self, future: Future[float], seconds: float) -> float:
        """Of :meth:`submit`: the CPU seconds that it took.

        Args:
            future: of a sample.
            seconds: to wait at most; pauses do not count.

        Raises:
            TooSlowError: they are over.
            SampleError: it cannot be decoded.
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
