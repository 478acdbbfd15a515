"""Definition of an experiment and of its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import Section
from benchmarks.testbed.two_tiers import Testbed


@dataclass(frozen=True)
class Context:
    """Input of one run of an experiment.

    Attributes:
        sources, tars: of ``--data``, and the photographs' tars in them.
        quick: smoke test with fewer cells and short epochs.
        rounds: interleaved measurements of each contender.
        only: shell patterns of cells' names; empty for all.
        section: the experiment's part of the record; may have entries.
        save: writes the record; called after each round.
        note: prints a line of progress.
        testbed: starts both tiers, with options of
            :func:`benchmarks.testbed.two_tiers.two_tiers`.
        scale: multiplies the samples of each data set.
        tuned: settings of opponents by network, of an earlier grid.
    """

    sources: Sequence[Path]
    tars: Sequence[Path]
    quick: bool
    rounds: int
    only: Sequence[str]
    section: Section
    save: Callable[[], None]
    note: Callable[[str], None]
    testbed: Callable[..., AbstractContextManager[Testbed]]
    scale: float = 1
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One question, measured into one section of the record.

    ``minutes`` are approximate, on two cores; ``measure`` keeps complete
    entries; ``goals`` of a section are None if not measured.
    """

    name: str
    title: str
    minutes: float
    quick_minutes: float
    measure: Callable[[Context], None]
    goals: Callable[[Mapping[str, Any]], dict[str, bool | None]]


def no_goals(_: Mapping[str, Any]) -> dict[str, bool | None]:
    """``goals`` of an experiment without any."""
    return {}
