"""Partitions of an epoch, and the readers that share it. No I/O.

An epoch is divided into a grid of ``batch_partitions`` by
``step_partitions``.  Sample ``g`` of an epoch belongs to step
``g // batch_size``; its row of the grid is ``g % batch_partitions`` and its
column is the step modulo ``step_partitions``.  The spans, permuted by (seed,
epoch), are cut into partitions of exactly these sizes, so that a span at a
border is read in two pieces.  The samples of a partition pass through a
shuffle buffer a few spans wide.

Ranks and loader workers own whole partitions, so that no byte is read twice.
The *set* of samples of a step depends on seed, epoch, partition and batch
size only: not on the numbers of ranks, workers and threads, nor on the route.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hapi_client.option_checks import check_integers
from hapi_protocol.errors import ClientError

Integers = npt.NDArray[np.int64]
DEFAULT_BATCH_PARTITIONS = 8
MAX_PARTITIONS = 2**16
MIN_SPANS_PER_PARTITION = 8
"""Spans per partition below which only as many partitions are made as there
are readers: more of them would cut a small data set into many pieces."""


@dataclass(frozen=True)
class EpochPartition:
    """The grid of partitions of an epoch.

    Attributes:
        batch_partitions: partitions of each batch; the number of ranks that
            share a batch must divide it.
        step_partitions: number of successive batches with partitions of
            their own; the number of loader workers that share the batches of
            a rank must divide it.

    Raises:
        ClientError: ``bad_configuration`` for a value below 1, or more
            partitions than :data:`MAX_PARTITIONS`.
    """

    batch_partitions: int = 1
    step_partitions: int = 1

    def __post_init__(self) -> None:
        check_integers(self, 1, "batch_partitions", "step_partitions")
        if self.num_partitions > MAX_PARTITIONS:
            raise ClientError(
                "bad_configuration",
                f"{self.batch_partitions} times {self.step_partitions} are "
                f"too many partitions; at most {MAX_PARTITIONS}",
            )

    @property
    def num_partitions(self) -> int:
        return self.batch_partitions * self.step_partitions

    @classmethod
    def suited(
        cls, num_spans: int, num_ranks: int = 1, num_workers: int = 1
    ) -> EpochPartition:
        """Returns the default partition for a data set and its readers.

        There are as many partitions as the readers need.  If there are
        enough spans, there are more batch partitions, so that other common
        numbers of ranks can resume the epoch.  More step partitions would
        cost memory for the samples of started spans.
        """
        shareable = num_ranks * math.ceil(DEFAULT_BATCH_PARTITIONS / num_ranks)
        if num_spans >= MIN_SPANS_PER_PARTITION * shareable * num_workers:
            return cls(shareable, num_workers)
        return cls(num_ranks, num_workers)


@dataclass(frozen=True)
class Reader:
    """One of the readers that share an epoch.

    Attributes:
        ranks: ranks whose samples it reads, from 0: that of its trainer, or
            its virtual nodes.
        num_ranks: ranks, or virtual nodes, that share each batch.
        worker: loader worker of this rank, from 0.
        num_workers: loader workers that alternate in this rank's batches.
        first_step: step with which all readers begin.
        unit: what ``num_ranks`` counts, in messages.
    """

    ranks: tuple[int, ...] = (0,)
    num_ranks: int = 1
    worker: int = 0
    num_workers: int = 1
    first_step: int = 0
    unit: str = "ranks"

    @property
    def num_readers(self) -> int:
        """Readers that share each batch, if all have as much to read."""
        return round(self.num_ranks / len(self.ranks))


@dataclass(frozen=True)
class SpanSlice:
    """Rows ``first`` to ``stop - 1`` of a span, which are read together."""

    span: int
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


def divisors(number: int) -> str:
    """Returns the divisors of a number as text, such as ``1, 2, 4``."""
    return ", ".join(
        str(divisor)
        for divisor in range(1, number + 1)
        if not number % divisor
    )
