"""Accuracy of a trained tail, by the encoding of its features.

    python -m benchmarks.accuracy --data DIR --json accuracy.json
    python -m benchmarks.accuracy --quick --data DIR

``DIR`` has WebDataset tars of CIFAR-10 images, ``cifar10-train-*.tar`` and
``cifar10-test-*.tar``, with classes 0 to 9 in ``.cls``.  For each seed a
ResNet-18 learns the first five classes from nothing; then it is frozen, up to
all but its head (``backbone``) or up to ``layer2`` (``inner``), and what is
behind learns the other five, from features that were encoded and decoded with
HAPI, in each number format.  lz4 and zstd lose nothing, so that with them the
figures are the same; they are not repeated.  ``torch`` is the same training by
torch alone (benchmarks/cifar.py).  A seed decides the first weights and the
order of both trainings, and all formats of a seed have the same; threads are
one.

The JSON file: ``machine``, ``versions`` and ``accuracy``:

  train, test, classes, pretrain_epochs, epochs (by kind of freeze), seeds,
  seeded        ``pretraining and transfer``: what differs between seeds
  pretrained    accuracy on the first five classes, seed by seed, 0 to 1
  freezes       by kind: module, and ``ways``: by number format, and ``torch``:
    accuracy    on the test images of the other five classes, seed by seed
    mean, low, high
    difference  to float32 of the same seed: mean, low and high
    saturated   values of the features, of all seeds, that were clipped
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import alone
from benchmarks.cifar import (
    NETWORK,
    NEW_CLASSES,
    OLD_CLASSES,
    PIXELS,
    Examples,
    accuracy_of,
    examples_of,
    features_of,
    parts_of,
    pretrained,
    train_tail,
    with_new_head,
)
from benchmarks.options import add_data, add_quick, parser_of, require_data
from benchmarks.pieces import num_frozen, pieces_of
from benchmarks.pinned import one_core
from benchmarks.tars import find_tars
from benchmarks.workloads import BACKBONE, FREEZES, INNER, NETWORKS
from torch import nn

from hapi_protocol.encodings import DTYPES
from hapi_splitter.encodings import decode, encode
from hapi_splitter.freezing.split_model import split

CIFAR_TARS = "cifar10-*.tar"
TORCH = "torch"
PLAIN = "float32"


@dataclass(frozen=True)
class Effort:
    """How much is trained.

    Attributes:
        seeds: runs.
        pretrain_epochs: on the first five classes.
        epochs: of the tail, by kind of freeze.
        most: images of each part at most; None for all.
    """

    seeds: int
    pretrain_epochs: int
    epochs: Mapping[str, int]
    most: int | None


FULL = Effort(3, 8, {BACKBONE: 20, INNER: 3}, None)
QUICK = Effort(1, 1, {BACKBONE: 1, INNER: 1}, 192)


@dataclass(frozen=True)
class Data:
    """Images of the classes that are learnt first, and of the others."""

    old_train: Examples
    old_test: Examples
    new_train: Examples
    new_test: Examples

    @classmethod
    def of(cls, tars: Sequence[Path], most: int | None) -> Data:
        """From tars whose names say ``train`` or ``test``.

        Raises:
            ValueError: naming what is missing.
        """
        found = []
        for name in ("train", "test"):
            chosen = [tar for tar in tars if name in tar.name]
            if not chosen:
                raise ValueError(
                    f"no tar is named *{name}*; those of CIFAR-10 are"
                    " cifar10-train-*.tar and cifar10-test-*.tar"
                )
            found.append(examples_of(chosen))
        train, test = found
        return cls(
            train.only(OLD_CLASSES, most),
            test.only(OLD_CLASSES, most),
            train.only(NEW_CLASSES, most),
            test.only(NEW_CLASSES, most),
        )


def measure(
    tars: Sequence[Path], *, quick: bool, note: Callable[[str], None]
) -> dict[str, Any]:
    """Accuracy of all; see the module's text for the keys.

    Args:
        tars: of CIFAR-10, training and test images.
        quick: one seed, few images and epochs, as a try.
        note: told what is being trained.

    Raises:
        ValueError: when training or test images are missing.
    """
    effort = QUICK if quick else FULL
    data = Data.of(tars, effort.most)
    first: list[float] = []
    runs: dict[str, list[dict[str, Run]]] = {kind: [] for kind in FREEZES}
    with one_core():
        for seed in range(effort.seeds):
            note(f"seed {seed}: the first five classes")
            model = pretrained(data.old_train, effort.pretrain_epochs, seed)
            first.append(accuracy_of(model, data.old_test))
            with_new_head(model, seed)
            for kind in FREEZES:
                note(f"seed {seed}: the other five, {kind} frozen")
                epochs = effort.epochs[kind]
                found = Transfer(model, kind, data, epochs, seed).run()
                runs[kind].append(found)
                note(
                    ", ".join(
                        f"{way} {run.accuracy:.1%}"
                        for way, run in found.items()
                    )
                )
    return {
        "train": len(data.new_train),
        "test": len(data.new_test),
        "classes": len(NEW_CLASSES),
        "pretrain_epochs": effort.pretrain_epochs,
        "epochs": dict(effort.epochs),
        "seeds": effort.seeds,
        "seeded": "pretraining and transfer",
        "pretrained": first,
        "freezes": {
            kind: {
                "module": NETWORKS[NETWORK].freeze[kind],
                "ways": summary(of_seeds),
            }
            for kind, of_seeds in runs.items()
        },
    }


@dataclass(frozen=True)
class Run:
    """One tail's training.

    Attributes:
        accuracy: on the test images, 0 to 1.
        saturated: values of the features that were clipped.
    """

    accuracy: float
    saturated: int = 0


@dataclass(frozen=True)
class Transfer:
    """One network, frozen at one point, in every number format.

    Args:
        model: left as it is.
        kind: of the freeze.
        data: to train with and to judge by.
        epochs: of each tail.
        seed: of their order.
    """

    model: nn.Module
    kind: str
    data: Data
    epochs: int
    seed: int

    def run(self) -> dict[str, Run]:
        """By number format, and ``torch``."""
        return {TORCH: self._plain(), **dict(self._encoded())}

    def _plain(self) -> Run:
        """With nothing of HAPI."""
        model = copy.deepcopy(self.model)
        number = num_frozen(NETWORK, self.kind, pieces_of(NETWORK, model))
        frozen, tail = parts_of(model, number)
        train, test = (
            features_of(frozen, each)
            for each in (self.data.new_train, self.data.new_test)
        )
        return Run(self._trained(tail, train, test))

    def _encoded(self) -> Iterator[tuple[str, Run]]:
        """The same with the layers and the features of a job."""
        parts = split(
            copy.deepcopy(self.model),
            NETWORKS[NETWORK].freeze[self.kind],
            sample_shape=(3, PIXELS, PIXELS),
        )
        prefix = parts.frozen.prefix(parts.frozen.num_cuts)
        first = copy.deepcopy(parts.tail.state_dict())
        train, test = (
            features_of(prefix, each)
            for each in (self.data.new_train, self.data.new_test)
        )
        for dtype in DTYPES:
            parts.tail.load_state_dict(first)
            saturated = []
            sent = []
            for each in (train, test):
                values, clipped = sent_as(dtype, each.values)
                sent.append(Examples(values, each.labels))
                saturated.append(clipped)
            yield dtype, Run(self._trained(parts.tail, *sent), sum(saturated))

    def _trained(
        self, tail: nn.Module, train: Examples, test: Examples
    ) -> float:
        train_tail(tail, train, self.epochs, self.seed)
        return accuracy_of(tail, test)


def sent_as(dtype: str, features: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What arrives of features, and how many values were clipped."""
    encoded = encode(features, dtype)
    values = decode(encoded.array, dtype, encoded.scale, encoded.zero)
    return values, encoded.saturated


