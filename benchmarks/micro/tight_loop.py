"""The tightest loop that torch and torchvision allow.

    python -m benchmarks.micro.tight_loop < SETTINGS

Decodes the JPEGs of a tar and runs an eager torchvision model without its last
layers, in one process, with a queue in between.  It imports nothing of HAPI,
sends nothing and does not preserve the order.

Standard input: JSON with the arguments of :func:`rate`.  Standard output: JSON
with ``samples_per_second``.
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
from collections.abc import Callable

import torch
import torchvision
from torch import nn
from torchvision.io import ImageReadMode, decode_jpeg

from benchmarks.opponents.preset import Preset

AHEAD = 2
"""Number of queued batches for each forward thread."""
CROP_SIZE = 224
WARM_SECONDS = 1.5
MIN_BATCHES = 4
"""Minimum number of counted batches of each forward thread."""
POLL_SECONDS = 0.05


def rate(
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
) -> float:
    """Samples per second, after a warm-up.

    Args:
        tar: file with JPEGs.
        model: name of a torchvision model.
        head: attribute that is replaced by the identity.
        device: of the model.
        batch: samples of a forward pass.
        channels_last: memory format.
        decode_threads: 0 to decode in the forward threads.
        forward_threads: number of threads that run the model.
        torch_threads: of each forward pass.
        seconds: that are counted.
    """
    jpegs = itertools.cycle(jpegs_of(tar))
    preset = Preset(crop_size=CROP_SIZE)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module = headless(model, head).to(device).to(memory_format=layout)
    batches: queue.Queue[torch.Tensor] = queue.Queue(AHEAD * forward_threads)
    done: list[float] = []

    def decoded() -> torch.Tensor:
        images = torch.empty((batch, 3, CROP_SIZE, CROP_SIZE))
        for row in images:
            data = torch.frombuffer(next(jpegs), dtype=torch.uint8)
            row.copy_(preset(decode_jpeg(data, ImageReadMode.RGB)))
        return images

    def decode() -> None:
        torch.set_num_threads(1)
        while True:
            batches.put(decoded())

    def forward() -> None:
        torch.set_num_threads(torch_threads)
        with torch.inference_mode():
            while True:
                images = batches.get() if decode_threads else decoded()
                module(images.to(device, memory_format=layout)).cpu()
                done.append(time.monotonic())

    _start(decode, decode_threads)
    _start(forward, forward_threads)
    started = time.monotonic()
    while time.monotonic() - started < WARM_SECONDS or not done:
        time.sleep(POLL_SECONDS)
    begin = len(done)
    time.sleep(seconds)
    while len(done) - begin < MIN_BATCHES * forward_threads:
        time.sleep(POLL_SECONDS)
    counted = done[begin:]
    # From the end of one batch to that of another.
    return batch * (len(counted) - 1) / (counted[-1] - counted[0])


def _start(target: Callable[[], None], count: int) -> None:
    for _ in range(count):
        threading.Thread(target=target, daemon=True).start()


def jpegs_of(tar: str) -> list[bytearray]:
    """Reads all JPEG members of a tar."""
    with tarfile.open(tar) as opened:
        return [
            bytearray(file.read())
            for member in opened
            if member.name.endswith((".jpg", ".jpeg"))
            and (file := opened.extractfile(member)) is not None
        ]


def headless(model: str, head: str) -> nn.Module:
    """A torchvision model with random weights, without its last layers."""
    torch.manual_seed(0)
    module: nn.Module = torchvision.models.get_model(model, weights=None)
    getattr(module, head)
    setattr(module, head, nn.Identity())
    return module.eval().requires_grad_(False)


def give_up(failure: threading.ExceptHookArgs) -> None:
    """Ends the process; the other threads would wait forever."""
    threading.__excepthook__(failure)
    os._exit(1)


def main() -> None:
    threading.excepthook = give_up
    result = rate(**json.load(sys.stdin))
    json.dump({"samples_per_second": result}, sys.stdout)
    sys.stdout.flush()
    # Threads are still in torch, which aborts if they end abruptly.
    os._exit(0)


if __name__ == "__main__":
    main()
