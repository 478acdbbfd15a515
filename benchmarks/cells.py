"""What ``benchmarks.splits`` measures: networks, freeze points, links."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.workloads import BACKBONE, INNER, NETWORKS, Network

from hapi_client.loading.prefetcher import ReadConfig

LINKS = (0.25, 2.0)

# A narrow shuffle buffer: it is the steady state that is wanted, and a wide
# one takes long to fill.
FETCH_OPTIONS = ReadConfig(buffer_spans=1)


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        model: a name in :data:`NETWORKS`.
        freeze: ``backbone`` or ``inner``.
        link: rate as a multiple of the byte rate at which streaming
            saturates the client; None for an unshaped link.
    """

    model: str
    freeze: str
    link: float | None

    @property
    def network(self) -> Network:
        return NETWORKS[self.model]

    @property
    def freeze_module(self) -> str:
        return self.network.freeze[self.freeze]

    @property
    def samples(self) -> int:
        """Of one pass: fewer where even the fastest contender is slow."""
        network = self.network
        if self.freeze == BACKBONE:
            return network.samples
        return network.slow_samples if self.slow else network.inner_samples

    @property
    def slow(self) -> bool:
        """Whether the link carries less than streaming could use."""
        return self.link is not None and self.link < 1

    @property
    def workload(self) -> str:
        """What is trained, whatever the link: ``resnet18/backbone``."""
        return f"{self.model}/{self.freeze}"

    @property
    def name(self) -> str:
        link = "unshaped" if self.link is None else f"{self.link:g}"
        return f"{self.workload}/{link}"


def all_cells(*, shaped: bool) -> list[Cell]:
    """Every cell; without shaping there is one link."""
    links = LINKS if shaped else (None,)
    return [
        Cell(model, freeze, link)
        for model, freeze, link in itertools.product(
            NETWORKS, (BACKBONE, INNER), links
        )
    ]


QUICK = ("mobilenet_v3_small/*",)


def chosen_cells(patterns: Sequence[str], *, shaped: bool) -> list[Cell]:
    """The cells whose name matches one of ``patterns``.

    Args:
        patterns: as of a shell, ``resnet18/*/0.25``; empty for all.
        shaped: see :func:`all_cells`.

    Raises:
        ValueError: naming a pattern that no cell matches.
    """
    cells = all_cells(shaped=shaped)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(c.name, pattern) for c in cells):
            raise ValueError(
                f"no cell matches {pattern!r}; there are"
                f" {', '.join(cell.name for cell in cells)}"
            )
    return [
        cell
        for cell in cells
        if not patterns
        or any(fnmatch.fnmatchcase(cell.name, p) for p in patterns)
    ]
