"""Coalescing: streams of one account share micro-batches.

A *group* is the streams charged to one account that run the same cut of the
same model on the same device with the same transform.  A pass is requested
when enough samples wait.  It takes samples when a thread starts it, so those
that arrived meanwhile are included.  Accounts never share a batch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Protocol

from hapi_protocol.errors import HapiError
from hapi_worker.execution.batch_items import MicroBatch, QueuedSample
from hapi_worker.execution.device_executor import PrefixCompute
from hapi_worker.execution.forward import PassResult
from hapi_worker.models.uploads import copy_of_error
from hapi_worker.scheduling.batch_start import (
    DEFAULT_LINGER_SECONDS,
    Backlog,
    num_passes,
)
from hapi_worker.scheduling.fair_pool import DEVICE, FairPool

LINGER_PASSES = 2.0
"""Longest wait of a pass that is not full, in durations of a pass."""


class Stream(Protocol):
    """A job's samples; called with the group's lock held unless noted."""

    @property
    def encoding(self) -> str:
        """Wire encoding of the features."""

    @property
    def num_ready(self) -> int:
        """Number of decoded samples at the head that a pass may take."""

    @property
    def num_pending(self) -> int:
        """Number of samples behind them."""

    @property
    def is_quiet(self) -> bool:
        """True if no sample arrives before a pass: the input has ended or is
        blocked."""

    @property
    def oldest(self) -> float:
        """Monotonic seconds at which the first ready sample was decoded."""

    def take(self, size: int) -> list[QueuedSample]:
        """Removes up to ``size`` ready samples."""

    def pass_started(self, batch: MicroBatch) -> None:
        """A pass has started with some of the stream's samples."""

    def charge(self, device_seconds: float, cpu_seconds: float) -> None:
        """Charges the stream's part of a pass; called without the lock."""

    def pass_finished(self, batch: MicroBatch) -> None:
        """The batch's features are complete."""

    def fail(self, error: Exception) -> None:
        """The stream's pass failed; called without the lock."""


