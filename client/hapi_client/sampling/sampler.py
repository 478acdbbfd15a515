"""Order of an epoch's samples, and its division among readers. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from hapi_client.option_checks import check_integer, check_integers
from hapi_client.sampling.partition import (
    EpochPartition,
    Integers,
    Reader,
    SpanSlice,
    divisors,
)
from hapi_protocol.errors import ClientError

DEFAULT_BUFFER_SPANS = 8
FIRST_SPANS = 2
"""Spans from which an epoch's first samples come.  The buffer grows by half a
span for each further one, so that the first batch need not wait for the
samples of a whole buffer."""


@dataclass(frozen=True)
class ReaderBatch:
    """A reader's samples of one step, in order.

    Attributes:
        step: number of the step, from 0.
        positions: ``[n]`` int64, position of each sample's piece in
            :attr:`ReadPlan.pieces`.
        rows: ``[n]`` int64, row of each sample in its piece.
        sizes: number of samples of each of the reader's ranks, one after
            another.
    """

    step: int
    positions: Integers
    rows: Integers
    sizes: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last_position(self) -> int:
        """Position of the last piece that the batch needs."""
        return int(self.positions.max())


@dataclass(frozen=True)
class ReadPlan:
    """The pieces that one reader reads, and its batches.

    Attributes:
        pieces: slices of spans, in the order in which they are needed.
        batches: the reader's part of each of its steps, in order.
        is_whole: False if other ranks have a part of these steps.
    """

    pieces: tuple[SpanSlice, ...]
    batches: tuple[ReaderBatch, ...]
    is_whole: bool = True

    @property
    def num_samples(self) -> int:
        """Samples of all batches."""
        return sum(map(len, self.batches))


@dataclass(frozen=True)
class SamplerConfig:
    """Settings of an order, besides data set, seed and epoch.

    Attributes:
        batch_size: samples of a step, of all ranks together.
        partition: division of the epoch.
        buffer_spans: width of the shuffle buffer in spans, of all batch
            partitions together.
        drop_last: leave out an incomplete last batch.

    Raises:
        ClientError: ``bad_configuration`` for a number below 1.
    """

    batch_size: int
    partition: EpochPartition = field(default_factory=EpochPartition)
    buffer_spans: int = DEFAULT_BUFFER_SPANS
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_integers(self, 1, "batch_size", "buffer_spans")

    def step_ends(self, num_samples: int) -> Integers:
        """Returns ``[steps]``: number of samples up to the end of each step.

        The last batch may be shorter.  If it is too short for the largest
        number of ranks that could share it, it joins the batch before.
        """
        num_full, rest = divmod(num_samples, self.batch_size)
        ends = self.batch_size * np.arange(1, num_full + 1, dtype=np.int64)
        if self.drop_last or not rest:
            return ends
        if num_full and rest < math.gcd(
            self.partition.batch_partitions, self.batch_size
        ):
            return np.append(ends[:-1], num_samples)
        return np.append(ends, num_samples)


@dataclass(frozen=True, eq=False)
class EpochSampler:
    """The order of all steps of an epoch.

    Attributes:
        config: settings of the order.
        ends: result of :meth:`SamplerConfig.step_ends`.
        pieces: pieces of all partitions.
        piece_of: ``[samples]`` int64, in the order of delivery: index of
            each sample's piece.
        row_of: ``[samples]`` int64, row of each sample in its piece.
    """

    config: SamplerConfig
    ends: Integers
    pieces: Sequence[SpanSlice]
    piece_of: Integers
    row_of: Integers

    @property
    def num_steps(self) -> int:
        return len(self.ends)

    def read_plan(self, reader: Reader | None = None) -> ReadPlan:
        """Returns the share of a reader; None for a single reader.

        Raises:
            ClientError: ``bad_configuration`` naming a number that does not
                divide the partition, and those that do.
        """
        reader = reader or Reader()
        self._check_reader(reader)
        steps = range(
            reader.first_step + reader.worker,
            self.num_steps,
            reader.num_workers,
        )
        samples_by_step = [self._samples_of(step, reader) for step in steps]
        samples = np.concatenate([_EMPTY, *chain(*samples_by_step)])
        used, first_use, index_in_used = np.unique(
            self.piece_of[samples], return_index=True, return_inverse=True
        )
        by_first_use = np.argsort(first_use, kind="stable")
        position_of = np.empty_like(by_first_use)
        position_of[by_first_use] = np.arange(len(by_first_use))
        positions = position_of[index_in_used]
        rows = self.row_of[samples]
        sizes = [tuple(map(len, of_ranks)) for of_ranks in samples_by_step]
        bounds = np.cumsum([0, *map(sum, sizes)])
        return ReadPlan(
            tuple(self.pieces[index] for index in used[by_first_use]),
            tuple(
                ReaderBatch(
                    step, positions[start:end], rows[start:end], of_ranks
                )
                for step, start, end, of_ranks in zip(
                    steps, bounds, bounds[1:], sizes, strict=False
                )
            ),
            len(reader.ranks) == reader.num_ranks,
        )

    def _samples_of(self, step: int, reader: Reader) -> list[Integers]:
        """Returns the samples of a step of each of the reader's ranks."""
        start = int(self.ends[step - 1]) if step else 0
        firsts = [
            start + (rank - start) % reader.num_ranks for rank in reader.ranks
        ]
        return [
            np.arange(first, self.ends[step], reader.num_ranks, dtype=np.int64)
            for first in firsts
        ]

    def _check_reader(self, reader: Reader) -> None:
        partition = self.config.partition
        for rank in reader.ranks:
            _check_share("rank", rank, reader.num_ranks)
        _check_share("worker", reader.worker, reader.num_workers)
        check_integer("first_step", reader.first_step, 0)
        if partition.batch_partitions % reader.num_ranks:
            raise _bad(
                f"{reader.num_ranks} {reader.unit} cannot share "
                f"{partition.batch_partitions} batch partitions; allowed: "
                f"{divisors(partition.batch_partitions)}"
            )
        if partition.step_partitions % reader.num_workers:
            raise _bad(
                f"{reader.num_workers} loader workers cannot share "
                f"{partition.step_partitions} step partitions; allowed: "
                f"{divisors(partition.step_partitions)}"
            )
        sizes = np.diff(self.ends, prepend=0)
        if len(sizes) and sizes.min() < reader.num_ranks:
            raise _bad(
                f"{len(self.piece_of)} samples are too few for "
                f"{reader.num_ranks} {reader.unit}; use fewer {reader.unit}, "
                "or drop_last"
            )
        if self.config.batch_size % reader.num_ranks:
            raise _bad(
                f"a batch of {self.config.batch_size} samples cannot be "
                f"divided among {reader.num_ranks} {reader.unit}; allowed: "
                f"{divisors(self.config.batch_size)}"
            )


