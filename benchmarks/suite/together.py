"""Several trainers at the same time, counted in one common window."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.remote import Remote
from benchmarks.shares import jain_index
from benchmarks.storage_tier import BATCH_SAMPLES, BATCHES
from benchmarks.suite.data_sets import CLIENT, SECONDS
from benchmarks.suite.tiers import read
from benchmarks.tenants import rate_of
from benchmarks.testbed import Testbed, Tier, thread_variables


@dataclass(frozen=True)
class Span:
    """Of time.

    Attributes:
        fill_seconds: not counted, at the start.
        seconds: that are counted.
    """

    fill_seconds: float = 4.0
    seconds: float = 12.0


WorkerCounters = Callable[[], Mapping[str, float]]
"""Of one worker, so far."""


@dataclass(frozen=True)
class Trainer:
    """One that trains.

    Attributes:
        remote: its process, which answers ``diary``.
        question: arguments of that, beside epoch and seconds.
    """

    remote: Remote
    question: Mapping[str, Any] = field(default_factory=dict)


def half(tier: Tier, number: int) -> Tier:
    """Half of a tier's cores, the first or the second; or its only core."""
    cores = tier.cores
    if len(cores) > 1:
        middle = len(cores) // 2
        cores = (cores[:middle], cores[middle:])[number]
    return replace(
        tier,
        cores=cores,
        environment={**tier.environment, **thread_variables(cores)},
    )


def client_process(
    tier: Tier, environment: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[Remote]:
    """A process of :mod:`benchmarks.client_tier`.

    Args:
        tier: of clients.
        environment: of the process, beside that of the tier.
    """
    more = {**tier.environment, **(environment or {})}
    return replace(tier, environment=more).remote(CLIENT)


@contextlib.contextmanager
def client_processes(
    bed: Testbed, environments: Sequence[Mapping[str, str]]
) -> Iterator[list[Remote]]:
    """One for each environment."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(client_process(bed.client, each))
            for each in environments
        ]


def phase(
    bed: Testbed,
    trainers: Sequence[Trainer],
    epoch: int,
    span: Span,
    storage: Collection[int] = (),
    workers: Sequence[WorkerCounters] = (),
) -> dict[str, Any]:
    """All trainers at once, for a while.

    Args:
        bed: the testbed.
        trainers: each with a process of its own.
        epoch: that they begin with.
        span: how long.
        storage: sessions of the storage tier beside those of the cluster.
        workers: whose passes of the model are counted.

    Returns:
        ``samples_per_second`` of all, ``each``, ``down_bytes_per_second``,
        how many cores of each tier were busy (``client_cores``,
        ``storage_cores``), ``fallbacks``: spans that were to be pushed and
        were streamed, from the question to the last answer, and
        ``worker_batch``: samples in a pass of a worker's model, the mean;
        None without any.
    """
    fallbacks = _fallbacks(trainers)
    begin = time.monotonic() + span.fill_seconds
    end = begin + span.seconds
    pids = {each.remote.pid for each in trainers}
    with ThreadPoolExecutor(len(trainers)) as pool:
        asked = [
            pool.submit(
                each.remote.ask,
                "diary",
                seconds=SECONDS,
                epoch=epoch,
                until=end,
                **each.question,
            )
            for each in trainers
        ]
        time.sleep(max(0.0, begin - time.monotonic()))
        before, counters = read(bed, pids, storage), _totals(workers)
        time.sleep(max(0.0, end - time.monotonic()))
        used = read(bed, pids, storage) - before
        batch = _mean_batch(counters, _totals(workers))
        diaries = [each.result() for each in asked]
    rates = [rate_of([each], begin, end) for each in diaries]
    return {
        "samples_per_second": sum(rates),
        "each": rates,
        "down_bytes_per_second": used.down_bytes / used.seconds,
        "client_cores": used.client_seconds / used.seconds,
        "storage_cores": used.storage_seconds / used.seconds,
        "fallbacks": _fallbacks(trainers) - fallbacks,
        "worker_batch": batch,
    }


def fallbacks_text(found: Mapping[str, Any]) -> str:
    """To be read beside a phase's rate; empty where there were none."""
    count = found["fallbacks"]
    return f" [{count} spans fell back to streaming]" if count else ""


def _totals(workers: Sequence[WorkerCounters]) -> Counter[str]:
    """Counters of all workers, added up."""
    totals: Counter[str] = Counter()
    for each in workers:
        totals.update(each())
    return totals


def _mean_batch(before: Counter[str], after: Counter[str]) -> float | None:
    """Samples in a pass of a model between two moments; None without any."""
    passes = after[BATCHES] - before[BATCHES]
    samples = after[BATCH_SAMPLES] - before[BATCH_SAMPLES]
    return samples / passes if passes else None


def _fallbacks(trainers: Sequence[Trainer]) -> int:
    """So far, of those that push."""
    return sum(
        each.remote.ask(
            "fallbacks", seconds=SECONDS, name=each.question["name"]
        )
        for each in trainers
        if "name" in each.question
    )


def fairness(
    rates: Sequence[float], due: Sequence[float] | None = None
) -> float:
    """Jain's index of rates, each over what is due where that is given."""
    if due is not None:
        rates = [rate / each for rate, each in zip(rates, due, strict=True)]
    return jain_index(rates)
