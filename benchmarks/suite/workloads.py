"""Workloads: networks with freeze points, sizes of their data, and links."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.networks import BACKBONE, INNER, NETWORKS
from benchmarks.opponents.training import Task
from benchmarks.record import matching

LINKS = (0.25, 1.0, 10.0)
"""Rates as multiples of what saturates the client's tar stream."""
QUICK_WORKLOADS = ("mobilenet_v3_small/backbone",)
QUICK_LINKS = (0.25,)
Link = float | None
"""A multiple of the saturating rate; None for an unshaped link."""


MIN_SHARDS = 8
"""A shard takes one route: with fewer there is no mix of routes."""


@dataclass(frozen=True)
class Volume:
    """Size of a data set; each of its shards is one span."""

    samples: int
    shard_samples: int

    def times(self, scale: float) -> Volume:
        """More or fewer shards of the same size, but at least eight."""
        shards = self.samples // self.shard_samples
        count = max(min(MIN_SHARDS, shards), round(scale * shards))
        return Volume(count * self.shard_samples, self.shard_samples)


LONG = "long"
SHORT = "short"
"""Size for links below 1: streaming runs at the link's rate, evenly, and a
short epoch shows that if it takes twenty seconds."""

LONG_VOLUMES: Mapping[tuple[str, str], Volume] = MappingProxyType(
    {
        ("mobilenet_v3_small", BACKBONE): Volume(1920, 32),
        ("mobilenet_v3_small", INNER): Volume(960, 32),
        ("resnet18", BACKBONE): Volume(384, 8),
        ("resnet18", INNER): Volume(192, 8),
        ("vit_b_16", BACKBONE): Volume(128, 8),
    }
)
"""Five to twenty seconds of streaming without a limit: in shorter epochs
filling and draining the pipeline would count too much."""
QUICK_VOLUME = Volume(64, 16)
SHORT_VOLUMES: Mapping[str, Volume] = MappingProxyType(
    {
        "mobilenet_v3_small": Volume(192, 32),
        "resnet18": Volume(96, 8),
        "vit_b_16": Volume(48, 8),
    }
)
LARGE = frozenset({("resnet18", INNER)})
"""Workloads whose features are larger than photographs: on a slow link they
are streamed."""


@dataclass(frozen=True)
class Workload:
    """A network of :data:`NETWORKS` and a freeze point (``backbone`` ...)."""

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
        """Volume of each size."""
        return {
            LONG: LONG_VOLUMES[self.model, self.freeze],
            SHORT: SHORT_VOLUMES[self.model],
        }

    def pushed_size(self, streamed_size: str) -> str:
        """Size of the data set of contenders that may push down."""
        large = (self.model, self.freeze) in LARGE
        return streamed_size if large else LONG

    def container(self, size: str) -> str:
        """Name of the container of a data set."""
        return f"{self.model}-{size}".replace("_", "-")


WORKLOADS = tuple(Workload(*volume) for volume in LONG_VOLUMES)


def is_slow(link: Link) -> bool:
    """True if a link carries less than streaming could use."""
    return link is not None and link < 1


def streamed_size(link: Link) -> str:
    """Size of the data set of contenders that only stream."""
    return SHORT if is_slow(link) else LONG


def cell_name(workload: Workload, link: Link) -> str:
    """Name of a cell, such as ``resnet18/backbone/0.25``."""
    shown = "unshaped" if link is None else f"{link:g}"
    return f"{workload.name}/{shown}"


def cells_of(
    patterns: Sequence[str],
    *,
    quick: bool,
    shaped: bool,
    links: Sequence[float] = LINKS,
) -> dict[str, tuple[Workload, Link]]:
    """Workload and link of each cell to measure, by name.

    Args:
        patterns: of a shell, ``resnet18/*/0.25``; empty for all cells, or for
            those of the smoke test.
        quick: the smoke test.
        shaped: False if the link cannot be set.
        links: of all cells.

    Raises:
        ValueError: no cell matches.
    """
    small = quick and not patterns
    rates: Sequence[Link] = QUICK_LINKS if small else links
    every = {
        cell_name(workload, link): (workload, link)
        for workload, link in itertools.product(
            WORKLOADS, rates if shaped else (None,)
        )
        if not small or workload.name in QUICK_WORKLOADS
    }
    names = matching(every, patterns)
    if not names:
        raise ValueError(
            f"no cell matches {' '.join(patterns)}; cells are"
            f" {', '.join(every)}"
        )
    return {name: every[name] for name in names}
