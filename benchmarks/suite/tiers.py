"""Both tiers as seen from outside: bytes, CPU seconds, the link's rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from benchmarks.cpu_seconds import session_seconds
from benchmarks.suite.contenders import Contender
from benchmarks.testbed import Testbed

SETTLED_SECONDS = 12.0
MAX_UNDECIDED_SECONDS = 240.0
"""For a first plan: on the slowest links photographs to measure take long."""
MIN_STEPS = 3
"""Of unmeasured windows, however long they take."""
CALIBRATION_EPOCHS = 3
"""That count; one before them warms up."""


@dataclass(frozen=True)
class Amounts:
    """So far, or between two moments.

    Attributes:
        seconds: of the machine's monotonic clock.
        down_bytes, up_bytes: of the client's interface, headers included; 0
            without a shaped link.
        client_seconds, storage_seconds: CPU seconds.
    """

    seconds: float
    down_bytes: int
    up_bytes: int
    client_seconds: float
    storage_seconds: float

    def __sub__(self, earlier: Amounts) -> Amounts:
        return Amounts(
            self.seconds - earlier.seconds,
            self.down_bytes - earlier.down_bytes,
            self.up_bytes - earlier.up_bytes,
            self.client_seconds - earlier.client_seconds,
            self.storage_seconds - earlier.storage_seconds,
        )


def read(
    bed: Testbed, clients: Collection[int], storage: Collection[int] = ()
) -> Amounts:
    """What there was so far.

    Args:
        bed: the testbed.
        clients: sessions of the client tier that count.
        storage: of the storage tier, beside those of the cluster.
    """
    down, up = 0, 0
    if bed.link is not None:
        traffic = bed.link.traffic()
        down, up = traffic.down, traffic.up
    return Amounts(
        time.monotonic(),
        down,
        up,
        session_seconds(clients),
        session_seconds({*bed.storage_sessions(), *storage}),
    )


def calibrate(
    bed: Testbed,
    tar_stream: Contender,
    link: float | None,
) -> dict[str, Any]:
    """Sets the link, beside what saturates the client now.

    Args:
        bed: the testbed.
        tar_stream: trains epochs without a limit.  They must take seconds:
            all rates of a slow link follow from this one.
        link: as a multiple of that; None leaves it unshaped.

    Returns:
        ``calibration`` and ``link_bytes_per_second`` of an entry.
    """
    if bed.shaped:
        bed.set_link(None)
    _, *epochs = tar_stream.epochs(0, 1 + CALIBRATION_EPOCHS)
    rates = [each["samples_per_second"] for each in epochs]
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


def saturating_rate(
    bed: Testbed, tar_stream: Contender, limit: float | None
) -> float:
    """What saturates the client at the moment, in samples per second.

    A machine may be slower than when the link was set, by its neighbours'
    work: what a core does then takes longer, and the link is what it was.

    Args:
        bed: the testbed.
        tar_stream: trains an epoch without a limit; warm.
        limit: of the link, in bytes per second, to which it is set again.
    """
    if bed.shaped:
        bed.set_link(None)
    [found] = tar_stream.epochs(0, 1)
    if limit is not None:
        bed.set_link(limit)
    return float(found["samples_per_second"])


def settle(
    step: Callable[[], object],
    plan: Callable[[], Any],
    most_seconds: float,
    is_decided: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Steps until the plan stays the same for a while.

    Args:
        step: a window, which nobody looks at.
        plan: the present one, None until there is one.
        most_seconds: no step begins after these, but for the least that
            there have to be.
        is_decided: whether there is a plan, or is to be none; the seconds
            begin then, or after :data:`MAX_UNDECIDED_SECONDS`.

    Returns:
        ``plans`` after each step; ``settled``: whether the last one had
        stayed.
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
        enough = settled or now - began >= most_seconds
        if decided and enough and len(plans) >= MIN_STEPS:
            return {"plans": plans, "settled": settled}
