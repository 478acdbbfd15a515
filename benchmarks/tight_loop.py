"""The tightest loop that torch and torchvision allow, for comparison.

    python -m benchmarks.tight_loop < SETTINGS

Decodes the JPEGs of a tar and runs an eager torchvision model without its last
layers on them, in one process, with nothing but a queue in between: what a
worker is measured against (benchmarks/worker.py).  It imports nothing of HAPI,
sends nothing and keeps no order.

Standard input: JSON with ``tar``; ``model``, a name of torchvision's;
``head``, the attribute that the identity takes the place of; ``device``;
``batch``; ``channels_last``; ``decode_threads``, 0 for threads that decode for
themselves; ``forward_threads``; ``torch_threads``, of each forward;
``seconds``.  Standard output: JSON with ``samples_per_second``.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import sys
import tarfile
import threading
import time
from collections.abc import Iterator

import torch
import torchvision
from benchmarks.preset import Preset
from torch import nn
from torchvision.io import ImageReadMode, decode_jpeg

AHEAD = 2
"""Batches that wait for each thread that runs the model."""
CROP_SIZE = 224
WARM_SECONDS = 1.5
MIN_BATCHES = 4
"""That are counted, of each thread that runs the model, however long they
take."""
POLL_SECONDS = 0.05


class Loop:
    """See the module's text for the arguments."""

    def __init__(
        self,
        *,
        tar: str,
        model: str,
        head: str,
        device: str,
        batch: int,
        channels_last: bool,
        decode_threads: int,
        forward_threads: int,
        torch_threads: int,
        seconds: float,
    ) -> None:
        self._images = itertools.cycle(jpegs_of(tar))
        self._device = torch.device(device)
        self._layout = (
            torch.channels_last if channels_last else torch.contiguous_format
        )
        module = headless(model, head).eval().requires_grad_(False)
        self._module = module.to(self._device).to(memory_format=self._layout)
        self._preset = Preset(crop_size=CROP_SIZE)
        self._batch = batch
        self._decode_threads = decode_threads
        self._forward_threads = forward_threads
        self._torch_threads = torch_threads
        self._seconds = seconds
        self._batches: queue.Queue[torch.Tensor] = queue.Queue(
            AHEAD * forward_threads
        )
        self._done: list[float] = []
        self._over = threading.Event()

    def run(self) -> float:
        """Samples per second, after a warm-up."""
        threads = [
            threading.Thread(target=target, daemon=True)
            for target, count in (
                (self._decode, self._decode_threads),
                (self._forward, self._forward_threads),
            )
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        begin = self._warm()
        time.sleep(self._seconds)
        while len(counted := self._ended_since(begin)) < self._least_batches:
            time.sleep(POLL_SECONDS)
        self._over.set()
        # From the end of a batch to that of another one.
        span = counted[-1] - counted[0]
        return self._batch * (len(counted) - 1) / span

    @property
    def _least_batches(self) -> int:
        return MIN_BATCHES * self._forward_threads

    def _ended_since(self, begin: float) -> list[float]:
        return [moment for moment in self._done if moment >= begin]

    def _warm(self) -> float:
        started = time.monotonic()
        while (
            time.monotonic() - started < WARM_SECONDS
            or len(self._done) < self._forward_threads
        ):
            time.sleep(POLL_SECONDS)
        return time.monotonic()

    def _decoded(self) -> torch.Tensor:
        images = torch.empty((self._batch, 3, CROP_SIZE, CROP_SIZE))
        for row in images:
            data = torch.frombuffer(next(self._images), dtype=torch.uint8)
            row.copy_(self._preset(decode_jpeg(data, ImageReadMode.RGB)))
        return images

    def _decode(self) -> None:
        torch.set_num_threads(1)
        while not self._over.is_set():
            self._batches.put(self._decoded())

    def _inputs(self) -> Iterator[torch.Tensor]:
        while not self._over.is_set():
            yield (
                self._batches.get()
                if self._decode_threads
                else self._decoded()
            )

    def _forward(self) -> None:
        torch.set_num_threads(self._torch_threads)
        with torch.inference_mode():
            for images in self._inputs():
                placed = images.to(self._device, memory_format=self._layout)
                self._module(placed).cpu()
                self._done.append(time.monotonic())


def jpegs_of(tar: str) -> list[bytearray]:
    """All JPEG members of a tar."""
    with tarfile.open(tar) as opened:
        return [
            bytearray(file.read())
            for member in opened
            if member.name.endswith((".jpg", ".jpeg"))
            and (file := opened.extractfile(member)) is not None
        ]


def headless(model: str, head: str) -> nn.Module:
    """A torchvision model, random weights, without its last layers."""
    torch.manual_seed(0)
    module: nn.Module = torchvision.models.get_model(model, weights=None)
    getattr(module, head)
    setattr(module, head, nn.Identity())
    return module


def give_up(failure: threading.ExceptHookArgs) -> None:
    """Ends the process: without that thread the others wait for ever."""
    threading.__excepthook__(failure)
    os._exit(1)


def main() -> None:
    threading.excepthook = give_up
    rate = Loop(**json.load(sys.stdin)).run()
    json.dump({"samples_per_second": rate}, sys.stdout)
    sys.stdout.flush()
    # Its threads are in the middle of torch, which aborts if they vanish.
    os._exit(0)


if __name__ == "__main__":
    main()
