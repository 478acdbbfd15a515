"""Outcomes of the tests of one run, from the outcomes of their phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("passed", "skipped", "xfailed", "error", "failed", "unfinished")
"""Kinds of outcomes, best first.  ``error``: a failure in setup or teardown;
``unfinished``: pytest ended before the selected test did."""
BAD = ("failed", "error", "unfinished")


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test."""

    kind: str
    reason: str = ""

    @property
    def bad(self) -> bool:
        return self.kind in BAD

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


UNFINISHED = Outcome("unfinished")
ABSENT = Outcome("absent")
"""Outcome of a test that one of two runs does not have."""


@dataclass
class Record:
    """Events of a run so far.

    Attributes:
        broken: modules that could not be imported, with the reason.
        selected: ids of the selected tests.
    """

    broken: dict[str, str] = field(default_factory=dict)
    selected: list[str] = field(default_factory=list)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)

    def take(self, event: Mapping[str, Any]) -> None:
        if "selected" in event:
            self.selected = list(event["selected"])
        elif "broken" in event:
            self.broken[event["broken"]] = event["reason"]
        else:
            self._take_phase(event)

    def _take_phase(self, event: Mapping[str, Any]) -> None:
        test, kind = event["test"], event["outcome"]
        if kind == "failed" and event["phase"] != "call":
            kind = "error"
        known = self._outcomes.get(test)
        # The worst phase counts; the first of equals.
        if known is None or KINDS.index(kind) > KINDS.index(known.kind):
            self._outcomes[test] = Outcome(kind, event["reason"])
        if event["phase"] == "teardown":
            self._ended.add(test)

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    @property
    def num_bad(self) -> int:
        return sum(self._outcomes[test].bad for test in self._ended)

    def outcomes(self) -> dict[str, Outcome]:
        """Outcome of each selected test."""
        return {
            test: self._outcomes[test] if test in self._ended else UNFINISHED
            for test in self.selected
        }


def counts(outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    """The number of tests of each kind, in the order of KINDS."""
    found = Counter(outcome.kind for outcome in outcomes.values())
    return {kind: found[kind] for kind in KINDS}
