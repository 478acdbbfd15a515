"""Which of an opponent's settings are the fastest."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Options = Mapping[str, Any]

ROUNDS = 2


def choose(
    ask_window: Callable[[Options], float],
    grid: Sequence[Options],
    rounds: int = ROUNDS,
) -> tuple[Options, dict[str, float]]:
    """The fastest of a grid, by the median of its windows.

    All are measured in turn, each round in the opposite order of the one
    before, so that a machine that becomes slower meets all alike.

    Args:
        ask_window: samples per second with some options, in a short window.
        grid: of options; with one there is nothing to measure.
        rounds: windows of each.

    Returns:
        The options, and samples per second by :func:`label`.

    Raises:
        ValueError: the grid is empty.
    """
    if not grid:
        raise ValueError("there is nothing to choose from")
    if len(grid) == 1:
        return grid[0], {}
    windows: dict[str, list[float]] = {label(each): [] for each in grid}
    for number in range(rounds):
        for options in reversed(grid) if number % 2 else grid:
            windows[label(options)].append(ask_window(options))
    rates = {name: statistics.median(each) for name, each in windows.items()}
    return max(grid, key=lambda options: rates[label(options)]), rates


def first_enough(
    ask_epoch: Callable[[Options], float],
    grid: Sequence[Options],
    enough: float,
) -> tuple[Options, dict[str, float]]:
    """The first of a grid that is fast enough, else the fastest.

    Where a link limits everybody, nothing is faster than that.

    Args:
        ask_epoch: samples per second with some options.
        grid: of options, the most promising ones first.
        enough: samples per second.

    Returns:
        The options, and samples per second by :func:`label`, of those that
        were tried.

    Raises:
        ValueError: the grid is empty.
    """
    if not grid:
        raise ValueError("there is nothing to choose from")
    rates: dict[str, float] = {}
    for options in grid:
        rates[label(options)] = ask_epoch(options)
        if rates[label(options)] >= enough:
            return options, rates
    return max(grid, key=lambda options: rates[label(options)]), rates


def label(options: Options) -> str:
    """Options as one line of JSON."""
    return json.dumps(options, sort_keys=True)
