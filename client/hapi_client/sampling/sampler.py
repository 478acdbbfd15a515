"""Epoch order of samples and its division among readers. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hapi_client.sampling.partition import (
    EpochPartition,
    Integers,
    Reader,
    SpanSlice,
    check_at_least,
    divisors,
)

DEFAULT_BUFFER_SPANS = 8


@dataclass(frozen=True)
class Batch:
    """A reader's samples of one step, in order.

    Attributes:
        step: number of the step, from 0 on.
        positions: ``[n]``, position of each sample's piece in
            :attr:`ReadPlan.pieces`.
        rows: ``[n]``, the sample's row in that piece.
    """

    step: int
    positions: Integers
    rows: Integers

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last_position(self) -> int:
        """All pieces up to this position are needed for the batch."""
        return int(self.positions.max())


@dataclass(frozen=True)
class ReadPlan:
    """What one reader reads, and its part of each of its steps.

    Attributes:
        pieces: in the order in which they are needed.
        batches: in the order of steps.
    """

    pieces: tuple[SpanSlice, ...]
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class SamplerConfig:
    """What an order depends on, besides the data set and the epoch.

    Attributes:
        batch_size: samples of a step, of all ranks together.
        lanes: how the epoch is divided.
        buffer_spans: width of the shuffle buffer, of all parts together.
        drop_last: leave out what does not fill a batch at the end.
    """

    batch_size: int
    partition: EpochPartition = field(default_factory=EpochPartition)
    buffer_spans: int = DEFAULT_BUFFER_SPANS
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_at_least("batch_size", self.batch_size, 1)
        check_at_least("buffer_spans", self.buffer_spans, 1)

    def step_ends(self, num_samples: int) -> Integers:
        """``[steps]``: how many samples have gone by behind each step.

        The last batch is shorter.  Where it would be too short for the most
        ranks that could share it, it joins the one before.
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


class EpochSampler:
    """All steps of an epoch.

    Args:
        rules: that it follows.
        ends: of :meth:`SamplerConfig.step_ends`.
        pieces: of all lanes.
        piece_of: ``[samples]``, in the order of delivery: index of each
            sample's piece.
        row_of: ``[samples]``, its row in that piece.
    """

    def __init__(
        self,
        rules: SamplerConfig,
        ends: Integers,
        pieces: Sequence[SpanSlice],
        piece_of: Integers,
        row_of: Integers,
    ) -> None:
        self.rules = rules
        self._ends = ends
        self._pieces = pieces
        self._piece_of = piece_of
        self._row_of = row_of

    @property
    def num_steps(self) -> int:
        return len(self._ends)

    def read_plan(self, reader: Reader | None = None) -> ReadPlan:
        """A reader's share; the only reader's if there is none given.

        Raises:
            ValueError: naming what does not divide, and what would.
        """
        reader = reader or Reader()
        self._check_reader(reader)
        steps = range(
            reader.first_step + reader.worker,
            self.num_steps,
            reader.num_workers,
        )
        taken = [self._samples_of(step, reader) for step in steps]
        samples = np.concatenate([_NOTHING, *taken])
        found, first_use, position_of = np.unique(
            self._piece_of[samples], return_index=True, return_inverse=True
        )
        by_need = np.argsort(first_use, kind="stable")
        place = np.empty_like(by_need)
        place[by_need] = np.arange(len(by_need))
        positions = place[position_of]
        rows = self._row_of[samples]
        bounds = np.cumsum([0, *map(len, taken)])
        return ReadPlan(
            tuple(self._pieces[index] for index in found[by_need]),
            tuple(
                Batch(step, positions[start:end], rows[start:end])
                for step, start, end in zip(
                    steps, bounds, bounds[1:], strict=False
                )
            ),
        )

    def _samples_of(self, step: int, reader: Reader) -> Integers:
        start = int(self._ends[step - 1]) if step else 0
        behind = (reader.rank - start) % reader.num_ranks
        return np.arange(
            start + behind, self._ends[step], reader.num_ranks, dtype=np.int64
        )

    def _check_reader(self, reader: Reader) -> None:
        partition = self.rules.partition
        _check_share("rank", reader.rank, reader.num_ranks)
        _check_share("worker", reader.worker, reader.num_workers)
        check_at_least("first_step", reader.first_step, 0)
        if partition.batch_partitions % reader.num_ranks:
            raise ValueError(
                f"{reader.num_ranks} ranks cannot share {partition.batch_partitions} parts "
                f"of a batch; allowed: {divisors(partition.batch_partitions)}"
            )
        if partition.step_partitions % reader.num_workers:
            raise ValueError(
                f"{reader.num_workers} loader workers cannot share "
                f"{partition.step_partitions} turns; allowed: {divisors(partition.step_partitions)}"
            )
        sizes = np.diff(self._ends, prepend=0)
        if len(sizes) and sizes.min() < reader.num_ranks:
            raise ValueError(
                f"{len(self._piece_of)} samples are too few for "
                f"{reader.num_ranks} ranks; use fewer ranks, or drop_last"
            )
        if self.rules.batch_size % reader.num_ranks:
            raise ValueError(
                f"a batch of {self.rules.batch_size} samples cannot be shared "
                f"equally by {reader.num_ranks} ranks; allowed: "
                f"{divisors(self.rules.batch_size)}"
            )


_NOTHING = np.empty(0, np.int64)


