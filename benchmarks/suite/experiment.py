"""What an experiment is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.suite.results import Section
from benchmarks.testbed import Testbed


@dataclass(frozen=True)
class Context:
    """Of one run of one experiment.

    Attributes:
        sources: files and folders that ``--data`` names.
        tars: WebDataset tars of photographs in them.
        quick: a smoke test: fewer cells, short passes, no claims.
        rounds: interleaved passes of each contender.
        only: patterns of cells' names (as of a shell); empty for all.
        section: the experiment's part of the results; what an earlier,
            interrupted run has measured is in it.
        save: writes the results; after each round.
        note: told of the progress, a line at a time.
        testbed: makes both tiers, with options of
            :func:`benchmarks.testbed.two_tiers`; whether the link is shaped,
            and the cores and devices, are this run's.
        scale: times the samples of each data set; more than 1 on machines
            that go through an epoch before it can be measured.
        tuned: settings of opponents that another experiment has found, by
            network and opponent, as of ``grid``.
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
    scale: int = 1
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One question, with its goal.

    Attributes:
        name: key in the results.
        title: in a few words.
        keys: of its section, explained for ``--help``.
        minutes: it takes about so many on two cores.
        quick_minutes: with ``--quick``.
        measure: fills ``context.section``; the entries that are complete
            there are not measured again.
        table: of a section, for people.
        met: whether a section meets the experiment's goals, by goal; None
            where that could not be told.
        lacks_here: whether a section, though complete, was measured on other
            machines only, where that matters.
    """

    name: str
    title: str
    keys: str
    minutes: float
    quick_minutes: float
    measure: Callable[[Context], None]
    table: Callable[[Mapping[str, Any]], str]
    met: Callable[[Mapping[str, Any]], Mapping[str, bool | None]]
    lacks_here: Callable[[Mapping[str, Any]], bool] = lambda _: False


def no_goals(_: Mapping[str, Any]) -> dict[str, bool | None]:
    """``met`` of an experiment that has none."""
    return {}
