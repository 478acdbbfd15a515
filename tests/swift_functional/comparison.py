"""Two runs of the same tests, compared; pure.

A test that differs is run again, alone, against both clusters.  What came of
that decides, and the report tells of both times.
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
        """Whether the kinds do; reasons hold names of random containers."""
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
    """Of one suite in one layout."""

    layout: str
    suite: str
    results: Mapping[str, Result]
    """Of WITHOUT and WITH."""
    again: Mapping[str, Pair]
    """Of tests that differed at first, by test."""

    @property
    def pairs(self) -> dict[str, Pair]:
        """What was at first, by test."""
        return pairs_of(self.results)

    @property
    def differing(self) -> dict[str, Pair]:
        """What differs for good, as it was at last."""
        found = {**self.pairs, **self.again}
        return {test: pair for test, pair in found.items() if pair.differs}

    @property
    def failing(self) -> dict[str, Pair]:
        """What fails without and with the filter alike, at last."""
        found = {**self.pairs, **self.again}
        return {
            test: pair
            for test, pair in found.items()
            if pair.bad and not pair.differs
        }

    @property
    def unsteady(self) -> dict[str, Pair]:
        """What differed at first only, as it was then."""
        return {
            test: self.pairs[test]
            for test, pair in self.again.items()
            if not pair.differs
        }


def pairs_of(results: Mapping[str, Result]) -> dict[str, Pair]:
    """The outcomes of each test that any of the two runs knows."""
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
    """Compare two runs.

    Args:
        results: of WITHOUT and WITH.
        repeat: runs tests again, alone, on both sides.
    """
    comparison = Comparison(layout, suite, results, {})
    tests = list(comparison.differing)
    if not tests:
        return comparison
    return replace(comparison, again=pairs_of(repeat(tests)))


def succeeded(comparisons: Sequence[Comparison]) -> bool:
    """Whether nothing differs, and nothing fails."""
    return not any(each.differing or each.failing for each in comparisons)


def table(comparisons: Sequence[Comparison]) -> str:
    """Numbers of tests by outcome, a row for each run."""
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
    """Sentences on every test that differs, did at first, or fails."""
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
    """As ``--json`` writes it."""
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