def index_order(
    span_sizes: Sequence[int], rules: SamplerConfig
) -> EpochSampler:
    """For evaluation: with one lane, the order of the index itself.

    Args:
        span_sizes: samples of each span.
        rules: how they are delivered.
    """
    return _order(span_sizes, rules, None)


def shuffled_order(
    span_sizes: Sequence[int], rules: SamplerConfig, *, seed: int, epoch: int
) -> EpochSampler:
    """The order of a training epoch: each sample exactly once.

    Args:
        span_sizes: samples of each span.
        rules: how they are delivered.
        seed: not negative.
        epoch: not negative.

    Raises:
        ValueError: naming an argument below its least value.
    """
    check_at_least("seed", seed, 0)
    check_at_least("epoch", epoch, 0)
    random = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    return _order(span_sizes, rules, random)


def single_batch_plan(samples: Sequence[tuple[int, int]]) -> ReadPlan:
    """One batch of some samples, in as few pieces as they allow.

    Args:
        samples: span and row of each, in the order of delivery; any may
            come twice.
    """
    pieces: list[SpanSlice] = []
    place: dict[tuple[int, int], tuple[int, int]] = {}
    for span, row in sorted(set(samples)):
        last = pieces[-1] if pieces else None
        if last is None or (last.span, last.stop) != (span, row):
            pieces.append(SpanSlice(span, row, row + 1))
        else:
            pieces[-1] = SpanSlice(span, last.first, row + 1)
        place[span, row] = len(pieces) - 1, row - pieces[-1].first
    found = np.array([place[each] for each in samples], np.int64)
    positions, rows = found.reshape(-1, 2).T
    return ReadPlan(tuple(pieces), (Batch(0, positions, rows),))


def _order(
    span_sizes: Sequence[int],
    rules: SamplerConfig,
    random: np.random.Philox | None,
) -> EpochSampler:
    sizes = np.asarray(span_sizes, np.int64)
    spans = (
        np.arange(len(sizes))
        if random is None
        else _permutation(random, len(sizes))
    )
    ends = rules.step_ends(int(sizes.sum()))
    num_samples = int(ends[-1]) if len(ends) else 0
    lane_of = _lanes_of_samples(rules, ends, num_samples)
    by_lane = np.argsort(lane_of, kind="stable")
    lane_ends = np.cumsum(
        np.bincount(
            lane_of,
            minlength=rules.partition.batch_partitions
            * rules.partition.step_partitions,
        )
    )
    pieces: list[SpanSlice] = []
    piece_of = np.empty(num_samples, np.int64)
    row_of = np.empty(num_samples, np.int64)
    width = max(1, rules.buffer_spans // rules.partition.batch_partitions)
    start = 0
    for lane, end in zip(
        _dealt(spans, sizes, lane_ends), lane_ends, strict=True
    ):
        samples = by_lane[start:end]
        piece_of[samples], row_of[samples] = _mixed(
            lane, len(pieces), width, random
        )
        pieces += lane
        start = end
    return EpochSampler(rules, ends, pieces, piece_of, row_of)


def _lanes_of_samples(
    rules: SamplerConfig, ends: Integers, num_samples: int
) -> Integers:
    samples = np.arange(num_samples, dtype=np.int64)
    steps = np.searchsorted(ends, samples, side="right")
    partition = rules.partition
    return (
        samples % partition.batch_partitions
    ) * partition.step_partitions + steps % partition.step_partitions


def _dealt(
    spans: Integers, sizes: Integers, lane_ends: Integers
) -> Iterator[list[SpanSlice]]:
    """The pieces of each lane, of the spans' samples in that order."""
    span_ends = np.cumsum(sizes[spans])
    start = 0
    for end in lane_ends:
        pieces = []
        number = int(np.searchsorted(span_ends, start, side="right"))
        while start < end:
            span = int(spans[number])
            begin = int(span_ends[number] - sizes[span])
            stop = min(int(end), int(span_ends[number]))
            pieces.append(SpanSlice(span, start - begin, stop - begin))
            start = stop
            number += 1
        yield pieces


def _mixed(
    lane: Sequence[SpanSlice],
    first_piece: int,
    width: int,
    random: np.random.Philox | None,
) -> tuple[Integers, Integers]:
    """Piece and row of a lane's samples, out of the shuffle buffer."""
    delivered = [np.empty((2, 0), np.int64)]
    pool = np.empty((2, 0), np.int64)
    for number, piece in enumerate(lane):
        size = len(piece)
        numbers = np.full(size, first_piece + number)
        added = np.stack([numbers, np.arange(size)])
        pool = np.concatenate([pool, added], axis=1)
        if random is not None:
            pool = pool[:, _permutation(random, pool.shape[1])]
        if number >= width - 1:
            delivered.append(pool[:, :size])
            pool = pool[:, size:]
    delivered.append(pool)
    piece_of, row_of = np.concatenate(delivered, axis=1)
    return piece_of, row_of


def _permutation(random: np.random.Philox, length: int) -> Integers:
    # From raw bits: NumPy keeps those stable over its versions, and not
    # what Generator.permutation makes of them (NEP 19).
    return np.argsort(random.random_raw(length), kind="stable")


def _check_share(name: str, number: int, of: int) -> None:
    check_at_least(f"num_{name}s", of, 1)
    if not 0 <= number < of:
        raise ValueError(f"{name} is {number}; 0 to {of - 1}")
