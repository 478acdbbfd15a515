"""Streams of one account that share their micro-batches.

A *group* is the streams charged to one account that run the same cut of the
same model on the same device, their images transformed alike.  A pass is asked
for when enough samples wait, and takes them when a thread begins it: what has
come meanwhile goes with it.  Accounts never share a batch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from hapi_protocol.errors import HapiError
from hapi_splitter.encodings import EncodedFeatures
from hapi_worker.execution.batch_items import Batch, QueuedSample
from hapi_worker.execution.decode import Decoder
from hapi_worker.execution.forward import Forwarded
from hapi_worker.models.device_models import Lease
from hapi_worker.models.loaded_model import Reservation
from hapi_worker.models.uploads import copied
from hapi_worker.scheduling.batch_size import (
    DEFAULT_LINGER_SECONDS,
    Backlog,
    num_passes,
)
from hapi_worker.scheduling.fair_pool import DEVICE, FairPool

LINGER_PASSES = 2.0
"""A pass that is not full waits as long as so many passes take."""


class Stream(Protocol):
    """A job's samples as its group sees them; all with the lock held."""

    @property
    def encoding(self) -> str:
        """Of its features."""

    @property
    def num_ready(self) -> int:
        """Decoded samples at its head that may be taken."""

    @property
    def num_pending(self) -> int:
        """Samples behind them."""

    @property
    def is_quiet(self) -> bool:
        """Whether no sample will come by itself."""

    @property
    def oldest(self) -> float:
        """When its first ready sample became so."""

    def take(self, size: int) -> list[QueuedSample]:
        """Removes up to ``size`` ready samples."""

    def started(self, batch: Batch) -> None:
        """A pass has begun with some of its samples."""

    def charge(self, device_seconds: float, cpu_seconds: float) -> None:
        """Its part of a pass that has ended; called without the lock."""

    def finished(self, batch: Batch) -> None:
        """Its features are there."""

    def fail(self, error: Exception) -> None:
        """Its pass failed; called without the lock."""


class Compute(Protocol):
    """What a group does with its samples; None of it for an index."""

    @property
    def decoder(self) -> Decoder:
        """Sample → one input of the model."""

    @property
    def input_bytes(self) -> int:
        """Of one input."""

    @property
    def output_bytes(self) -> int:
        """Of one sample's features before encoding."""

    def core_seconds(self) -> float:
        """A clock of what the calling thread has had, with its helpers."""

    def reserve(
        self, size: int, starved: Callable[[], None]
    ) -> Reservation | None:
        """As :meth:`hapi_worker.models.device_models.Residency.reserve`."""

    def forgo(self, starved: Callable[[], None]) -> None:
        """It waits for memory no more."""

    def free(self, reservation: Reservation) -> None:
        """Gives the working memory back."""

    def run(self, images: Sequence[torch.Tensor], size: int) -> Forwarded:
        """A pass of ``size``; called on a thread of the device."""

    def encode(self, rows: torch.Tensor, encoding: str) -> EncodedFeatures:
        """Some rows of a pass, in their wire form on the host."""


@dataclass(frozen=True)
class GroupKey:
    """What streams must have in common to share a micro-batch."""

    account: str
    device: str
    digest: str
    cut: int
    dtype: str
    size: int
    transform: str