def summary(runs: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """What the seeds say of each way."""
    found = {}
    for way in runs[0]:
        reached = [run[way].accuracy for run in runs]
        beside = [run[way].accuracy - run[PLAIN].accuracy for run in runs]
        found[way] = {
            "accuracy": reached,
            **mean_and_extremes(reached),
            "difference": mean_and_extremes(beside),
            "saturated": sum(run[way].saturated for run in runs),
        }
    return found


def mean_and_extremes(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.mean(values),
        "low": min(values),
        "high": max(values),
    }


def table(section: Mapping[str, Any]) -> str:
    """What :func:`measure` gave, as text."""
    return "\n".join(_lines(section))


def _lines(section: Mapping[str, Any]) -> Iterator[str]:
    first = ", ".join(f"{each:.1%}" for each in section["pretrained"])
    yield (
        f"test accuracy, {section['classes']} classes of CIFAR-10,"
        f" {section['train']} images to train and {section['test']} to test;"
        f" {section['seeds']} seeds of {section['seeded']} (the first five"
        f" classes: {first})"
    )
    yield (
        f"{'frozen':10} {'features':9} {'mean':>6} {'least to most':>17}"
        f"  {'beside float32 of the same seed':34} clipped"
    )
    for kind, freeze in section["freezes"].items():
        for way, found in freeze["ways"].items():
            beside = found["difference"]
            spread = f"{found['low']:.1%} to {found['high']:.1%}"
            points = (
                f"{100 * beside['mean']:+.2f} points"
                f" ({100 * beside['low']:+.1f} to {100 * beside['high']:+.1f})"
            )
            yield (
                f"{kind:10} {way:9} {found['mean']:6.1%} {spread:>17}"
                f"  {points:34} {found['saturated']:7d}"
            )


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("accuracy", __doc__)
    add_data(parser, images="CIFAR-10")
    add_quick(parser, "one seed, few images and epochs, as a try")
    found = parser.parse_args(argv)
    require_data(parser, found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments_of(argv)
    return alone.run(
        "accuracy",
        lambda: measure(
            find_tars(options.data, CIFAR_TARS),
            quick=options.quick,
            note=alone.note,
        ),
        table,
        settings={"quick": options.quick},
        path=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
