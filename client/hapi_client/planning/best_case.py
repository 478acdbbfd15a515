"""The gain of push-down with an infinitely fast worker.  No I/O."""

from __future__ import annotations

import math
from dataclasses import replace

from hapi_client.planning.replanner import MIN_PUSH_GAIN
from hapi_protocol.profiles import BatchProfile, ModelProfile
from hapi_splitter.planner.plan import Plan
from hapi_splitter.units import number_text

UNLIMITED = 1e6
"""Cores and devices of an infinitely fast worker."""


def unlimited_worker(client: ModelProfile) -> ModelProfile:
    """Returns the profile of an infinitely fast worker."""
    return replace(
        client,
        device="unlimited",
        cores=UNLIMITED,
        num_devices=int(UNLIMITED),
        batches=tuple(
            BatchProfile(each.batch, tuple(0.0 for _ in each.cut_seconds))
            for each in client.batches
        ),
        memory_limit_bytes=2**62,
    )


def decline_reason(best: Plan, gain: float) -> str:
    """Returns the reason not to use even an infinitely fast worker.

    Args:
        best: best plan with such a worker.
        gain: its speed-up over raw reads.
    """
    if best.pushes:
        return (
            f"{best.label} would be {gain - 1:.1%} faster on an infinitely "
            f"fast worker, and the minimum is {MIN_PUSH_GAIN - 1:.0%}"
        )
    if best.pays_from_samples is None:
        return "no cut would be faster, not even on an infinitely fast worker"
    pays_from = math.ceil(best.pays_from_samples)
    return (
        "uploading the package costs more time than push-down saves: the "
        f"break-even is {number_text(pays_from)} samples"
    )
