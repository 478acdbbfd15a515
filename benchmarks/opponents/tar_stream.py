"""Tar shards, streamed by hand with a prefetching thread.

The thread reads shard after shard through persistent connections: while it
reads one, the next is requested and arrives in the kernel's buffer.  Either
this thread decodes, or the training loop, which takes batches from a bounded
queue.  Shards are shuffled in each epoch.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections import deque
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch

from benchmarks.opponents.opponent import Batches, Opponent
from benchmarks.opponents.tars import samples
from benchmarks.opponents.training import Options, collate, log_in

CONNECTIONS = 2
SECONDS = 600.0
AHEAD_BATCHES = 4


class TarStream(Opponent):
    """Streams shards of photographs."""

    GRID: ClassVar[list[Options]] = [
        {"decode": "reader", "channels_last": True},
        {"decode": "loop", "channels_last": True},
        {"decode": "reader", "channels_last": False},
    ]

    def batches(self, epoch: int) -> Batches:
        over = threading.Event()
        ready = _Queue(AHEAD_BATCHES, over)
        samples = self._samples(epoch)
        if self.options["decode"] == "reader":
            samples = map(self._image, samples)
        thread = _thread(ready, self._collated(samples))
        thread.start()
        try:
            while (batch := ready.get()) is not None:
                yield self._decoded(batch)
        finally:
            over.set()
            thread.join(SECONDS)

    def _samples(self, epoch: int) -> Iterator[tuple[Any, int]]:
        order = list(self.place.shards)
        random.Random(epoch).shuffle(order)
        url, token = log_in(self.place)
        parts = urlsplit(url)
        headers = {"X-Auth-Token": token}
        with contextlib.ExitStack() as stack:
            idle = [
                stack.enter_context(
                    contextlib.closing(
                        HTTPConnection(parts.netloc, timeout=SECONDS)
                    )
                )
                for _ in range(CONNECTIONS)
            ]
            asked: deque[HTTPConnection] = deque()
            for shard in order:
                connection = idle.pop()
                path = f"{parts.path}/{self.container}/{shard}"
                connection.request("GET", path, headers=headers)
                asked.append(connection)
                if not idle:
                    idle.append(asked.popleft())
                    yield from _read(idle[-1])
            while asked:
                yield from _read(asked.popleft())

    @property
    def container(self) -> str:
        """Container of the shards."""
        return self.place.container

    def _image(self, sample: tuple[Any, int]) -> tuple[Any, int]:
        return self.decode(sample[0]), sample[1]

    def _collated(self, samples: Iterator[tuple[Any, int]]) -> Iterator[Any]:
        batch = []
        for sample in samples:
            batch.append(sample)
            if len(batch) == self.task.batch_size:
                yield self._stacked(batch)
                batch = []
        if batch:
            yield self._stacked(batch)

    def _stacked(self, batch: list[tuple[Any, int]]) -> Any:
        return batch if self.options["decode"] == "loop" else collate(batch)

    def _decoded(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.options["decode"] == "loop":
            return collate([self._image(sample) for sample in batch])
        images, labels = batch
        return images, labels


class ResizedTarStream(TarStream):
    """Streams shards with resized photographs, see ``convert.resized``."""

    @property
    def container(self) -> str:
        return self.place.resized


def _read(connection: HTTPConnection) -> Iterator[tuple[bytearray, int]]:
    """JPEG and label of each sample of the requested shard."""
    with connection.getresponse() as answer:
        if answer.status != HTTPStatus.OK:
            raise OSError(f"GET of a shard: status {answer.status}")
        for _, jpeg, label in samples(answer):
            yield jpeg, label
        answer.read()


class _Over(Exception):
    """The loop has ended."""


class _Queue:
    """Bounded queue between threads; both sides end with the epoch."""

    def __init__(self, size: int, over: threading.Event) -> None:
        self._items: queue.Queue[Any] = queue.Queue(size)
        self._over = over

    def put(self, item: Any) -> None:
        while True:
            if self._over.is_set():
                raise _Over
            try:
                return self._items.put(item, timeout=0.1)
            except queue.Full:
                continue

    def get(self) -> Any:
        """The next item; None at the end."""
        while True:
            if self._over.is_set():
                raise _Over
            try:
                item = self._items.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get, None)


def _thread(into: _Queue, items: Iterator[Any]) -> threading.Thread:
    def run() -> None:
        try:
            for item in items:
                into.put(item)
            into.put(None)
        except _Over:
            pass
        except BaseException as error:  # raised by get
            into.put(error)

    return threading.Thread(target=run, daemon=True)
