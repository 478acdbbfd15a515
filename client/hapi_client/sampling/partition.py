"""The order of an epoch, and who reads what of it (pure).

Spans are permuted by (seed, epoch) and dealt to *lanes*; the samples of a
lane pass through a shuffle buffer a few spans wide.  Every step of training
takes the samples of one global batch, round robin from the lanes whose turn
it is.  Ranks and loader workers own whole lanes, so that no byte is read
twice, and the *set* of samples of a step depends on seed, epoch, lanes and
batch size only: not on how many ranks and workers there are, on the cut, the
encoding, the number of threads or on which tier did the work.

Lanes are a grid of ``batch_partitions`` by ``step_partitions``.  Sample ``g`` of an epoch belongs
to step ``g // batch_size`` and to part ``g % batch_partitions``; the step's number
modulo ``step_partitions`` says which lanes it draws from.  A lane holds exactly the
samples that are drawn from it: the permuted samples are cut into lanes at
these numbers, and a span where one lane ends and the next begins is read in
two pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
DEFAULT_BATCH_PARTITIONS = 8
MAX_PARTITIONS = 2**16
MIN_SPANS_PER_PARTITION = 8
"""That lanes have at least by default: a few lanes more than readers need cost
a small data set many pieces of spans."""


@dataclass(frozen=True)
class EpochPartition:
    """How an epoch is divided.

    Attributes:
        parts: of each batch; numbers of ranks that divide it can share a
            batch.
        turns: batches that follow one another have lanes of their own, until
            it is the first one's turn again; numbers of loader workers that
            divide it can share the batches of a rank.

    Raises:
        ValueError: for one below 1, or more lanes than :data:`MAX_PARTITIONS`.
    """

    batch_partitions: int = 1
    step_partitions: int = 1

    def __post_init__(self) -> None:
        check_at_least("parts", self.batch_partitions, 1)
        check_at_least("turns", self.step_partitions, 1)
        if self.batch_partitions * self.step_partitions > MAX_PARTITIONS:
            raise ValueError(
                f"{self.batch_partitions} parts times {self.step_partitions} turns are too many "
                f"lanes; at most {MAX_PARTITIONS}"
            )

    @classmethod
    def suited(
        cls, num_spans: int, num_ranks: int = 1, num_workers: int = 1
    ) -> EpochPartition:
        """Lanes for a data set, when nobody has said how many.

        As many as these readers need; where there are spans enough, as many
        parts that usual other numbers of ranks can take over as well.  More
        turns would cost memory, for the samples of spans that have begun.
        """
        batch_partitions = num_ranks * math.ceil(
            DEFAULT_BATCH_PARTITIONS / num_ranks
        )
        if (
            num_spans
            >= MIN_SPANS_PER_PARTITION * batch_partitions * num_workers
        ):
            return cls(batch_partitions, num_workers)
        return cls(num_ranks, num_workers)


@dataclass(frozen=True)
class Reader:
    """One of those who share an epoch.

    Attributes:
        rank: from 0 on.
        num_ranks: trainers that share each batch.
        worker: of this rank, from 0 on.
        num_workers: that take turns with this rank's batches.
        first_step: where all of them begin.
    """

    rank: int = 0
    num_ranks: int = 1
    worker: int = 0
    num_workers: int = 1
    first_step: int = 0


@dataclass(frozen=True)
class SpanSlice:
    """What is read at once: rows ``first`` to ``stop - 1`` of a span."""

    span: int
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


def divisors(number: int) -> str:
    """``1, 2, 4``: what divides a number."""
    return ", ".join(
        str(each) for each in range(1, number + 1) if not number % each
    )


def check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; at least {least}")
