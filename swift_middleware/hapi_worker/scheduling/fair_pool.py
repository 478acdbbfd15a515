"""Pool of threads whose work comes from a queue that is fair to accounts.

On a CPU one pool decodes and computes: with more busy threads than cores, the
system would often suspend the one that holds Python's lock.  With GPUs one
pool decodes, and each device has its own thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field

import torch

from hapi_worker.monitoring.load_meter import LoadMeter
from hapi_worker.scheduling.fair_queue import FairQueue, Ledger

DECODE = "decode"
DEVICE = "device"
PROFILE = "profile"
"""Kinds of work."""
JOIN_SECONDS = 5.0
"""A pass or an image takes less, unless it hangs."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Piece:
    run: Callable[[], None]
    kind: str


@dataclass(eq=False)
class FairPool:
    """Threads that run work in the order of a :class:`FairQueue`.

    Work reports its own failures.  An exception that it raises is a defect:
    it is logged, and the thread goes on.

    Args:
        name: prefix of the threads' names.
        num_threads: number of threads.
        ledger: the accounts' seconds, shared with other pools.
        torch_threads: intra-operation threads of torch in each thread.
        share: threads that one account may use at a time; None for all.
        meter: records each piece of work.
        clock: monotonic seconds.
    """

    name: str
    num_threads: int
    ledger: Ledger
    _: KW_ONLY
    torch_threads: int = 1
    share: int | None = None
    meter: LoadMeter = field(default_factory=lambda: LoadMeter(cores=1))
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._queue: FairQueue[_Piece] = FairQueue(self.ledger)
        self._changed = threading.Condition()
        self._closed = False
        self._busy: Counter[str] = Counter()
        share = self.share
        self._share = self.num_threads if share is None else share
        self._num_pauses = 0
        self._threads = [
            threading.Thread(
                target=self._serve, name=f"{self.name}-{number}", daemon=True
            )
            for number in range(self.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        account: str,
        work: Callable[[], None],
        *,
        kind: str = DECODE,
        urgent: bool = False,
    ) -> None:
        """Queues work.

        Args:
            account: the account that is charged for the seconds it runs.
            work: called in one of the threads.
            kind: :data:`DECODE`, :data:`DEVICE` or :data:`PROFILE`.
            urgent: run it before all other work of this account.

        Raises:
            RuntimeError: the pool is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("this pool is closed")
            self._queue.push(account, _Piece(work, kind), urgent=urgent)
            self._changed.notify()

    def __len__(self) -> int:
        with self._changed:
            return len(self._queue)

    @contextlib.contextmanager
    def paused(
        self, seconds: float, *, num_allowed: int = 0
    ) -> Iterator[bool]:
        """Starts no work during its block; queued work waits.

        Args:
            seconds: longest wait for running work.
            num_allowed: pieces of work that may go on; 1 if the caller is
                one of them.

        Yields:
            True if all other work has ended; if not, it goes on.
        """
        with self._changed:
            self._num_pauses += 1
            idle = self._changed.wait_for(
                lambda: self._busy.total() <= num_allowed or self._closed,
                seconds,
            )
        try:
            yield idle and not self._closed
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Drops queued work, and joins the threads for at most 5 s.

        Returns:
            True if all threads have ended.
        """
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            if thread is threading.current_thread():
                continue
            thread.join(max(deadline - time.monotonic(), 0))
            if thread.is_alive():
                logger.warning("thread %s is still busy", thread.name)
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        # At its first use in a thread, torch copies the process-wide setting;
        # only after that can the thread have its own.
        torch.get_num_threads()
        torch.set_num_threads(self.torch_threads)
        while (task := self._next()) is not None:
            account = task[0]
            self._run(*task)
            del task
            with self._changed:
                self._busy -= Counter([account])
                if self._num_pauses:
                    self._changed.notify_all()

    def _run(self, account: str, piece: _Piece) -> None:
        on_device = piece.kind != DECODE
        work = self.meter.start_work(account, on_device=on_device)
        charged = self.ledger.begun(account, piece.kind)
        started = self.clock()
        try:
            piece.run()
        except Exception:
            logger.exception("a defect: work raised in a pool")
        finally:
            seconds = self.clock() - started
            self.ledger.ended(account, piece.kind, charged, seconds)
            self.meter.end_work(work)

    def _next(self) -> tuple[str, _Piece] | None:
        with self._changed:
            while not self._closed:
                task = None if self._num_pauses else self._pop()
                if task is not None:
                    self._busy[task[0]] += 1
                    return task
                self._changed.wait()
            return None

    def _pop(self) -> tuple[str, _Piece] | None:
        # The thread that ends an account's piece takes its next one.
        return self._queue.pop(
            {
                account
                for account, number in self._busy.items()
                if number >= self._share
            }
        )