@dataclass(eq=False)
class Group:
    """Streams that share micro-batches, and the lock that guards them.

    Args:
        account: the account that is charged.
        compute: the computation.
        pool: runs the passes.
        size: samples in a micro-batch.
        on_pass: called with the number of samples of each pass.
    """

    account: str
    compute: PrefixCompute
    pool: FairPool
    size: int
    _: KW_ONLY
    on_pass: Callable[[int], None] = lambda count: None

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self._streams: list[Stream] = []
        self._num_requested = 0
        self._waits_for_memory = False
        self._pass_seconds = 0.0

    def join(self, stream: Stream) -> None:
        """Adds a stream to the group."""
        with self.lock:
            self._streams.append(stream)

    def leave(self, stream: Stream) -> None:
        """Removes a stream; called with the lock held."""
        if stream in self._streams:
            self._streams.remove(stream)
            self.request_passes()

    def request_passes(self) -> None:
        """Requests the passes that are due; called with the lock held."""
        num_due = self._num_due()
        while self._num_requested < num_due:
            self._num_requested += 1
            self._submit()

    def _num_due(self) -> int:
        return num_passes(
            self._backlog(),
            self.size,
            # A padded pass costs as much as a full one.
            linger_seconds=max(
                DEFAULT_LINGER_SECONDS, LINGER_PASSES * self._pass_seconds
            ),
        )

    def _submit(self) -> None:
        self.pool.submit(self.account, self._pass, kind=DEVICE, urgent=True)

    def _backlog(self) -> Backlog:
        ready = pending = 0
        oldest = now = time.monotonic()
        quiet = True
        for stream in self._streams:
            num_ready = stream.num_ready
            ready += num_ready
            pending += stream.num_pending
            quiet = quiet and stream.is_quiet
            if num_ready:
                oldest = min(oldest, stream.oldest)
        return Backlog(ready, pending, quiet, now - oldest)

    # --- a thread of the pool ---

    def _pass(self, *, after_wait: bool = False) -> None:
        with self.lock:
            if after_wait:
                if not self._waits_for_memory:
                    return  # another pass has run in its place
                self._waits_for_memory = False
            if not self._num_due():
                self._num_requested -= 1
                self._stop_waiting()
                self.compute.memory.cancel_wait(self._wake)
                return
            reservation = self.compute.memory.reserve(
                self.compute.lease, self.size, self._wake
            )
            if reservation is None:
                # One pass waits for its turn, and stays requested.
                self._num_requested -= self._waits_for_memory
                self._waits_for_memory = True
                return
            self._num_requested -= 1
            self._stop_waiting()
        try:
            self._run(reservation.batch)
        finally:
            self.compute.memory.free(reservation)

    def _stop_waiting(self) -> None:
        self._num_requested -= self._waits_for_memory
        self._waits_for_memory = False

    def _wake(self) -> None:
        """Tries again after a wait for memory.

        The caller may hold locks, so none is taken here.
        """
        work = partial(self._pass, after_wait=True)
        with contextlib.suppress(RuntimeError):  # the worker is ending
            self.pool.submit(self.account, work, kind=DEVICE, urgent=True)

    def _run(self, size: int) -> None:
        with self.lock:
            taken = self._take(size)
            self.request_passes()
        with _charging(taken, self.compute.core_seconds):
            failure = self._compute(taken, size)
        if failure is None:
            self._deliver(taken)
        else:
            for stream, _ in taken:
                stream.fail(_error_for_stream(failure))

    def _compute(
        self, taken: Sequence[tuple[Stream, MicroBatch]], size: int
    ) -> Exception | None:
        images = [image for _, batch in taken for image in batch.images]
        if not images:
            return None
        self.on_pass(len(images))
        for _, batch in taken:
            batch.timings["queue"] = time.monotonic() - batch.submitted
        try:
            forwarded = self.compute.run(images, size)
            self._pass_seconds = forwarded.seconds
            self._split_result(forwarded, taken)
        except Exception as error:
            return error
        return None

    def _split_result(
        self, forwarded: PassResult, taken: Sequence[tuple[Stream, MicroBatch]]
    ) -> None:
        """Encodes each stream's rows, and sets the batch's timings."""
        total = sum(len(batch.images) for _, batch in taken)
        start = 0
        for stream, batch in taken:
            count = len(batch.images)
            if not count:
                continue
            part = count / total
            began, began_cpu = time.monotonic(), self.compute.core_seconds()
            rows = forwarded.features[start : start + count]
            if count < len(forwarded.features):
                # A view would keep the whole batch in memory.
                rows = rows.clone()
            batch.encoded = self.compute.encode(rows, stream.encoding)
            batch.timings |= {
                "forward": forwarded.seconds * part,
                "forward_cpu": forwarded.cpu_seconds * part,
                "encode": time.monotonic() - began,
                "encode_cpu": self.compute.core_seconds() - began_cpu,
            }
            start += count

    def _take(self, size: int) -> list[tuple[Stream, MicroBatch]]:
        """Takes samples, first from streams whose samples waited longest."""
        taken = []
        ready = [stream for stream in self._streams if stream.num_ready]
        for stream in sorted(ready, key=lambda stream: stream.oldest):
            if not size:
                break
            queued = stream.take(size)
            batch = _batch_of(queued)
            stream.pass_started(batch)
            taken.append((stream, batch))
            size -= len(queued)
        return taken

    def _deliver(self, taken: Sequence[tuple[Stream, MicroBatch]]) -> None:
        with self.lock:
            for stream, batch in taken:
                batch.images.clear()
                stream.pass_finished(batch)
            # Streams that were at their bound may take part again.
            self.request_passes()


class Groups:
    """The groups of a worker; each exists as long as it has streams.

    The key of a group has the properties that its streams have in common.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[Hashable, tuple[Group, int]] = {}

    def join(self, key: Hashable, make: Callable[[], Group]) -> Group:
        """Returns the group of a key; makes it if there is none."""
        with self._lock:
            group, members = self._groups.get(key) or (make(), 0)
            self._groups[key] = group, members + 1
            return group

    def leave(self, key: Hashable) -> None:
        """Undoes one :meth:`join`."""
        with self._lock:
            group, members = self._groups.pop(key)
            if members > 1:
                self._groups[key] = group, members - 1


@contextlib.contextmanager
def _charging(
    taken: Sequence[tuple[Stream, MicroBatch]],
    core_seconds: Callable[[], float],
) -> Iterator[None]:
    """Charges each stream for its images' part of the block."""
    total = sum(len(batch.images) for _, batch in taken) or 1
    parts = [(s, len(batch.images) / total) for s, batch in taken]
    began, began_cpu = time.monotonic(), core_seconds()
    try:
        yield
    finally:
        seconds = time.monotonic() - began
        cpu_seconds = core_seconds() - began_cpu
        for stream, part in parts:
            stream.charge(seconds * part, cpu_seconds * part)


def _batch_of(queued: Sequence[QueuedSample]) -> MicroBatch:
    return MicroBatch(
        rows=[slot.row for slot in queued],
        timings={
            "decode": sum(slot.decode_seconds for slot in queued),
            "decode_cpu": sum(slot.decode_cpu for slot in queued),
        },
        images=[slot.image for slot in queued if slot.image is not None],
    )


def _error_for_stream(error: Exception) -> Exception:
    """Copies an error, since each stream sets its own transaction id."""
    return copy_of_error(error) if isinstance(error, HapiError) else error