_EMPTY = np.empty(0, np.int64)


def index_order(
    span_sizes: Sequence[int], config: SamplerConfig
) -> EpochSampler:
    """Returns the order for evaluation: that of the index, if unpartitioned.

    Args:
        span_sizes: samples of each span.
        config: settings of the order.
    """
    return _order(span_sizes, config, None)


def shuffled_order(
    span_sizes: Sequence[int], config: SamplerConfig, *, seed: int, epoch: int
) -> EpochSampler:
    """Returns the order of a training epoch: each sample exactly once.

    Args:
        span_sizes: samples of each span.
        config: settings of the order.
        seed: seed of the order, at least 0.
        epoch: number of the epoch, at least 0.

    Raises:
        ClientError: ``bad_configuration`` naming a negative argument.
    """
    check_integer("seed", seed, 0)
    check_integer("epoch", epoch, 0)
    random = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    return _order(span_sizes, config, random)


def single_batch_plan(samples: Sequence[tuple[int, int]]) -> ReadPlan:
    """Plans one batch of the given samples, in as few pieces as possible.

    Args:
        samples: span and row of each sample, in the order of delivery;
            repeats are allowed.
    """
    pieces: list[SpanSlice] = []
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for span, row in sorted(set(samples)):
        last = pieces[-1] if pieces else None
        if last is None or (last.span, last.stop) != (span, row):
            pieces.append(SpanSlice(span, row, row + 1))
        else:
            pieces[-1] = SpanSlice(span, last.first, row + 1)
        places[span, row] = len(pieces) - 1, row - pieces[-1].first
    place_of = np.array([places[sample] for sample in samples], np.int64)
    positions, rows = place_of.reshape(-1, 2).T
    return ReadPlan(tuple(pieces), (ReaderBatch(0, positions, rows),))


