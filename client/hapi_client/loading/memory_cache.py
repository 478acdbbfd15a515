"""Features at the freeze point cached in memory for later epochs.

The frozen layers compute the same in every epoch, so a sample's features are
computed once. They stay until the job ends: the order of samples differs in
each epoch, so that no sample is needed sooner than another, and there is no
better choice than those that come first.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hapi_client.data.splits import DataSet
from hapi_client.sampling.partition import SpanSlice
from hapi_protocol.transforms import Training
from hapi_splitter.host_limits import allowed_memory_bytes
from hapi_splitter.units import bytes_text

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.25
"""Default budget: share of the memory that this process may use."""
_ABSENT, _FAILED = -1, -2


def default_budget_bytes() -> int:
    """Returns the budget of one process, which shares its host with ranks."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return int(MEMORY_SHARE * allowed_memory_bytes() / ranks)


@dataclass(frozen=True)
class CachedSlice:
    """Features of the samples of a slice of a span.

    Attributes:
        features: by row, without samples that cannot be decoded.
        failures: error messages by row, of the others.
    """

    features: Mapping[int, torch.Tensor]
    failures: Mapping[int, str]


class MemoryCache:
    """Features of the samples of one data set. Thread-safe.

    Args:
        sizes: samples of each span.
        shape: of one sample's features.
        dtype: of the features.
        capacity: largest number of samples.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        capacity: int,
    ) -> None:
        self._starts = np.cumsum([0, *sizes])
        num_samples = int(self._starts[-1])
        self.capacity = min(capacity, num_samples)
        self._lock = threading.RLock()
        # Memory is taken page by page, as features are written.
        with torch.inference_mode(mode=False):
            self._features = torch.empty((self.capacity, *shape), dtype=dtype)
        self._slots = np.full(num_samples, _ABSENT, np.int64)
        self._failures: dict[int, str] = {}
        self._num_cached = 0

    @property
    def num_cached(self) -> int:
        """Number of samples in memory."""
        return self._num_cached

    @property
    def has_failures(self) -> bool:
        """True if there are samples that cannot be decoded."""
        return bool(self._failures)

    def holds(self, piece: SpanSlice) -> bool:
        """Returns True if all samples of a slice are known."""
        return bool((self._slots[self._rows(piece)] != _ABSENT).all())

    def put(
        self,
        piece: SpanSlice,
        features: torch.Tensor,
        failures: Mapping[int, str],
    ) -> None:
        """Adds the samples of a slice that are absent, if all have room.

        Slices of different epochs overlap, because partitions cut spans
        elsewhere in each.

        Args:
            piece: the slice.
            features: ``[good samples, *shape]``, in order.
            failures: error messages by row, of the other samples.
        """
        rows = self._rows(piece)
        good = [row for row in range(len(piece)) if row not in failures]
        with self._lock:
            slots = self._slots[rows].copy()
            new = slots[good] == _ABSENT
            first, end = self._num_cached, self._num_cached + int(new.sum())
            if end > self.capacity:
                return
            self._features[first:end] = features[torch.from_numpy(new)]
            self._num_cached = end
            slots[np.array(good, np.int64)[new]] = np.arange(first, end)
            for row, message in failures.items():
                if slots[row] == _ABSENT:
                    self._failures[rows.start + row] = message
                    slots[row] = _FAILED
            self._slots[rows] = slots

    def get(self, piece: SpanSlice) -> CachedSlice:
        """Returns a slice that :meth:`holds`; features are not copied."""
        rows = self._rows(piece)
        slots = self._slots[rows].tolist()
        return CachedSlice(
            {
                row: self._features[slot]
                for row, slot in enumerate(slots)
                if slot != _FAILED
            },
            {
                row: self._failures[rows.start + row]
                for row, slot in enumerate(slots)
                if slot == _FAILED
            },
        )

    def slots_of(self, piece: SpanSlice) -> npt.NDArray[np.int64]:
        """Returns where a slice's features are, for :meth:`batch`."""
        return self._slots[self._rows(piece)]

    def batch(self, slots: npt.NDArray[np.int64]) -> torch.Tensor:
        """Returns a copy of features, ``[n, *shape]``."""
        return self._features[torch.from_numpy(slots)]

    def _rows(self, piece: SpanSlice) -> slice:
        start = int(self._starts[piece.span])
        return slice(start + piece.first, start + piece.stop)


class MemoryCaches:
    """The cached features of all splits of a job, within one budget.

    Args:
        shape: of one sample's features.
        dtype: of the features.
        budget_bytes: None for the default; 0 caches nothing.
        variants: number of epochs after which random changes of the images
            repeat; None if they never do.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        budget_bytes: int | None = None,
        variants: int | None = 1,
    ) -> None:
        self._shape = tuple(shape)
        self._dtype = dtype
        self._sample_bytes = torch.Size(shape).numel() * dtype.itemsize
        self._variants = variants
        self._left = (
            default_budget_bytes() if budget_bytes is None else budget_bytes
        )
        self._lock = threading.Lock()
        self._memories: dict[
            tuple[int, Training | None], tuple[DataSet, MemoryCache]
        ] = {}
        if 0 < self._left < self._sample_bytes:
            logger.warning(
                "features are not cached in memory: the budget is %s, and "
                "those of one sample take %s",
                bytes_text(self._left),
                bytes_text(self._sample_bytes),
            )

    def of(
        self, data: DataSet, training: Training | None
    ) -> MemoryCache | None:
        """Returns the features of a data set; None if none are cached.

        Args:
            data: the data set; the same object each time.
            training: random changes of the images; None for none.
        """
        if training is not None and self._variants is None:
            return None  # they are never needed again
        with self._lock:
            key = id(data), training
            if key in self._memories:
                return self._memories[key][1]
            capacity = self._left // self._sample_bytes
            if not capacity:
                return None
            memory = MemoryCache(
                data.sizes, self._shape, self._dtype, capacity
            )
            self._left -= memory.capacity * self._sample_bytes
            self._memories[key] = data, memory
            return memory

    def coverage(self, data: DataSet) -> tuple[float, float]:
        """Returns the fractions of a data set in memory now, and in the end.

        Of all variants of its images, as training requests them.
        """
        if self._variants is None:
            return 0.0, 0.0
        with self._lock:
            memories = [m for d, m in self._memories.values() if d is data]
            room = self._left // self._sample_bytes
        total = max(1, data.num_samples * self._variants)
        now = sum(memory.num_cached for memory in memories)
        later = room + sum(memory.capacity for memory in memories)
        return min(1.0, now / total), min(1.0, later / total)