class Group:
    """Streams that share micro-batches, and the lock that guards them.

    Args:
        account: that pays.
        compute: what is done with the samples.
        pool: runs the passes.
        size: of a micro-batch, in samples.
        passed: told of the samples of each pass.
    """

    def __init__(
        self,
        account: str,
        compute: Compute,
        pool: FairPool,
        size: int,
        *,
        passed: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.account = account
        self.compute = compute
        self.pool = pool
        self.size = size
        self._passed = passed
        self.lock = threading.Lock()
        self._streams: list[Stream] = []
        self._num_asked = 0
        self._starves = False
        self._pass_seconds = 0.0

    def join(self, stream: Stream) -> None:
        """The stream's samples count from now on."""
        with self.lock:
            self._streams.append(stream)

    def leave(self, stream: Stream) -> None:
        """Called with the lock held; what it still has is dropped."""
        if stream in self._streams:
            self._streams.remove(stream)
            self.consider()

    def consider(self) -> None:
        """Asks for passes as they are due; called with the lock held."""
        wanted = self._num_due()
        while self._num_asked < wanted:
            self._num_asked += 1
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
            found = stream.num_ready
            ready += found
            pending += stream.num_pending
            quiet = quiet and stream.is_quiet
            if found:
                oldest = min(oldest, stream.oldest)
        return Backlog(ready, pending, quiet, now - oldest)

    # --- a thread of the pool ---

    def _pass(self, *, after_starving: bool = False) -> None:
        with self.lock:
            if after_starving:
                if not self._starves:
                    return  # another pass has gone in its place
                self._starves = False
            if not self._num_due():
                self._num_asked -= 1
                self._starve_no_more()
                self.compute.forgo(self._wake)
                return
            reservation = self.compute.reserve(self.size, self._wake)
            if reservation is None:
                # One of them waits for its turn, and stays asked for.
                self._num_asked -= self._starves
                self._starves = True
                return
            self._num_asked -= 1
            self._starve_no_more()
        try:
            self._run(reservation.batch)
        finally:
            self.compute.free(reservation)

    def _starve_no_more(self) -> None:
        self._num_asked -= self._starves
        self._starves = False

    def _wake(self) -> None:
        """There may be memory.  Others' locks may be held: none is taken."""
        work = partial(self._pass, after_starving=True)
        with contextlib.suppress(RuntimeError):  # the worker ends
            self.pool.submit(self.account, work, kind=DEVICE, urgent=True)

    def _run(self, size: int) -> None:
        with self.lock:
            taken = self._take(size)
            self.consider()
        with _charged(taken, self.compute.core_seconds):
            failure = self._compute(taken, size)
        if failure is None:
            self._settle(taken)
        else:
            for stream, _ in taken:
                stream.fail(_own(failure))

    def _compute(
        self, taken: Sequence[tuple[Stream, Batch]], size: int
    ) -> Exception | None:
        images = [image for _, batch in taken for image in batch.images]
        if not images:
            return None
        self._passed(len(images))
        for _, batch in taken:
            batch.timings["queue"] = time.monotonic() - batch.submitted
        try:
            forwarded = self.compute.run(images, size)
            self._pass_seconds = forwarded.seconds
            self._share_out(forwarded, taken)
        except Exception as error:
            return error
        return None

    def _share_out(
        self, forwarded: Forwarded, taken: Sequence[tuple[Stream, Batch]]
    ) -> None:
        """Encodes each stream's rows, and charges them their part."""
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
                # A view would keep all of the batch in memory.
                rows = rows.clone()
            batch.encoded = self.compute.encode(rows, stream.encoding)
            batch.timings |= {
                "forward": forwarded.seconds * part,
                "forward_cpu": forwarded.cpu_seconds * part,
                "encode": time.monotonic() - began,
                "encode_cpu": self.compute.core_seconds() - began_cpu,
            }
            start += count

    def _take(self, size: int) -> list[tuple[Stream, Batch]]:
        """The streams first whose samples have waited longest."""
        taken = []
        ready = [stream for stream in self._streams if stream.num_ready]
        for stream in sorted(ready, key=lambda stream: stream.oldest):
            if not size:
                break
            slots = stream.take(size)
            batch = _batch_of(slots)
            stream.started(batch)
            taken.append((stream, batch))
            size -= len(slots)
        return taken

    def _settle(self, taken: Sequence[tuple[Stream, Batch]]) -> None:
        with self.lock:
            for stream, batch in taken:
                batch.images.clear()
                stream.finished(batch)
            # Streams that had too much under way may have room again.
            self.consider()


class Groups:
    """The groups of a worker, each as long as it has streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[GroupKey, tuple[Group, int]] = {}

    def join(self, key: GroupKey, make: Callable[[], Group]) -> Group:
        """The group of a key, made if there is none."""
        with self._lock:
            group, members = self._groups.get(key) or (make(), 0)
            self._groups[key] = group, members + 1
            return group

    def leave(self, key: GroupKey) -> None:
        """Once for each :meth:`join`."""
        with self._lock:
            group, members = self._groups.pop(key)
            if members > 1:
                self._groups[key] = group, members - 1


def group_key(
    account: str, lease: Lease, size: int, device: str, transform: str
) -> GroupKey:
    """Of a job that holds ``lease``."""
    cut, dtype = lease.site
    return GroupKey(account, device, lease.digest, cut, dtype, size, transform)


@contextlib.contextmanager
def _charged(
    taken: Sequence[tuple[Stream, Batch]], core_seconds: Callable[[], float]
) -> Iterator[None]:
    """Each stream pays for its images' part of what is done inside."""
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


def _batch_of(slots: Sequence[QueuedSample]) -> Batch:
    return Batch(
        rows=[slot.row for slot in slots],
        timings={
            "decode": sum(slot.decode_seconds for slot in slots),
            "decode_cpu": sum(slot.decode_cpu for slot in slots),
        },
        images=[slot.image for slot in slots if slot.image is not None],
    )


def _own(error: Exception) -> Exception:
    """An error that one stream can put its transaction id into."""
    return copied(error) if isinstance(error, HapiError) else error
