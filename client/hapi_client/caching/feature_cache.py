"""Features at the freeze point cached on this host for later epochs.

The frozen layers compute the same in every epoch, so a sample's features are
computed once.  In memory they stay until another job needs the room: the
order of samples differs in each epoch, so that no sample is needed sooner
than another, and there is no better choice than those that come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hapi_client.caching.feature_rows import ABSENT, FAILED, FeatureRows
from hapi_client.caching.segments import Rows
from hapi_client.data.splits import DataSet
from hapi_client.sampling.partition import SpanSlice

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
        rows: where they are.
        data: the data set.
        changed: ETags of its shards that the store no longer has.
    """

    def __init__(
        self, rows: FeatureRows, data: DataSet, changed: Collection[str] = ()
    ) -> None:
        self._rows = rows
        self._spans = data.spans
        self._changed = frozenset(changed)

    def holds(self, piece: SpanSlice) -> bool:
        """Returns True if all samples of a slice are known."""
        return bool((self.places_of(piece) != ABSENT).all())

    def num_cached(self) -> int:
        """Returns the number of samples that are known."""
        return sum(
            int((self.places_of(SpanSlice(n, 0, len(s.rows))) != ABSENT).sum())
            for n, s in enumerate(self._spans)
        )

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
        places = np.concatenate([*map(self.places_of, pieces)])
        if (places < 0).any():
            return None
        if self._rows.has_disk:
            if len(places) * self._rows.form.num_bytes > QUICK_CHECK_BYTES:
                return None
            if not all(map(self._check, pieces)):
                return None
        return self._rows.selector(places)

    def put(
        self,
        piece: SpanSlice,
        features: torch.Tensor,
        failures: Mapping[int, str],
    ) -> None:
        """Adds the samples of a slice that are absent, if they have room.

        Slices of different epochs overlap, because partitions cut spans
        elsewhere in each.

        Args:
            piece: the slice.
            features: ``[good samples, *shape]``, in order.
            failures: error messages by row, of the other samples.
        """
        span, samples = self._spans[piece.span], self._samples(piece)
        if span.etag not in self._changed:
            self._rows.add(
                span.etag,
                range(samples.start, samples.stop),
                features,
                failures,
            )

    def get(self, piece: SpanSlice) -> CachedSlice | None:
        """Returns a slice that :meth:`holds`; None if it is damaged.

        Features are not copied.
        """
        if not self._check(piece):
            return None
        etag, first = self._spans[piece.span].etag, self._samples(piece).start
        places = self.places_of(piece).tolist()
        return CachedSlice(
            {
                row: self._rows.view(place)
                for row, place in enumerate(places)
                if place != FAILED
            },
            {
                row: self._rows.failure(etag, first + row)
                for row, place in enumerate(places)
                if place == FAILED
            },
        )

    def places_of(self, piece: SpanSlice) -> Rows:
        """Returns where a slice's features are, or negative numbers."""
        etag = self._spans[piece.span].etag
        if etag in self._changed:
            return np.full(len(piece), ABSENT, np.int64)
        return self._rows.find(etag, self._samples(piece))

    def _check(self, piece: SpanSlice) -> bool:
        etag = self._spans[piece.span].etag
        return self._rows.check(etag, self._samples(piece))

    def _samples(self, piece: SpanSlice) -> slice:
        first = self._spans[piece.span].rows[0].sample
        return slice(first + piece.first, first + piece.stop)
