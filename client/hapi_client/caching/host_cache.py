"""All features and samples of a job that are cached on this host."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hapi_client.caching.cache_config import CacheConfig
from hapi_client.caching.directory import CacheDirectory
from hapi_client.caching.feature_cache import FeatureCache, SampleCache
from hapi_client.caching.pool import POOL, local_ranks, shared_name
from hapi_client.caching.row_map import (
    RowFormat,
    RowMap,
    unusable_message,
)
from hapi_client.data.splits import DataSet
from hapi_protocol.transforms import Training, transform_text
from hapi_splitter.host_limits import allowed_memory_bytes
from hapi_splitter.units import bytes_text

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.25
"""Default budget: share of the memory that this process may use."""


def default_memory_bytes() -> int:
    """Returns the budget of one process, which shares its host with ranks."""
    ranks = local_ranks(os.environ)
    return int(MEMORY_SHARE * allowed_memory_bytes() / ranks)


def caches_samples(
    feature_bytes: float, stored_bytes: float, limit_bytes: float
) -> bool:
    """Returns True if samples as stored are cached instead of features.

    Features save more, but those of all samples may not fit.

    Args:
        feature_bytes: bytes of all samples and variants.
        stored_bytes: bytes of all samples as they are stored.
        limit_bytes: bytes of memory or directory, whichever has more.
    """
    return feature_bytes > limit_bytes >= stored_bytes


class HostCache:
    """The cached features of all splits of a job.

    Args:
        facts: what determines the features besides the data and the random
            changes of images: storage, model, precision, numerics; fit for
            JSON.
        shape: shape of one sample's features.
        dtype: dtype of the features.
        splits: all data sets of the job.
        options: where features are cached.
        variants: number of epochs after which random changes of the images
            repeat; None if they never do.
        changed_shards: returns ETags of a data set's shards that the store
            no longer has; called if features of an earlier job are found.
    """

    def __init__(
        self,
        facts: Callable[[], Mapping[str, Any]],
        shape: Sequence[int],
        dtype: torch.dtype,
        splits: Collection[DataSet],
        options: CacheConfig,
        variants: int | None = 1,
        changed_shards: Callable[[DataSet], Collection[str]] = lambda _: (),
    ) -> None:
        self._facts = facts
        self._shape = tuple(shape)
        self._dtype = dtype
        self._row_bytes = torch.Size(shape).numel() * dtype.itemsize
        self._splits = list(splits)
        self._variants = variants
        self._changed_shards = changed_shards
        self._memory_bytes = (
            default_memory_bytes()
            if options.memory_bytes is None
            else options.memory_bytes
        )
        self._shared = ""
        self._directory: CacheDirectory | None = None
        if options.directory is None:
            self._shared = shared_name(os.environ)
        else:
            try:
                self._directory = CacheDirectory(
                    options.directory, options.directory_bytes
                )
            except OSError as error:
                logger.warning(
                    "%s", unusable_message(options.directory, error)
                )
        if 0 < self._memory_bytes < self._row_bytes:
            logger.warning(
                "features are not cached in memory: the budget is %s, and "
                "those of one sample take %s",
                bytes_text(self._memory_bytes),
                bytes_text(self._row_bytes),
            )
        self._feature_bytes = self._row_bytes * sum(
            data.num_samples * (variants or 1) for data in splits
        )
        self._stored_bytes = sum(
            span.byte_range.length_bytes
            for data in splits
            for span in data.spans
        )
        self._lock = threading.Lock()
        self._maps: list[RowMap] = []
        self._samples = SampleCache()
        self._caches: dict[tuple[int, Training | None], FeatureCache] = {}

    @property
    def _memory_limit(self) -> int:
        """Bytes that the memory may have, of all ranks that share it."""
        ranks = local_ranks(os.environ) if self._shared else 1
        return ranks * self._memory_bytes

    @property
    def _limit_bytes(self) -> int:
        """Bytes that can be cached, in the directory or in memory."""
        directory = self._directory.limit_bytes if self._directory else 0
        return max(self._memory_limit, directory)

    def samples(self, training: Training | None) -> SampleCache | None:
        """Returns samples as they are stored, where features are not cached.

        Those of data sets for which :meth:`of` was called.

        Args:
            training: random changes of the images; None for none.
        """
        return self._samples if self._caches_samples(training) else None

    def _caches_samples(self, training: Training | None) -> bool:
        limit = self._limit_bytes
        if training is not None and self._variants is None:
            return limit > 0
        return caches_samples(self._feature_bytes, self._stored_bytes, limit)

    def of(
        self, data: DataSet, training: Training | None
    ) -> FeatureCache | None:
        """Returns the features of a data set; None if none are cached.

        Args:
            data: one of the job's data sets.
            training: random changes of the images; None for none.

        Raises:
            HapiError: if shards have to be compared with the store, and it
                does not answer.
        """
        with self._lock:
            if self._caches_samples(training):
                if not self._samples.has(data):
                    self._open_samples(data)
                return None
            key = id(data), training
            if key not in self._caches:
                cache = self._open_features(data, training)
                if cache is None:
                    return None
                self._caches[key] = cache
            return self._caches[key]

    def _open_samples(self, data: DataSet) -> None:
        facts = {"storage": self._facts()["storage"], "model": "none"}
        lengths = [row.length for span in data.spans for row in span.rows]
        offsets = np.cumsum([0, *lengths])
        rows = self._open(data, {**facts, "images": "as stored"}, offsets)
        if rows is not None:
            self._samples.add(rows, data, self._changed(data, rows))

    def _open_features(
        self, data: DataSet, training: Training | None
    ) -> FeatureCache | None:
        if self._limit_bytes < self._row_bytes:
            return None
        facts = {
            **self._facts(),
            "images": transform_text(training),
            "shape": [*self._shape],
            "dtype": str(self._dtype).removeprefix("torch."),
        }
        offsets = self._row_bytes * np.arange(data.num_samples + 1)
        rows = self._open(data, facts, offsets)
        if rows is None:
            return None
        changed = self._changed(data, rows)
        return FeatureCache(rows, data, self._shape, self._dtype, changed)

    def _changed(self, data: DataSet, rows: RowMap) -> Collection[str]:
        numbers = np.arange(data.num_samples)
        is_used = rows.states_of(numbers).any()
        return self._changed_shards(data) if is_used else ()

    def _open(
        self, data: DataSet, facts: Mapping[str, Any], offsets: np.ndarray
    ) -> RowMap | None:
        """Opens rows in the directory, or in memory if that has more space."""
        container = " ".join(data.containers)
        form = RowFormat(
            {**facts, "container": container, "data": data.digest()}, offsets
        )
        if self._directory is not None:
            try:
                least = form.capacity(self._memory_bytes)
                rows = self._directory.open(form, least)
            except OSError as error:
                path = self._directory.path
                logger.warning("%s", unusable_message(path, error))
                self._directory = None
            else:
                if rows is not None:
                    self._maps.append(rows)
                    return rows
        try:
            return POOL.open(form, self, self._memory_limit, self._shared)
        except OSError as error:
            if self._shared:
                self._shared = ""
                logger.info("each rank caches for itself: %s", error)
                return self._open(data, facts, offsets)
            logger.warning("features are not cached in memory: %s", error)
            self._memory_bytes = 0
        return None

    def coverage(self, data: DataSet) -> tuple[float, float]:
        """Returns the fractions of a data set cached now, and in the end.

        Of all variants of its images, as training requests them.
        """
        if self._variants is None or self._caches_samples(None):
            return 0.0, 0.0
        with self._lock:
            opened = list(self._caches.items())
        caches = [cache for (number, _), cache in opened if number == id(data)]
        taken = self._row_bytes * sum(cache.capacity for _, cache in opened)
        total = max(1, data.num_samples * self._variants)
        now = sum(cache.num_cached() for cache in caches)
        fits = sum(cache.capacity for cache in caches)
        later = fits + max(0, self._limit_bytes - taken) // self._row_bytes
        return min(1.0, now / total), min(1.0, later / total)

    def close(self) -> None:
        """Ends this job's use; features in memory stay for the next job."""
        with self._lock:
            self._samples = SampleCache()
            self._caches.clear()
            POOL.release(self)
            while self._maps:
                self._maps.pop().close()
