"""Tar shards, streamed by hand with a thread that reads ahead.

One thread reads shard after shard through one connection that stays open;
another thread, or the same one, decodes; the training loop takes batches from
a bounded queue.  ``shard_order`` is shuffled by the epoch.
"""

from __future__ import annotations

import queue
import random
import tarfile
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import requests
import torch
from benchmarks.opponents.opponent import Batches, Opponent
from benchmarks.opponents.training import Options

BUFFER_BYTES = 128 * 1024
SECONDS = 600.0
AHEAD_SAMPLES = 256
AHEAD_BATCHES = 4


class TarStream(Opponent):
    """See the module's text."""

    PACKAGES: ClassVar = ("requests", "urllib3")
    GRID: ClassVar[list[Options]] = [
        {"decode": decode, "channels_last": layout}
        for decode in ("reader", "loop", "thread")
        for layout in (False, True)
    ]

    def batches(self, epoch: int) -> Batches:
        over = threading.Event()
        ready: _Queue = _Queue(AHEAD_BATCHES, over)
        threads = self._threads(epoch, ready, over)
        for thread in threads:
            thread.start()
        try:
            while (batch := ready.get()) is not None:
                yield self._decoded(batch)
        finally:
            over.set()
            for thread in threads:
                thread.join(SECONDS)

    def _threads(
        self, epoch: int, ready: _Queue, over: threading.Event
    ) -> list[threading.Thread]:
        if self.options["decode"] == "thread":
            jpegs: _Queue = _Queue(AHEAD_SAMPLES, over)
            return [
                _thread(jpegs, self._samples(epoch)),
                _thread(ready, self._collated(map(self._image, jpegs))),
            ]
        samples = self._samples(epoch)
        if self.options["decode"] == "reader":
            samples = map(self._image, samples)
        return [_thread(ready, self._collated(samples))]

    def _samples(self, epoch: int) -> Iterator[tuple[Any, int]]:
        order = list(self.place.shards)
        random.Random(epoch).shuffle(order)
        with requests.Session() as session:
            token = _token(session, self)
            for shard in order:
                url = f"{token['url']}/{self.container}/{shard}"
                with session.get(
                    url,
                    headers={"X-Auth-Token": token["token"]},
                    stream=True,
                    timeout=SECONDS,
                ) as answer:
                    answer.raise_for_status()
                    yield from _members(answer.raw)

    @property
    def container(self) -> str:
        """Where the shards are."""
        return self.place.container

    def _image(self, sample: tuple[Any, int]) -> tuple[Any, int]:
        return self.decode(sample[0]), sample[1]

    def _collated(
        self, samples: Iterator[tuple[Any, int]]
    ) -> Iterator[list[tuple[Any, int]]]:
        batch = []
        for sample in samples:
            batch.append(sample)
            if len(batch) == self.task.batch_size:
                yield batch
                batch = []
        if batch:
            yield batch

    def _decoded(
        self, batch: list[tuple[Any, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = zip(*batch, strict=True)
        if self.options["decode"] == "loop":
            images = tuple(map(self.decode, images))
        return torch.stack(images), torch.tensor(labels)


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


def _token(session: requests.Session, opponent: Opponent) -> dict[str, str]:
    place = opponent.place
    answer = session.get(
        place.auth_url,
        headers={"X-Auth-User": place.user, "X-Auth-Key": place.key},
        timeout=SECONDS,
    )
    answer.raise_for_status()
    return {
        "token": answer.headers["X-Auth-Token"],
        "url": answer.headers["X-Storage-Url"],
    }


def _members(body: Any) -> Iterator[tuple[bytes, int]]:
    """JPEG and label of each sample of a tar."""
    jpeg = b""
    with tarfile.open(fileobj=body, mode="r|", bufsize=BUFFER_BYTES) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            data = file.read()
            if member.name.endswith(".jpg"):
                jpeg = data
            elif member.name.endswith(".cls"):
                yield jpeg, int(data)
