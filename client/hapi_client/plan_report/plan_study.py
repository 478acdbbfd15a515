"""Measures costs and computes plans without training, for ``hapi plan``."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hapi_client.caching.host_cache import (
    caches_samples,
    default_memory_bytes,
)
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.plan_report.plan_tables import ASSUMED, Report
from hapi_client.plan_report.study_inputs import (
    PackingGain,
    PlanRequest,
    StudyInputs,
    train_seconds,
)
from hapi_client.planning.device_profile import LocalFacts, measure
from hapi_client.progress import Reporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.encodings import (
    ENCODINGS,
    PRECISIONS,
    allowed_encodings,
)
from hapi_protocol.profiles import ModelProfile
from hapi_splitter.host_limits import allowed_cores
from hapi_splitter.planner.costs import Conditions, build_problem
from hapi_splitter.planner.plan import (
    Problem,
    alternatives,
    compare_precisions,
    solve,
)
from hapi_splitter.units import (
    bytes_text,
    link_text,
    number_text,
    seconds_text,
)

MAX_BACKGROUND_CORES = 0.3
"""Other processes that use more cores are reported as an assumption."""
STAT = Path("/proc/stat")
_BUSY_FIELDS = (1, 2, 3, 6, 7)
"""Columns user, nice, system, irq and softirq; see proc(5). Time that a host
takes from a virtual machine (steal) is not counted."""


@dataclass(frozen=True)
class PlanStudy:
    """The plan, its alternatives and their inputs.

    Attributes:
        freeze: last frozen module.
        report: plan, alternatives and costs.
        other_precisions: gain of lower precision floors, as sentences.
        conditions: link and training step, measured, given or assumed.
        facts: measured on this machine.
        server: profile of the worker, or of this machine in its place.
        assumptions: sentences on everything that was not measured.
        packing: gain of loose objects from packing; None for shards.
    """

    freeze: Any
    report: Report
    other_precisions: tuple[str, ...]
    conditions: Conditions
    facts: LocalFacts
    server: ModelProfile
    assumptions: tuple[str, ...]
    packing: PackingGain | None


def advise(
    region: FrozenRegion,
    request: PlanRequest,
    reporter: Reporter,
    connection: Connection | None = None,
    location: Location | None = None,
) -> PlanStudy:
    """Measures the costs of all cuts and plans, without training.

    Args:
        region: frozen region of the model.
        request: the training run to plan for.
        reporter: receives the steps.
        connection: connection to the account; None to measure only this
            machine.
        location: a data set with an index; needs ``connection``.

    Raises:
        HapiError: if a measurement fails, or an option is wrong.
    """
    region.check_encodings(partial(allowed_encodings, request.min_precision))
    assumptions: list[str] = []
    inputs = StudyInputs(region, request, reporter, assumptions.append)
    probe, link, num_samples = inputs.data(connection, location)
    reporter.note("measuring samples and this machine's device")
    cores = background_load()
    facts = measure(region, probe, lambda _: ENCODINGS, request.cuts)
    if (other_cores := cores()) > MAX_BACKGROUND_CORES:
        assumptions.append(
            f"other processes keep using {other_cores:.1f} of "
            f"{number_text(allowed_cores())} cores of this machine, as they "
            "did during the measurement; without them, streaming may be "
            "several times as fast: plan again then"
        )
    if facts.skipped:
        assumptions.append(
            f"cuts {', '.join(map(str, facts.skipped))}, which there was no "
            "time to measure, are not among the best"
        )
    server, startup = inputs.server(facts, connection)
    conditions = Conditions(
        link_bytes_per_second=link,
        train_seconds=train_seconds(region, request.batch_size),
    )
    fraction, cache_note = cached_features(
        region, num_samples, probe.bytes_each
    )
    cached_epochs = fraction * max(0.0, request.epochs - 1.0)

    def problem(min_precision: str) -> Problem:
        computed = build_problem(
            facts.cuts,
            server,
            facts.client,
            facts.samples,
            conditions,
            min_precision=min_precision,
            num_samples=num_samples,
            epochs=request.epochs - cached_epochs,
            startup=startup,
        )
        return replace(
            computed,
            cached_samples=num_samples * cached_epochs,
            cached_sample_seconds=conditions.train_seconds,
        )

    requested = problem(request.min_precision)
    measured = (*_measured(facts, server, conditions), cache_note)
    if inputs.packing is not None:
        measured += (inputs.packing.text,)
    coarser = PRECISIONS[PRECISIONS.index(request.min_precision) + 1 :]
    if region.sends_integers:
        coarser = ()
    return PlanStudy(
        region.freeze,
        Report(
            facts.cuts,
            requested,
            alternatives(requested),
            model=request.name,
            notes=(*measured, *(ASSUMED + note for note in assumptions)),
        ),
        compare_precisions(
            solve(requested),
            {precision: problem(precision) for precision in coarser},
        ),
        conditions,
        facts,
        server,
        tuple(assumptions),
        inputs.packing,
    )


def cached_features(
    region: FrozenRegion, num_samples: int, stored_bytes: float
) -> tuple[float, str]:
    """Estimates the cached fraction of the features under default settings.

    Args:
        region: frozen region of the model.
        num_samples: size of the data set.
        stored_bytes: mean size of a stored sample.

    Returns:
        The fraction of the samples whose features a job caches in the memory
        of its host, and a sentence for people.
    """
    last = region.num_cuts
    count = math.prod(region.cut_shape(last))
    all_bytes = num_samples * count * region.cut_dtype(last).itemsize
    limit = default_memory_bytes()
    fraction = min(1.0, limit / all_bytes)
    if caches_samples(all_bytes, num_samples * stored_bytes, limit):
        fraction = 0.0
    outcome = "they are computed in each epoch"
    if fraction:
        outcome = f"{fraction:.0%} of them are computed once"
    return fraction, (
        f"features of all samples take {bytes_text(all_bytes)}; a job here "
        f"caches up to {bytes_text(limit)} in memory: {outcome}"
    )


def _measured(
    facts: LocalFacts, server: ModelProfile, conditions: Conditions
) -> tuple[str, ...]:
    """Describes what was measured and how."""
    machines = [("this machine", facts.client)]
    if server is not facts.client:
        machines.append(("the worker", server))
    return (
        f"link: {link_text(conditions.link_bytes_per_second)}",
        *(
            f"{name}: {profile.device_name}, {number_text(profile.cores)} "
            f"cores; layers in batches of {profile.best().batch}"
            for name, profile in machines
        ),
        f"bytes, decoding and encoding: mean of {facts.num_probed} samples, "
        "on one core",
        f"training step: {seconds_text(conditions.train_seconds)} per sample, "
        "SGD",
    )


def background_load() -> Callable[[], float]:
    """Starts to measure the CPU use of all other processes.

    Returns:
        A function that returns the mean number of cores in use since then;
        0 if the system does not report it.
    """
    started, before = time.monotonic(), _other_seconds()

    def cores() -> float:
        seconds = time.monotonic() - started
        return max(0.0, (_other_seconds() - before) / seconds)

    return cores


def _other_seconds() -> float:
    """Returns CPU seconds of other processes; negative if unknown."""
    own = os.times()
    try:
        fields = STAT.read_text().splitlines()[0].split()
    except OSError:
        fields = ["0"] * 8
    ticks = sum(int(fields[column]) for column in _BUSY_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system
