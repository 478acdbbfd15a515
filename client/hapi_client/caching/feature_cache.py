"""Features and stored samples of a data set that are cached on this host.

The frozen layers compute the same in every epoch, so a sample's features are
computed once.  Random changes that never repeat give other features in each
epoch, and features may be larger than photographs.  The samples as they are
stored are then cached instead, which saves the network, though neither
decoding nor layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hapi_client.caching.row_map import ABSENT, FAILED, GOOD, RowMap, Rows
from hapi_client.data.splits import DataSet
from hapi_client.sampling.partition import SpanSlice
from hapi_protocol.data_index import Span

QUICK_CHECK_BYTES = 256 * 1024 * 1024
"""Features up to which an epoch may wait until all checksums are compared."""


@dataclass(frozen=True)
class CachedSlice:
    """Features of the samples of a slice of a span.

    Attributes:
        features: by row, without samples that cannot be decoded.
        failures: error messages by row, of the others.
    """

    features: Mapping[int, torch.Tensor]
    failures: Mapping[int, str]


class FeatureCache:
    """Cached features of one data set and one variant of its images.

    Args:
        rows: their bytes.
        data: the data set.
        shape: shape of one sample's features.
        dtype: dtype of the features.
        changed: ETags of its shards that the store no longer has.

    Attributes:
        capacity: number of samples whose features have space.
    """

    def __init__(
        self,
        rows: RowMap,
        data: DataSet,
        shape: Sequence[int],
        dtype: torch.dtype,
        changed: Collection[str] = (),
    ) -> None:
        self.capacity = rows.capacity
        self._rows = rows
        with torch.inference_mode(mode=False):
            count = rows.length_bytes // dtype.itemsize
            features = torch.frombuffer(rows.rows, dtype=dtype, count=count)
            self._features = features.view(rows.capacity, *shape)
        self._firsts = np.cumsum([0, *data.sizes])
        self._is_current = np.repeat(
            [span.etag not in changed for span in data.spans], data.sizes
        )

    def holds(self, piece: SpanSlice) -> bool:
        """Returns True if all samples of a slice are known."""
        return bool((self._states(self._numbers(piece)) != ABSENT).all())

    def num_cached(self) -> int:
        """Returns the number of samples that are known."""
        numbers = np.arange(len(self._is_current))
        return int(np.count_nonzero(self._states(numbers)))

    def selector(
        self, pieces: Sequence[SpanSlice]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Returns a function that copies features of some slices.

        Returns:
            A function from numbers of samples, of all slices in a row,
            ``[n]`` int64, to features, ``[n, *shape]``. None unless all
            features are there, and their checksums were compared or take
            little time.
        """
        if not pieces:
            return None
        numbers = np.concatenate([*map(self._numbers, pieces)])
        if (self._states(numbers) != GOOD).any():
            return None
        unchecked = self._rows.num_unchecked(numbers)
        unchecked_bytes = unchecked * self._features[0].nbytes
        if unchecked_bytes > QUICK_CHECK_BYTES or not self._rows.check(
            numbers
        ):
            return None
        features, chosen = self._features, torch.from_numpy(numbers)
        return lambda samples: features.index_select(0, chosen[samples])

    def put(
        self,
        piece: SpanSlice,
        features: torch.Tensor,
        failures: Mapping[int, str],
    ) -> None:
        """Adds the samples of a slice that are absent, if they have space.

        Slices of different epochs overlap, because partitions cut spans
        elsewhere in each.

        Args:
            piece: the slice.
            features: ``[good samples, *shape]``, in order.
            failures: error messages by row, of the other samples.
        """
        numbers = self._numbers(piece)
        if not self._is_current[numbers[0]]:
            return
        if len(features):
            good = np.delete(numbers, list(failures))
            data = features.detach().cpu().contiguous().view(torch.uint8)
            self._rows.put(good, list(data.view(len(good), -1).numpy()))
        for row, message in failures.items():
            self._rows.put_message(int(numbers[row]), message)

    def get(self, piece: SpanSlice) -> CachedSlice | None:
        """Returns a slice that :meth:`holds`; None if it is damaged.

        Features are not copied.
        """
        numbers = self._numbers(piece)
        if not self._rows.check(numbers):
            return None
        failed = np.flatnonzero(self._states(numbers) == FAILED).tolist()
        first = int(numbers[0])
        return CachedSlice(
            {
                row: self._features[first + row]
                for row in range(len(piece))
                if row not in failed
            },
            {row: self._rows.message(first + row) for row in failed},
        )

    def _numbers(self, piece: SpanSlice) -> Rows:
        first = self._firsts[piece.span]
        return np.arange(first + piece.first, first + piece.stop)

    def _states(self, numbers: Rows) -> npt.NDArray[np.uint8]:
        states = self._rows.states_of(numbers)
        states[~self._is_current[numbers]] = ABSENT
        return states


class SampleCache:
    """Stored samples of one job, without shards that have changed."""

    def __init__(self) -> None:
        self._shards: dict[tuple[str, str], tuple[RowMap, int]] = {}
        self._data: set[int] = set()

    def has(self, data: DataSet) -> bool:
        """Returns True if a data set was added."""
        return id(data) in self._data

    def add(
        self, rows: RowMap, data: DataSet, changed: Collection[str]
    ) -> None:
        """Adds a data set.

        Args:
            rows: bytes of its samples.
            data: the data set.
            changed: ETags of its shards that the store no longer has.
        """
        self._data.add(id(data))
        first = 0
        for span in data.spans:
            if span.etag not in changed:
                place = rows, first - span.rows[0].sample
                self._shards.setdefault((span.path, span.etag), place)
            first += len(span.rows)

    def holds(self, span: Span) -> bool:
        """Returns True if all samples of a span are likely to be there."""
        rows, numbers = self._find(span)
        return rows is not None and bool(rows.states_of(numbers).all())

    def get(self, span: Span) -> bytes | None:
        """Returns the bytes of a span; None if some are absent or damaged."""
        rows, numbers = self._find(span)
        if rows is None or not rows.check(numbers):
            return None
        return bytes(rows.read(numbers[0], numbers[-1] + 1))

    def put(self, span: Span, data: bytes) -> None:
        """Adds the samples of a span that are absent, if they have space.

        Args:
            span: the span.
            data: its byte range of the shard.
        """
        rows, numbers = self._find(span)
        if rows is not None:
            first = span.byte_range.first
            starts = [row.offset - first for row in span.rows]
            values = [
                data[start : start + row.length]
                for start, row in zip(starts, span.rows, strict=True)
            ]
            rows.put(numbers, values)

    def _find(self, span: Span) -> tuple[RowMap | None, Rows]:
        rows, first = self._shards.get((span.path, span.etag), (None, 0))
        first += span.rows[0].sample
        return rows, np.arange(first, first + len(span.rows))