def _order(
    span_sizes: Sequence[int],
    config: SamplerConfig,
    random: np.random.Philox | None,
) -> EpochSampler:
    sizes = np.asarray(span_sizes, np.int64)
    spans = (
        np.arange(len(sizes))
        if random is None
        else _permutation(random, len(sizes))
    )
    ends = config.step_ends(int(sizes.sum()))
    num_samples = int(ends[-1]) if len(ends) else 0
    partition_of = _partitions_of_samples(config, ends, num_samples)
    by_partition = np.argsort(partition_of, kind="stable")
    partition_ends = np.cumsum(
        np.bincount(partition_of, minlength=config.partition.num_partitions)
    )
    pieces: list[SpanSlice] = []
    piece_of = np.empty(num_samples, np.int64)
    row_of = np.empty(num_samples, np.int64)
    width = max(1, config.buffer_spans // config.partition.batch_partitions)
    start = 0
    for slices, end in zip(
        _slices_by_partition(spans, sizes, partition_ends),
        partition_ends,
        strict=True,
    ):
        samples = by_partition[start:end]
        piece_of[samples], row_of[samples] = _shuffled_samples(
            slices, len(pieces), width, random
        )
        pieces += slices
        start = end
    return EpochSampler(config, ends, pieces, piece_of, row_of)


def _partitions_of_samples(
    config: SamplerConfig, ends: Integers, num_samples: int
) -> Integers:
    """Returns ``[samples]``: the partition of each sample of the epoch."""
    samples = np.arange(num_samples, dtype=np.int64)
    steps = np.searchsorted(ends, samples, side="right")
    partition = config.partition
    row = samples % partition.batch_partitions
    return row * partition.step_partitions + steps % partition.step_partitions


def _slices_by_partition(
    spans: Integers, sizes: Integers, partition_ends: Integers
) -> Iterator[list[SpanSlice]]:
    """Cuts the permuted spans into partitions of the given ends."""
    span_ends = np.cumsum(sizes[spans])
    start = 0
    for end in partition_ends:
        slices = []
        number = int(np.searchsorted(span_ends, start, side="right"))
        while start < end:
            span = int(spans[number])
            span_start = int(span_ends[number] - sizes[span])
            stop = min(int(end), int(span_ends[number]))
            slices.append(
                SpanSlice(span, start - span_start, stop - span_start)
            )
            start = stop
            number += 1
        yield slices


def _shuffled_samples(
    slices: Sequence[SpanSlice],
    first_piece: int,
    width: int,
    random: np.random.Philox | None,
) -> tuple[Integers, Integers]:
    """Passes a partition's samples through the shuffle buffer.

    Args:
        slices: slices of the partition.
        first_piece: index of the first slice among all pieces.
        width: slices in the buffer, once it has grown.
        random: source of randomness; None keeps the order.

    Returns:
        ``[samples]`` int64 twice: piece and row of each delivered sample.
    """
    sizes = np.array([len(piece) for piece in slices], np.int64)
    starts = np.cumsum(sizes) - sizes
    mean_size = sizes.mean() if len(sizes) else 0.0
    delivered = [_EMPTY]
    buffer = _EMPTY
    for number, (start, size) in enumerate(
        zip(starts.tolist(), sizes.tolist(), strict=True)
    ):
        added = np.arange(start, start + size, dtype=np.int64)
        buffer = np.concatenate([buffer, added])
        if random is not None:
            buffer = buffer[_permutation(random, len(buffer))]
        num_held = min(width - 1, max(0, number + 1 - FIRST_SPANS) / 2)
        num_out = max(0, len(buffer) - int(num_held * mean_size))
        delivered.append(buffer[:num_out])
        buffer = buffer[num_out:]
    order = np.concatenate([*delivered, buffer])
    slice_of = np.repeat(np.arange(len(slices)), sizes)[order]
    return first_piece + slice_of, order - starts[slice_of]


def _permutation(random: np.random.Philox, length: int) -> Integers:
    # NumPy keeps raw bits stable over its versions, but not the results of
    # Generator.permutation (NEP 19).
    return np.argsort(random.random_raw(length), kind="stable")


def _check_share(name: str, number: int, total: int) -> None:
    check_integer(f"num_{name}s", total, 1)
    if not 0 <= number < total:
        raise _bad(f"{name} is {number}; 0 to {total - 1}")


def _bad(message: str) -> ClientError:
    return ClientError("bad_configuration", message)
