"""All features and samples of a job that are cached on this host."""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hapi_client.caching.directory import CacheDirectory, unusable_message
from hapi_client.caching.disk_rows import DiskRows
from hapi_client.caching.feature_cache import FeatureCache
from hapi_client.caching.feature_rows import FeatureRows
from hapi_client.caching.pool import POOL, CachedType, TakeMemory
from hapi_client.caching.segments import RowFormat
from hapi_client.caching.shared_memory import local_ranks, shared_directory
from hapi_client.caching.stored_bytes import (
    SampleCache,
    ShardCopies,
    StoredBytes,
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
    feature_bytes: float, stored_bytes: float, room_bytes: float
) -> bool:
    """Returns True if samples as stored are cached instead of features.

    Features save more, but those of all samples may not fit.

    Args:
        feature_bytes: of all samples and variants.
        stored_bytes: of all samples as they are stored.
        room_bytes: of memory and directory.
    """
    return feature_bytes > room_bytes >= stored_bytes


@dataclass(frozen=True)
class CacheOptions:
    """Places on this host in which features are cached.

    Attributes:
        memory_bytes: budget of memory; None for the default, 0 for none.
        directory: None for none.
        directory_bytes: size limit of the directory; None for the default.
    """

    memory_bytes: int | None = None
    directory: str | os.PathLike[str] | None = None
    directory_bytes: int | None = None


