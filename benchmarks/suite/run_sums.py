"""What whole runs say, by contender, over rounds and epochs (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from benchmarks.suite.contenders import EXTERNALS

STREAM = "stream"
AUTO = "auto"
AUTO_ONCE = "auto-1"
"""``auto`` that is told of one epoch, and runs one."""
CACHED = "freeze-cache"
AUTO_CACHED = "auto-cache"
KEPT_LOCALLY = "local-features"
BESIDE = ("mosaic", KEPT_LOCALLY, "tar-stream-resized")
"""Whose second epoch stands beside ours, as it is."""
CONVERSIONS = {"mosaic": "mds", "tar-stream-resized": "resized"}
"""What a user has to make once, of tars that are in Swift."""
INDEX = "index"

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Of each contender, a run by round: ``before`` and ``epochs``."""


def epoch_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Amounts of a whole epoch, from those of a sample.

    The package's bytes are apart from the other ones.
    """
    samples = found["samples"]
    package = found.get("package_bytes", 0)
    amounts = {
        key: found[key] * samples
        for key in (
            "down_bytes",
            "up_bytes",
            "client_seconds",
            "storage_seconds",
        )
    }
    amounts["up_bytes"] -= package
    return {
        "seconds": found["seconds"],
        "samples": samples,
        **amounts,
        "package_bytes": package,
        **{key: found[key] for key in ("cached", "fallbacks") if key in found},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
    }


def first_seconds(run: Mapping[str, Any]) -> float:
    """Of the first epoch."""
    return float(run["epochs"][0]["seconds"])


def later_seconds(run: Mapping[str, Any]) -> float:
    """Of an epoch after the first one; their median."""
    later = [float(each["seconds"]) for each in run["epochs"][1:]]
    return statistics.median(later)


def cumulative(run: Mapping[str, Any]) -> list[float]:
    """Seconds since the start, at the end of each epoch."""
    before = float(run["before"]["seconds"])
    return [
        before + sum_
        for sum_ in accumulate(each["seconds"] for each in run["epochs"])
    ]


def total(runs: Runs, name: str, epochs: int) -> list[float]:
    """Seconds of whole runs, by round.

    Others than ``auto`` do the same in the first epoch however many follow.
    """
    if name == AUTO and epochs == 1:
        name = AUTO_ONCE
    return [cumulative(run)[epochs - 1] for run in runs[name]]


def best_first(runs: Runs) -> str:
    """The opponent with the fastest first epoch of the same photographs."""
    return min(
        (name for name in runs if name in EXTERNALS),
        key=lambda name: statistics.median(map(first_seconds, runs[name])),
    )


def quotients(
    above: Sequence[float], below: Sequence[float]
) -> dict[str, float]:
    """Median and range of the rounds' quotients."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def judged(runs: Runs, one_offs: Mapping[str, Mapping[str, Any]]) -> Any:
    """What follows from a cell's runs.

    Args:
        runs: of all contenders.
        one_offs: of :data:`INDEX` and :data:`CONVERSIONS`, each with
            ``seconds``.
    """
    best = best_first(runs)
    epochs = max(len(each["epochs"]) for run in runs.values() for each in run)
    later = {
        name: list(map(later_seconds, each))
        for name, each in runs.items()
        if name != AUTO_ONCE
    }
    ours = [name for name in (CACHED, AUTO_CACHED, AUTO) if name in later]
    return {
        "best_first": best,
        "first_seconds": {
            name: spread(list(map(first_seconds, each)))
            for name, each in runs.items()
        },
        "later_seconds": {name: spread(each) for name, each in later.items()},
        "speedup": {
            name: {
                other: quotients(
                    list(map(first_seconds, runs[other])), later[name]
                )
                for other in (STREAM, best)
            }
            for name in ours
        },
        "beside": {
            name: {
                other: quotients(later[other], later[name])
                for other in BESIDE
                if other in later
            }
            for name in ours
        },
        "cumulative": {
            name: _cumulative(each, one_offs.get(one_off_of(name)))
            for name, each in runs.items()
        },
        "auto_over_stream": {
            str(count): quotients(
                total(runs, AUTO, count), total(runs, STREAM, count)
            )
            for count in (1, epochs)
        },
        "auto_over_best": {
            str(count): _over_best(runs, count) for count in (1, epochs)
        },
    }


def _over_best(runs: Runs, epochs: int) -> dict[str, Any]:
    """Whole runs of ``auto``, over those of the fastest opponent.

    All of these start with the same tars; one-off costs do not count.
    """
    theirs = {
        name: total(runs, name, epochs) for name in runs if name in EXTERNALS
    }
    best = min(theirs, key=lambda name: statistics.median(theirs[name]))
    ours = total(runs, AUTO, epochs)
    return {"best": best, **quotients(ours, theirs[best])}


def one_off_of(name: str) -> str:
    """What a contender needs beside tars in Swift; empty for nothing."""
    if name in (STREAM, AUTO, AUTO_ONCE, CACHED, AUTO_CACHED):
        return INDEX
    return CONVERSIONS.get(name, "")


def _cumulative(
    runs: Sequence[Mapping[str, Any]], one_off: Mapping[str, Any] | None
) -> dict[str, list[float]]:
    sums = [
        statistics.median(each)
        for each in zip(*map(cumulative, runs), strict=True)
    ]
    more = one_off["seconds"] if one_off else 0.0
    return {"seconds": sums, "with_one_off": [more + each for each in sums]}
