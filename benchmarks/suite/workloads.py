"""What is trained in the experiments."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cells import BACKBONE, INNER, NETWORKS
from benchmarks.opponents.training import Task

LINKS = (0.1, 0.25, 1.0, 10.0)
QUICK_WORKLOADS = ("mobilenet_v3_small/backbone",)
QUICK_LINKS = (0.25, 10.0)


@dataclass(frozen=True)
class Volume:
    """Of a data set.

    Attributes:
        samples: of an epoch.
        shard_samples: of one shard; each is one span.
    """

    samples: int
    shard_samples: int

    def times(self, scale: int) -> Volume:
        """More shards, as large."""
        return Volume(scale * self.samples, self.shard_samples)


LONG = "long"
SHORT, SHORTEST = "short", "shortest"
"""Where a link carries less than streaming could use, what streams goes at
the link's rate, evenly, and an epoch of fewer samples tells that as well, if
it takes twenty seconds or more: what computes spans has one left when the last
byte is there.  The shortest where it carries less than
:data:`SHORTEST_BELOW`."""
SHORTEST_BELOW = 0.2

LONG_VOLUMES: Mapping[tuple[str, str], Volume] = {
    ("mobilenet_v3_small", BACKBONE): Volume(1920, 32),
    ("mobilenet_v3_small", INNER): Volume(960, 32),
    ("resnet18", BACKBONE): Volume(384, 8),
    ("resnet18", INNER): Volume(192, 8),
    ("vit_b_16", BACKBONE): Volume(128, 8),
    ("vit_b_16", INNER): Volume(64, 8),
}
"""Ten to twenty seconds for those who stream without a limit; in shorter
epochs filling and draining the pipeline would count too much, and shards that
take half a second each way do the same."""
SHORT_VOLUMES: Mapping[str, Volume] = {
    "mobilenet_v3_small": Volume(192, 32),
    "resnet18": Volume(96, 8),
    "vit_b_16": Volume(48, 8),
}
SHORTEST_VOLUMES: Mapping[str, Volume] = {
    "mobilenet_v3_small": Volume(96, 32),
    "resnet18": Volume(32, 8),
    "vit_b_16": Volume(16, 8),
}
LARGE = {("resnet18", INNER), ("vit_b_16", INNER)}
"""Features there are larger than photographs: on a slow link, what is pushed
is no faster than what is streamed."""


@dataclass(frozen=True)
class Workload:
    """A network and a freeze point.

    Attributes:
        model: in :data:`benchmarks.cells.NETWORKS`.
        freeze: ``backbone`` or ``inner``.
    """

    model: str
    freeze: str

    @property
    def name(self) -> str:
        return f"{self.model}/{self.freeze}"

    @property
    def task(self) -> Task:
        network = NETWORKS[self.model]
        return Task(
            model=self.model,
            freeze=self.freeze,
            batch_size=network.batch_size,
            resize_size=network.resize_size,
            crop_size=network.crop_size,
        )

    @property
    def freeze_module(self) -> str:
        return NETWORKS[self.model].freeze[self.freeze]

    @property
    def volumes(self) -> Mapping[str, Volume]:
        """Of each data set."""
        return {
            LONG: LONG_VOLUMES[self.model, self.freeze],
            SHORT: SHORT_VOLUMES[self.model],
            SHORTEST: SHORTEST_VOLUMES[self.model],
        }

    def pushed(self, streamed: str) -> str:
        """Size of the data set of those that may push.

        Args:
            streamed: size of that of those that only stream.
        """
        return streamed if (self.model, self.freeze) in LARGE else LONG

    def container(self, size: str) -> str:
        """Of the model's data set of that size."""
        return f"{self.model}-{size}".replace("_", "-")


WORKLOADS = tuple(Workload(*each) for each in LONG_VOLUMES)


def is_slow(link: float | None) -> bool:
    """Whether it carries less than streaming could use."""
    return link is not None and link < 1


def streamed(link: float | None) -> str:
    """Size of the data set of those that only stream."""
    if link is None or not is_slow(link):
        return LONG
    return SHORTEST if link < SHORTEST_BELOW else SHORT


def cell_name(workload: Workload, link: float | None) -> str:
    """``resnet18/backbone/0.25``."""
    shown = "unshaped" if link is None else f"{link:g}"
    return f"{workload.name}/{shown}"


def chosen(
    patterns: Sequence[str], *, quick: bool, shaped: bool
) -> list[tuple[Workload, float | None]]:
    """Cells: workloads and links.

    Args:
        patterns: as of a shell, ``resnet18/*/0.25``; empty for all, or for
            those of the smoke test.
        quick: the smoke test.
        shaped: without, there is one link.

    Raises:
        ValueError: no cell matches any pattern.
    """
    links: Sequence[float | None] = LINKS if shaped else (None,)
    if quick and shaped:
        links = QUICK_LINKS
    workloads = [
        workload
        for workload in WORKLOADS
        if patterns or not quick or workload.name in QUICK_WORKLOADS
    ]
    found = [
        (workload, link)
        for workload, link in itertools.product(workloads, links)
        if not patterns
        or any(
            fnmatch.fnmatchcase(cell_name(workload, link), pattern)
            for pattern in patterns
        )
    ]
    if not found:
        raise ValueError(
            f"no cell matches {' '.join(patterns)}; a cell is a network, a"
            " freeze point and a link, such as"
            f" {cell_name(WORKLOADS[0], links[0])}"
        )
    return found
