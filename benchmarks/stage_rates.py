"""Seconds of each stage of transfer learning, with torch and plain loops.

Eager torchvision modules and JPEGs in memory; it imports nothing of HAPI, and
nothing is overlapped.  Seconds are CPU seconds of the one thread, so that what
other processes take of its core does not count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.pieces import SpanSlice, built, num_frozen, pieces_of
from benchmarks.preset import Preset
from benchmarks.spread import spread
from benchmarks.workloads import FREEZES, NETWORKS, Network
from torch import nn
from torchvision.io import ImageReadMode, decode_jpeg

NUM_CLASSES = 1000
LEARNING_RATE = 1e-4
MOMENTUM = 0.9
FLOAT32_BYTES = 4

clock = time.thread_time


@dataclass
class Rounds:
    """Seconds per sample, round by round.

    Attributes:
        decode: of decoding and transform.
        prefix: by boundary, of all pieces up to there, without gradients.
        train: by kind of freeze, of a training step of what follows it.
    """

    decode: list[float] = field(default_factory=list)
    prefix: list[list[float]] = field(default_factory=list)
    train: dict[str, list[float]] = field(
        default_factory=lambda: {kind: [] for kind in FREEZES}
    )


class Stages:
    """Measures one network of :data:`benchmarks.workloads.NETWORKS`.

    Args:
        name: of the network.
        jpegs: each is decoded once a round.
        steps: batches of each other stage in a round.
    """

    def __init__(
        self, name: str, jpegs: Sequence[bytearray], steps: int
    ) -> None:
        self.network: Network = NETWORKS[name]
        self.pieces = pieces_of(name, built(name))
        self.frozen = {
            kind: num_frozen(name, kind, self.pieces) for kind in FREEZES
        }
        self.shapes: list[tuple[int, ...]] = []
        count = max(len(jpegs), self.network.batch_size)
        self._jpegs = list(itertools.islice(itertools.cycle(jpegs), count))
        self._steps = steps
        self._preset = Preset(self.network.resize_size, self.network.crop_size)
        self._labels = torch.arange(self.network.batch_size) % NUM_CLASSES

    def measure(self, rounds: int) -> Rounds:
        """So many rounds, after one to warm up."""
        self._round(Rounds())
        found = Rounds()
        for _ in range(rounds):
            self._round(found)
        return found

    def _round(self, found: Rounds) -> None:
        images, seconds = self._decode()
        found.decode.append(seconds)
        inputs = self._pass(images, found)
        for kind, position in self.frozen.items():
            found.train[kind].append(self._train(position, inputs[position]))

    def _decode(self) -> tuple[torch.Tensor, float]:
        """The first batch, and seconds a sample of decoding all."""
        size = self.network.crop_size
        batches = [
            torch.empty((self.network.batch_size, 3, size, size))
            for _ in range(2)
        ]
        rows = itertools.chain(batches[0], itertools.cycle(batches[1]))
        started = clock()
        for jpeg, row in zip(self._jpegs, rows, strict=False):
            data = torch.frombuffer(jpeg, dtype=torch.uint8)
            row.copy_(self._preset(decode_jpeg(data, ImageReadMode.RGB)))
        seconds = clock() - started
        return batches[0], seconds / len(self._jpegs)

    def _pass(self, images: torch.Tensor, found: Rounds) -> list[torch.Tensor]:
        """What each piece of the backbone gets, the head included."""
        for piece in self.pieces:
            piece.module.eval()
        backbone = self.pieces[:-1]
        sums = [0.0] * len(backbone)
        for _ in range(self._steps):
            marks, inputs = timed_pass(backbone, images)
            sums = [a + b for a, b in zip(sums, marks, strict=True)]
        per_sample = 1 / (self._steps * len(images))
        found.prefix.append([each * per_sample for each in sums])
        self.shapes = [tuple(each.shape[1:]) for each in inputs[1:]]
        return inputs

    def _train(self, position: int, features: torch.Tensor) -> float:
        tail = nn.Sequential(*(p.module for p in self.pieces[position:]))
        tail.train()
        optimizer = torch.optim.SGD(
            tail.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        criterion = nn.CrossEntropyLoss()
        # The first step allocates what the optimizer keeps.
        for step in range(self._steps + 1):
            if step == 1:
                started = clock()
            loss = criterion(tail(features), self._labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (clock() - started) / (self._steps * len(features))


def timed_pass(
    pieces: Sequence[SpanSlice], images: torch.Tensor
) -> tuple[list[float], list[torch.Tensor]]:
    """Seconds up to the end of each piece, and all inputs and the output."""
    values = [images]
    marks = []
    with torch.no_grad():
        started = clock()
        for piece in pieces:
            values.append(piece.module(values[-1]))
            marks.append(clock() - started)
    return marks, values


def describe(stages: Stages, rounds: Rounds) -> dict[str, Any]:
    """What :mod:`benchmarks.stages` documents of a network."""
    return {
        "batch": stages.network.batch_size,
        "decode_seconds": spread(rounds.decode),
        "boundaries": list(_boundaries(stages, rounds)),
        "freezes": {
            kind: {
                "module": stages.network.freeze[kind],
                "boundary": stages.pieces[position - 1].name,
                "train_seconds": spread(rounds.train[kind]),
            }
            for kind, position in stages.frozen.items()
        },
    }


def _boundaries(stages: Stages, rounds: Rounds) -> Iterator[Mapping[str, Any]]:
    for number, shape in enumerate(stages.shapes):
        num_values = torch.Size(shape).numel()
        yield {
            "name": stages.pieces[number].name,
            "shape": list(shape),
            "float32_bytes": FLOAT32_BYTES * num_values,
            "prefix_seconds": spread([each[number] for each in rounds.prefix]),
            "rest_seconds": {
                kind: spread(
                    [
                        each[position - 1] - each[number]
                        for each in rounds.prefix
                    ]
                )
                for kind, position in stages.frozen.items()
                if number < position
            },
        }
