"""Tar shards, streamed by hand with a thread that reads ahead.

One thread reads shard after shard through connections that stay open: while
it reads one, the next one has been asked for, and arrives in the kernel's
buffer.  The same thread decodes, or the training loop, which takes batches
from a bounded queue.  The order of shards is shuffled by
the epoch.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections import deque
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any, ClassVar

import torch
from benchmarks.opponents.login import OK, SECONDS, log_in
from benchmarks.opponents.opponent import Batches, Opponent
from benchmarks.opponents.tars import samples
from benchmarks.opponents.training import Options, collate

CONNECTIONS = 2
AHEAD_BATCHES = 4


class TarStream(Opponent):
    """See the module's text."""

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
        if self.options.get("shuffle", True):
            random.Random(epoch).shuffle(order)
        login = log_in(self.place)
        headers = {"X-Auth-Token": login.token}
        with contextlib.ExitStack() as stack:
            idle = [
                stack.enter_context(contextlib.closing(login.connect()))
                for _ in range(CONNECTIONS)
            ]
            asked: deque[HTTPConnection] = deque()
            for shard in order:
                connection = idle.pop()
                path = f"{login.path}/{self.container}/{shard}"
                connection.request("GET", path, headers=headers)
                asked.append(connection)
                if not idle:
                    idle.append(asked.popleft())
                    yield from _read(idle[-1])
            while asked:
                yield from _read(asked.popleft())

    @property
    def container(self) -> str:
        """Where the shards are."""
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


def _read(connection: HTTPConnection) -> Iterator[tuple[bytearray, int]]:
    """JPEG and label of each sample of the shard that was asked for."""
    with connection.getresponse() as answer:
        if answer.status != OK:
            raise OSError(f"a shard was answered {answer.status}")
        for _, jpeg, label in samples(answer):
            yield jpeg, label
        answer.read()


class _Over(Exception):
    """The loop was left."""


class _Queue:
    """Between threads; both ends let go when the epoch is over."""

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
        """The next one; None at the end."""
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
        except BaseException as error:  # raised again where it is awaited
            into.put(error)

    return threading.Thread(target=run, daemon=True)
