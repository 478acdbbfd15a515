"""Comparison of two runs of the same tests.  No I/O.

A test that differs is run again, alone, against both clusters.  The second
outcome decides, and the report shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_functional.outcomes import ABSENT, KINDS, Outcome, counts
from swift_functional.runs import Result

WITHOUT, WITH = "without", "with"
SIDES = (WITHOUT, WITH)
HEADER = ("layout", "suite", "filter", *KINDS, "seconds")


@dataclass(frozen=True)
class Pair:
    """The outcomes of one test without and with the filter."""

    without: Outcome
    with_filter: Outcome

    @property
    def differs(self) -> bool:
        """True if the kinds differ; reasons contain random names."""
        return self.without.kind != self.with_filter.kind

    @property
    def bad(self) -> bool:
        return self.without.bad or self.with_filter.bad

    def to_json(self) -> dict[str, Any]:
        return {
            WITHOUT: vars(self.without),
            WITH: vars(self.with_filter),
        }


@dataclass(frozen=True)
class Comparison:
    """Comparison of one suite in one layout.

    Attributes:
        layout: name of the layout.
        suite: name of the suite.
        results: results of WITHOUT and WITH.
        again: second outcomes of the tests that differed in the first run.
    """

    layout: str
    suite: str
    results: Mapping[str, Result]
    again: Mapping[str, Pair]

    @property
    def pairs(self) -> dict[str, Pair]:
        """Outcomes of the first run, by test."""
        return pairs_of(self.results)

    @property
    def differing(self) -> dict[str, Pair]:
        """Tests whose final outcomes differ."""
        final = {**self.pairs, **self.again}
        return {test: pair for test, pair in final.items() if pair.differs}

    @property
    def failing(self) -> dict[str, Pair]:
        """Tests that finally fail on both sides."""
        final = {**self.pairs, **self.again}
        return {
            test: pair
            for test, pair in final.items()
            if pair.bad and not pair.differs
        }

    @property
    def unsteady(self) -> dict[str, Pair]:
        """First outcomes of the tests that differed in the first run only."""
        return {
            test: self.pairs[test]
            for test, pair in self.again.items()
            if not pair.differs
        }


def pairs_of(results: Mapping[str, Result]) -> dict[str, Pair]:
    """The outcomes of each test of either run."""
    without, with_filter = (results[side].outcomes for side in SIDES)
    return {
        test: Pair(without.get(test, ABSENT), with_filter.get(test, ABSENT))
        for test in sorted({*without, *with_filter})
    }


def compare(
    layout: str,
    suite: str,
    results: Mapping[str, Result],
    repeat: Callable[[Sequence[str]], Mapping[str, Result]],
) -> Comparison:
    """Compares two runs.

    Args:
        layout: name of the layout.
        suite: name of the suite.
        results: results of WITHOUT and WITH.
        repeat: runs tests again, alone, on both sides.
    """
    comparison = Comparison(layout, suite, results, {})
    tests = list(comparison.differing)
    if not tests:
        return comparison
    return replace(comparison, again=pairs_of(repeat(tests)))


def succeeded(comparisons: Sequence[Comparison]) -> bool:
    """Returns True if nothing differs and nothing fails."""
    return not any(each.differing or each.failing for each in comparisons)


def table(comparisons: Sequence[Comparison]) -> str:
    """A table of the number of tests by outcome, one row per run."""
    rows = [HEADER, *(row for each in comparisons for row in _rows(each))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < 3 else cell.rjust(width)
            for number, (cell, width) in enumerate(
                zip(row, widths, strict=True)
            )
        ).rstrip()
        for row in rows
    )


def _rows(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            comparison.layout,
            comparison.suite,
            side,
            *map(str, counts(result.outcomes).values()),
            f"{result.seconds:.0f}",
        )
        for side, result in comparison.results.items()
    ]


def remarks(comparisons: Sequence[Comparison]) -> list[str]:
    """Lines about every test that differs, differed once, or fails."""
    return [
        line
        for each in comparisons
        for line in (
            *_lines(each, "differs", each.differing),
            *_lines(each, "differed at first, but not alone", each.unsteady),
            *_lines(each, "fails without the filter as well", each.failing),
        )
    ]


def _lines(
    comparison: Comparison, what: str, tests: Mapping[str, Pair]
) -> list[str]:
    lines = []
    for test in tests:
        lines.append(f"{comparison.layout}, {test} {what}")
        times = {"": comparison.pairs[test]}
        if test in comparison.again:
            times["alone, "] = comparison.again[test]
        for time, pair in times.items():
            lines.append(f"    {time}without: {pair.without}")
            lines.append(f"    {time}with:    {pair.with_filter}")
    return lines


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON, for ``--json``."""
    return {
        "layout": comparison.layout,
        "suite": comparison.suite,
        "seconds": {
            side: round(result.seconds, 1)
            for side, result in comparison.results.items()
        },
        "counts": {
            side: counts(result.outcomes)
            for side, result in comparison.results.items()
        },
        "differing": sorted(comparison.differing),
        "failing": sorted(comparison.failing),
        "unsteady": sorted(comparison.unsteady),
        "tests": {
            test: pair.to_json() for test, pair in comparison.pairs.items()
        },
        "again": {
            test: pair.to_json() for test, pair in comparison.again.items()
        },
    }
