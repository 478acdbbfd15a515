"""Comparison of two runs of the same tests.  No I/O.

A test that differs is run again, alone, against both clusters.  The second
outcome decides, and the report shows both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

WITHOUT, WITH = "without", "with"
SIDES = (WITHOUT, WITH)
KINDS = ("passed", "skipped", "xfailed", "error", "failed")
"""Kinds of outcomes, best first; ``error``: in setup or teardown."""
HEADER: tuple[str, ...] = ("layout", "suite", "filter", *KINDS, "seconds")
ROW = "{:15}{:11}{:9}" + "{:>9}" * 6


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test."""

    kind: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


@dataclass(frozen=True)
class Result:
    """Outcomes of the tests of one run, by their ids."""

    outcomes: Mapping[str, Outcome]
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        """The number of tests of each kind, in the order of KINDS."""
        found = Counter(each.kind for each in self.outcomes.values())
        return {kind: found[kind] for kind in KINDS}


Pair = Mapping[str, Outcome]
"""Outcomes of one test by side."""


def differs(pair: Pair) -> bool:
    """True if the kinds differ; reasons contain random names."""
    return pair[WITHOUT].kind != pair[WITH].kind


@dataclass(frozen=True)
class Comparison:
    """Comparison of one suite in one layout.

    Attributes:
        layout: name of the layout.
        suite: name of the suite.
        results: results of WITHOUT and WITH.
        first: outcomes of the first run, by test.
        again: second outcomes of the tests that differed in the first run.
    """

    layout: str
    suite: str
    results: Mapping[str, Result]
    first: Mapping[str, Pair]
    again: Mapping[str, Pair]

    @property
    def differing(self) -> list[str]:
        """Tests whose final outcomes differ."""
        return [test for test, pair in self._final.items() if differs(pair)]

    @property
    def failing(self) -> list[str]:
        """Tests that finally fail on both sides."""
        return [
            test
            for test, pair in self._final.items()
            if not differs(pair) and pair[WITH].kind in ("failed", "error")
        ]

    @property
    def unsteady(self) -> list[str]:
        """Tests that differed in the first run only."""
        return [test for test, pair in self.again.items() if not differs(pair)]

    @property
    def _final(self) -> dict[str, Pair]:
        return {**self.first, **self.again}

    def remarks(self) -> list[str]:
        """Lines about every test that differs, differed once, or fails."""
        lines = []
        for what, tests in {
            "differs": self.differing,
            "differed at first, but not alone": self.unsteady,
            "fails without the filter as well": self.failing,
        }.items():
            for test in tests:
                lines.append(f"{self.layout}, {test} {what}")
                for time, pairs in ("", self.first), ("alone, ", self.again):
                    for side, outcome in pairs.get(test, {}).items():
                        lines.append(f"    {time}{side}: {outcome}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON, for ``--json``."""
        results = self.results.items()
        return {
            "layout": self.layout,
            "suite": self.suite,
            "seconds": {
                side: round(each.seconds, 1) for side, each in results
            },
            "counts": {side: each.counts for side, each in results},
            "differing": self.differing,
            "failing": self.failing,
            "unsteady": self.unsteady,
            "tests": _to_json(self.first),
            "again": _to_json(self.again),
        }


def _to_json(pairs: Mapping[str, Pair]) -> dict[str, Any]:
    return {
        test: {side: vars(outcome) for side, outcome in pair.items()}
        for test, pair in pairs.items()
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
    first = _pairs_of(results)
    comparison = Comparison(layout, suite, results, first, {})
    if comparison.differing:
        again = _pairs_of(repeat(comparison.differing))
        return replace(comparison, again=again)
    return comparison


def _pairs_of(results: Mapping[str, Result]) -> dict[str, Pair]:
    """The outcomes of each test of either run."""
    sides = {side: results[side].outcomes for side in SIDES}
    absent = Outcome("absent")
    return {
        test: {side: sides[side].get(test, absent) for side in SIDES}
        for test in sorted({*sides[WITHOUT], *sides[WITH]})
    }


def succeeded(comparisons: Sequence[Comparison]) -> bool:
    """Returns True if nothing differs and nothing fails."""
    return not any(each.differing or each.failing for each in comparisons)


def table(comparisons: Sequence[Comparison]) -> str:
    """A table of the number of tests by outcome, one row per run."""
    rows = [HEADER]
    for each in comparisons:
        for side, result in each.results.items():
            counts = map(str, result.counts.values())
            seconds = f"{result.seconds:.0f}"
            rows.append((each.layout, each.suite, side, *counts, seconds))
    return "\n".join(ROW.format(*row) for row in rows)
