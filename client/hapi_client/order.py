"""The order of an epoch (pure).

Spans are permuted by (seed, epoch); their samples pass through a shuffle
buffer a few spans wide.  The result depends on nothing else: not on the cut,
the encoding, the number of threads or on which tier did the work, so two
runs with one seed see the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DEFAULT_BUFFER_SPANS = 8


@dataclass(frozen=True)
class Batch:
    """The samples of one batch, in order.

    Attributes:
        positions: ``[n]``, position of each sample's span in
            :attr:`EpochOrder.spans`.
        rows: ``[n]``, the sample's row in that span.
    """

    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last_position(self) -> int:
        """All spans up to this position are needed for the batch."""
        return int(self.positions.max())


@dataclass(frozen=True)
class EpochOrder:
    """Which spans to fetch, and which samples make each batch.

    Attributes:
        spans: numbers of the data set's spans, in the order to fetch.
        positions: ``[samples]``, as in :class:`Batch`, of all batches.
        rows: ``[samples]``, likewise.
        batch_size: samples of each batch but the last.
        num_batches: the last one may be shorter.
    """

    spans: tuple[int, ...]
    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    batch_size: int
    num_batches: int

    def batches(self) -> Iterator[Batch]:
        for number in range(self.num_batches):
            part = slice(
                number * self.batch_size, (number + 1) * self.batch_size
            )
            yield Batch(self.positions[part], self.rows[part])


def index_order(
    span_sizes: Sequence[int], batch_size: int, *, drop_last: bool = False
) -> EpochOrder:
    """The order of the index itself, for evaluation.

    Args:
        span_sizes: samples of each span.
        batch_size: at least 1.
        drop_last: leave out a shorter last batch.
    """
    sizes = np.asarray(span_sizes, np.int64)
    positions = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.concatenate([np.arange(0), *(np.arange(n) for n in sizes)])
    return _order(
        tuple(range(len(sizes))), positions, rows, batch_size, drop_last
    )


def shuffled_order(
    span_sizes: Sequence[int],
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    buffer_spans: int = DEFAULT_BUFFER_SPANS,
    drop_last: bool = False,
) -> EpochOrder:
    """The order of a training epoch: each sample exactly once.

    Args:
        span_sizes: samples of each span.
        batch_size: at least 1.
        seed: not negative.
        epoch: not negative.
        buffer_spans: width of the shuffle buffer; as many spans' samples
            wait in it at most.
        drop_last: leave out a shorter last batch.

    Raises:
        ValueError: naming an argument below its least value.
    """
    _check("seed", seed, 0)
    _check("epoch", epoch, 0)
    _check("buffer_spans", buffer_spans, 1)
    sizes = np.asarray(span_sizes, np.int64)
    random = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    spans = _permutation(random, len(sizes))
    pieces = [np.empty((2, 0), np.int64)]
    pool = np.empty((2, 0), np.int64)
    for position, size in enumerate(sizes[spans]):
        added = np.stack([np.full(size, position), np.arange(size)])
        pool = np.concatenate([pool, added], axis=1)
        pool = pool[:, _permutation(random, pool.shape[1])]
        if position >= buffer_spans - 1:
            pieces.append(pool[:, :size])
            pool = pool[:, size:]
    pieces.append(pool)
    positions, rows = np.concatenate(pieces, axis=1)
    return _order(
        tuple(int(span) for span in spans),
        positions,
        rows,
        batch_size,
        drop_last,
    )


def _permutation(
    random: np.random.Philox, length: int
) -> npt.NDArray[np.int64]:
    # From raw bits: NumPy keeps those stable over its versions, and not
    # what Generator.permutation makes of them (NEP 19).
    return np.argsort(random.random_raw(length), kind="stable")


def _order(
    spans: tuple[int, ...],
    positions: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    batch_size: int,
    drop_last: bool,
) -> EpochOrder:
    _check("batch_size", batch_size, 1)
    full, rest = divmod(len(rows), batch_size)
    return EpochOrder(
        spans=spans,
        positions=positions,
        rows=rows,
        batch_size=batch_size,
        num_batches=full + (rest > 0 and not drop_last),
    )


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; at least {least}")
