"""Accuracy of a trained tail, by the encoding of its features.

``--data`` has WebDataset tars of CIFAR-10, ``cifar10-train-*.tar`` and
``cifar10-test-*.tar``, with classes 0 to 9 in ``.cls``.  For each seed a
ResNet-18 learns the first five classes; then it is frozen, up to all but its
head (``backbone``) or up to ``layer2`` (``inner``), and the rest learns the
other five classes from features that HAPI has encoded and decoded.  Lossless
compression changes nothing and is not repeated.  ``torch`` is the same
training without HAPI.  All encodings of a seed begin with the same weights and
have the same order.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.micro.cifar import (
    NETWORK,
    NEW_CLASSES,
    OLD_CLASSES,
    PIXELS,
    Examples,
    accuracy_of,
    examples_of,
    features_of,
    pretrained,
    train_tail,
    with_new_head,
)
from benchmarks.networks import BACKBONE, FREEZES, INNER, NETWORKS
from benchmarks.networks import split as split_by_hand
from benchmarks.suite.experiment import Context, Experiment, no_goals
from benchmarks.testbed.shards import find_tars
from hapi_protocol.encodings import DTYPES
from hapi_splitter.encodings import decode, encode
from hapi_splitter.freezing.split_model import split

CIFAR_TARS = "cifar10-*.tar"
TORCH = "torch"
PLAIN = "float32"


@dataclass(frozen=True)
class Effort:
    """Amount of training; ``epochs`` are those of the tail, by freeze."""

    seeds: int
    pretrain_epochs: int
    epochs: Mapping[str, int]
    max_images: int | None


FULL = Effort(3, 8, {BACKBONE: 20, INNER: 3}, None)
QUICK = Effort(1, 1, {BACKBONE: 1, INNER: 1}, 192)


def measure(
    tars: Sequence[Path], *, quick: bool, note: Callable[[str], None]
) -> dict[str, Any]:
    """Trains all tails, on one thread.

    Returns:
        Sizes and epochs; ``pretrained``, the accuracy on the first classes by
        seed; ``freezes``, of each kind the ``ways``: accuracy by encoding.

    Raises:
        ValueError: training or test images are missing.
    """
    effort = QUICK if quick else FULL
    train, test = (examples_of(tars, name) for name in ("train", "test"))
    old_train = train.only(OLD_CLASSES, effort.max_images)
    old_test = test.only(OLD_CLASSES, effort.max_images)
    new = [data.only(NEW_CLASSES, effort.max_images) for data in (train, test)]
    torch.set_num_threads(1)
    first: list[float] = []
    reached: dict[str, dict[str, list[float]]] = {k: {} for k in FREEZES}
    for seed in range(effort.seeds):
        note(f"seed {seed}: first five classes")
        model = pretrained(old_train, effort.pretrain_epochs, seed)
        first.append(accuracy_of(model, old_test))
        with_new_head(model, seed)
        for kind in FREEZES:
            note(f"seed {seed}: other five classes, {kind} frozen")
            result = transfer(model, kind, new, effort.epochs[kind], seed)
            for name, accuracy in result.items():
                reached[kind].setdefault(name, []).append(accuracy)
    return {
        "train": len(new[0].labels),
        "test": len(new[1].labels),
        "classes": len(NEW_CLASSES),
        "pretrain_epochs": effort.pretrain_epochs,
        "epochs": dict(effort.epochs),
        "seeds": effort.seeds,
        "seeded": "pretraining and transfer",
        "pretrained": first,
        "freezes": {
            kind: {
                "module": NETWORKS[NETWORK].freeze[kind],
                "ways": summarise(by_name),
            }
            for kind, by_name in reached.items()
        },
    }


def transfer(
    model: nn.Module,
    kind: str,
    data: Sequence[Examples],
    epochs: int,
    seed: int,
) -> dict[str, float]:
    """Trains a tail of a network with each encoding.

    ``data`` is to train with, and to test with; the model is not changed.

    Returns:
        Accuracy by encoding, and of ``torch``.
    """

    def trained(tail: nn.Module, train: Examples, test: Examples) -> float:
        train_tail(tail, train, epochs, seed)
        return accuracy_of(tail, test)

    frozen, tail = split_by_hand(NETWORK, kind, copy.deepcopy(model))
    parts = [features_of(frozen, part) for part in data]
    results = {TORCH: trained(tail, *parts)}
    pushed = split(
        copy.deepcopy(model),
        NETWORKS[NETWORK].freeze[kind],
        sample_shape=(3, PIXELS, PIXELS),
    )
    prefix = pushed.frozen.prefix(pushed.frozen.num_cuts)
    parts = [features_of(prefix, part) for part in data]
    first = copy.deepcopy(pushed.tail.state_dict())
    for dtype in DTYPES:
        pushed.tail.load_state_dict(first)
        results[dtype] = trained(
            pushed.tail, *(received_as(dtype, part) for part in parts)
        )
    return results


def received_as(dtype: str, examples: Examples) -> Examples:
    """Features after encoding and decoding."""
    encoded = encode(examples.values, dtype)
    values = decode(encoded.array, dtype, encoded.scale, encoded.zero)
    return Examples(values, examples.labels)


def summarise(reached: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Accuracy by encoding over the seeds, and relative to float32."""
    return {
        name: {
            "accuracy": list(values),
            **mean_and_range(values),
            "difference": mean_and_range(
                [a - b for a, b in zip(values, reached[PLAIN], strict=True)]
            ),
        }
        for name, values in reached.items()
    }


def mean_and_range(values: Sequence[float]) -> dict[str, float]:
    """``mean``, ``low`` and ``high``."""
    mean = statistics.mean(values)
    return {"mean": mean, "low": min(values), "high": max(values)}


def _measure_section(context: Context) -> None:
    tars = [
        tar
        for tar in find_tars(context.sources, CIFAR_TARS)
        if tar.match(CIFAR_TARS)
    ]
    if not tars:
        context.section["absent"] = f"--data has no {CIFAR_TARS}"
        context.note(f"not measured: {context.section['absent']}")
        return
    context.section.update(
        measure(tars, quick=context.quick, note=context.note)
    )


EXPERIMENT = Experiment(
    name="accuracy",
    title="Test accuracy of a tail on CIFAR-10, by encoding of its features",
    minutes=5,
    quick_minutes=1,
    measure=_measure_section,
    goals=no_goals,
)