class FeatureCaches:
    """The cached features of all splits of a job.

    Args:
        facts: what determines the features besides the random changes of
            images: model, data, precision, numerics; fit for JSON.
        form: shape and dtype of one sample's features.
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
        form: RowFormat,
        splits: Collection[DataSet],
        options: CacheOptions,
        variants: int | None = 1,
        changed_shards: Callable[[DataSet], Collection[str]] = lambda _: (),
    ) -> None:
        self._facts = facts
        self._form = form
        self._splits = list(splits)
        self._variants = variants
        self._changed_shards = changed_shards
        self._memory_bytes = (
            default_memory_bytes()
            if options.memory_bytes is None
            else options.memory_bytes
        )
        self._directory: CacheDirectory | None = None
        directory, limit_bytes = options.directory, options.directory_bytes
        shared = None
        if directory is None:
            shared = shared_directory(os.environ, self._memory_bytes)
            directory, limit_bytes = shared or (None, None)
        if directory is not None:
            try:
                self._directory = CacheDirectory(directory, limit_bytes)
            except OSError as error:
                logger.warning("%s", unusable_message(directory, error))
            else:
                self._memory_bytes = 0 if shared else self._memory_bytes
        if 0 < self._memory_bytes < form.num_bytes:
            logger.warning(
                "features are not cached in memory: the budget is %s, and "
                "those of one sample take %s",
                bytes_text(self._memory_bytes),
                bytes_text(form.num_bytes),
            )
        self._stored_bytes = sum(
            span.byte_range.length_bytes
            for each in self._splits
            for span in each.spans
        )
        self._lock = threading.Lock()
        # Released, too, if a job is forgotten without being closed.
        self._keys: list[str] = []
        weakref.finalize(self, _abandon, self._keys)
        self._samples: SampleCache | None = None
        self._open: dict[Training | None, FeatureRows] = {}
        self._caches: dict[tuple[int, Training | None], FeatureCache] = {}

    def samples(self, training: Training | None) -> SampleCache | None:
        """Returns samples as they are stored, where features are not cached.

        None before :meth:`of` was called.

        Args:
            training: random changes of the images; None for none.
        """
        return self._samples if self._caches_samples(training) else None

    def _caches_samples(self, training: Training | None) -> bool:
        room = self._memory_bytes
        if self._directory is not None:
            room += self._directory.limit_bytes
        if training is not None and self._variants is None:
            return room > 0
        samples = sum(each.num_samples for each in self._splits)
        return caches_samples(
            samples * (self._variants or 1) * self._form.num_bytes,
            self._stored_bytes,
            room,
        )

    def _open_samples(self) -> SampleCache:
        facts = {
            **{k: self._facts()[k] for k in ("storage", "container")},
            "model": "none",
            "images": "as stored",
        }

        def make(take_memory: TakeMemory) -> StoredBytes:
            disk = None
            if self._directory is not None:
                with self._warned():
                    disk = ShardCopies(self._directory, facts)
            return StoredBytes(lambda n: take_memory(n, n) == n, disk)

        stored = self._opened(facts, 1, make)
        changed: set[str] = set()
        for data in self._splits:
            if any(map(stored.holds, data.spans)):
                changed.update(self._changed_shards(data))
        return SampleCache(stored, changed)

    def _opened(
        self,
        facts: Mapping[str, Any],
        row_bytes: int,
        make: Callable[[TakeMemory], CachedType],
    ) -> CachedType:
        place = str(self._directory.path) if self._directory else ""
        key = json.dumps([place, facts], sort_keys=True)
        found = POOL.open(key, self._memory_bytes, row_bytes, make)
        self._keys.append(key)
        return found

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Makes a warning of a directory that cannot be used."""
        assert self._directory is not None, "there is one"
        try:
            yield
        except OSError as error:
            logger.warning("%s", unusable_message(self._directory.path, error))

    @property
    def is_active(self) -> bool:
        """True if features can be cached."""
        return (
            self._directory is not None
            or self._memory_bytes >= self._form.num_bytes
        )

    def of(
        self, data: DataSet, training: Training | None
    ) -> FeatureCache | None:
        """Returns the features of a data set; None if none are cached.

        Called at the start of an epoch; finds what other processes have added
        to the directory.

        Args:
            data: one of the job's data sets.
            training: random changes of the images; None for none.

        Raises:
            HapiError: if shards have to be compared with the store, and it
                does not answer.
        """
        if self._caches_samples(training):
            with self._lock:
                if self._samples is None:
                    self._samples = self._open_samples()
                else:
                    self._samples.refresh()
            return None
        if not self.is_active:
            return None
        with self._lock:
            key = id(data), training
            rows = self._rows_of(training)
            if key in self._caches:
                rows.refresh()
                return self._caches[key]
            cache = FeatureCache(rows, data)
            if cache.num_cached():
                cache = FeatureCache(rows, data, self._changed_shards(data))
            rows.expected_rows = max(
                rows.expected_rows,
                sum(each.num_samples for each in self._splits),
            )
            self._caches[key] = cache
            return cache

    def _rows_of(self, training: Training | None) -> FeatureRows:
        if training in self._open:
            return self._open[training]
        facts = {
            **self._facts(),
            "images": transform_text(training),
            "shape": [*self._form.shape],
            "dtype": str(self._form.dtype).removeprefix("torch."),
        }

        def make(take_memory: TakeMemory) -> FeatureRows:
            disk = None
            if self._directory is not None:
                with self._warned():
                    disk = DiskRows(self._directory, facts, self._form)
            return FeatureRows(self._form, take_memory, disk)

        rows = self._opened(facts, self._form.num_bytes, make)
        self._open[training] = rows
        return rows

    def coverage(self, data: DataSet) -> tuple[float, float]:
        """Returns the fractions of a data set cached now, and in the end.

        Of all variants of its images, as training requests them.
        """
        if (
            self._variants is None
            or not self.is_active
            or self._caches_samples(None)
        ):
            return 0.0, 0.0
        with self._lock:
            caches = [c for (d, _), c in self._caches.items() if d == id(data)]
            opened, keys = list(self._open.values()), list(self._keys)
        total = max(1, data.num_samples * self._variants)
        now = sum(cache.num_cached() for cache in caches)
        room = sum(rows.room_rows for rows in opened)
        free = POOL.free_bytes(keys[0]) if keys else self._memory_bytes
        if self._directory is not None:
            free += self._directory.limit_bytes
        later = now + room + free // self._form.num_bytes
        return min(1.0, now / total), min(1.0, later / total)

    def close(self) -> None:
        """Ends this job's use; features in memory stay for the next job."""
        with self._lock:
            self._samples = None
            self._open.clear()
            self._caches.clear()
            while self._keys:
                POOL.release(self._keys.pop())


def _abandon(keys: list[str]) -> None:
    while keys:
        POOL.abandon(keys.pop())
