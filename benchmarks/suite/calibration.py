"""Calibration of the link, and the wait for a stable plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.suite.contenders import Contender
from benchmarks.suite.workloads import Link
from benchmarks.testbed.two_tiers import Testbed

SETTLED_SECONDS = 12.0
"""A plan that did not change for this long is stable."""
MAX_UNDECIDED_SECONDS = 240.0
"""Time for the first plan; on slow links its measurements take long."""
MIN_STEPS = 3
CALIBRATION_EPOCHS = 3
"""Number of epochs that count; one before them warms up."""


def calibrate(
    bed: Testbed, streaming: Contender, link: Link
) -> dict[str, Any]:
    """Sets the link to a multiple of what saturates the client.

    The epochs of ``streaming`` should take seconds, because the rate of the
    link follows from them.  ``link`` None leaves it unshaped.

    Returns:
        ``calibration`` and ``link_bytes_per_second`` of an entry.
    """
    if bed.shaped:
        bed.set_link(None)
    _, *epochs = streaming.epochs(0, 1 + CALIBRATION_EPOCHS)
    rates = [epoch["samples_per_second"] for epoch in epochs]
    rate, size = statistics.median(rates), epochs[-1]["down_bytes"]
    limit = None if link is None else link * rate * size
    if limit is not None:
        bed.set_link(limit)
    return {
        "calibration": {
            "samples_per_second": rate,
            "epochs": rates,
            "bytes_per_sample": size,
        },
        "link_bytes_per_second": limit,
    }


def settle(
    step: Callable[[], object],
    plan: Callable[[], Any],
    max_seconds: float,
    is_decided: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Repeats a step until the plan is stable.

    Except for the first :data:`MIN_STEPS`, no step begins after
    ``max_seconds``, counted from when ``is_decided`` is true (there is a plan
    or will be none) or from :data:`MAX_UNDECIDED_SECONDS`.

    Returns:
        ``plans`` after each step, and ``settled``: true if stable.
    """
    started = began = changed = time.monotonic()
    decided = is_decided()
    plans: list[Any] = []
    while True:
        step()
        now = time.monotonic()
        plans.append(plan())
        if not decided:
            decided = is_decided() or now - started >= MAX_UNDECIDED_SECONDS
            began = changed = now
        if plans[-1] is None or plans[-2:-1] != plans[-1:]:
            changed = now
        settled = decided and now - changed >= SETTLED_SECONDS
        enough = settled or now - began >= max_seconds
        if decided and enough and len(plans) >= MIN_STEPS:
            return {"plans": plans, "settled": settled}
