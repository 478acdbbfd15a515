"""Features of one model, cut and transform: in memory and in a directory.

Rows are found by the ETag of the shard and the number of the sample, so that
a shard that has changed is never served, and jobs with other selections of
the same shards share rows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from hapi_client.caching.directory import folder_locked, unusable_message
from hapi_client.caching.disk_rows import DiskRows
from hapi_client.caching.segments import (
    SHARD_KEY_BYTES,
    DiskSegment,
    MemorySegment,
    RowFormat,
    Rows,
    Segment,
    shard_key,
)

logger = logging.getLogger(__name__)

ABSENT, FAILED = -1, -2
MAX_SAMPLES = 1 << 24
"""Samples of one shard that may be cached on the disk: a number that has been
damaged there must not take all memory."""
_ROW_BITS = 40
_ROW_MASK = (1 << _ROW_BITS) - 1


class FeatureRows:
    """Rows of features by shard and sample.  Thread-safe.

    Args:
        form: shape and dtype of a row.
        take_memory: takes memory for at least, and at most, given numbers of
            rows; returns the number, or 0.
        disk: rows on the disk; None for none.

    Attributes:
        form: shape and dtype of a row.
        num_rows: number of cached samples.
        expected_rows: samples that may still be added, by which room is
            taken.
    """

    def __init__(
        self,
        form: RowFormat,
        take_memory: Callable[[int, int], int],
        disk: DiskRows | None,
    ) -> None:
        self.form = form
        self._take_memory = take_memory
        self._disk = disk
        self._appends_to_disk = disk is not None
        self._lock = threading.RLock()
        self._segments: list[Segment] = []
        self._places: dict[bytes, Rows] = {}
        self._failures: dict[tuple[bytes, int], str] = {}
        self._memory_segment: MemorySegment | None = None
        self._has_damage = False
        self.num_rows = 0
        self.expected_rows = 0
        self.refresh()

    @property
    def has_disk(self) -> bool:
        """True if rows may have to be compared with their checksums."""
        return any(isinstance(each, DiskSegment) for each in self._segments)

    @property
    def room_rows(self) -> int:
        """Number of rows that can still be added without more room."""
        with self._lock:
            return sum(each.capacity for each in self._segments) - (
                self.num_rows
            )

    def find(self, etag: str, samples: slice) -> Rows:
        """Returns places for :meth:`gather`; negative without features."""
        with self._lock:
            places = self._shard(shard_key(etag), samples.stop)
            return np.array(places[samples])

    def failure(self, etag: str, sample: int) -> str:
        """Returns the message of a sample with the place FAILED."""
        return self._failures[shard_key(etag), sample]

    def view(self, place: int) -> torch.Tensor:
        """Returns the features of one sample, not to be changed."""
        number, row = place >> _ROW_BITS, place & _ROW_MASK
        return self._segments[number].features[row]

    def selector(self, places: Rows) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that copies some of the features.

        Args:
            places: of all features.

        Returns:
            A function from ``[n]`` int64, which index ``places``, to
            ``[n, *shape]``.
        """
        numbers = places >> _ROW_BITS
        if not len(places) or (numbers != numbers[0]).any():
            return lambda chosen: self.gather(places[chosen.numpy()])
        features: torch.Tensor = self._segments[numbers[0]].features
        rows = torch.from_numpy(places & _ROW_MASK)
        return lambda chosen: features.index_select(0, rows[chosen])

    def gather(self, places: Rows) -> torch.Tensor:
        """Returns a copy of features, ``[n, *shape]``."""
        numbers, rows = places >> _ROW_BITS, places & _ROW_MASK
        features = torch.empty(
            (len(places), *self.form.shape), dtype=self.form.dtype
        )
        for number in np.unique(numbers):
            mine = numbers == number
            features[torch.from_numpy(mine)] = self._segments[number].features[
                torch.from_numpy(rows[mine])
            ]
        return features

    def check(self, etag: str, samples: slice) -> bool:
        """Compares rows with their checksums; forgets those that differ.

        Returns:
            True if all samples are there.
        """
        places = self.find(etag, samples)
        good = places >= 0
        numbers = places[good] >> _ROW_BITS
        rows = places[good] & _ROW_MASK
        for number in np.unique(numbers):
            bad = self._segments[number].damaged(rows[numbers == number])
            if len(bad):
                self._forget(etag, samples, (int(number) << _ROW_BITS) + bad)
        return bool((self.find(etag, samples) != ABSENT).all())

    def _forget(self, etag: str, samples: slice, places: Rows) -> None:
        with self._lock:
            if not self._has_damage:
                self._has_damage = True
                logger.warning(
                    "cached features are damaged; they are computed again"
                )
            shard = self._shard(shard_key(etag), samples.stop)[samples]
            shard[np.isin(shard, places)] = ABSENT
            self.num_rows -= len(places)

    def add(
        self,
        etag: str,
        samples: range,
        features: torch.Tensor,
        failures: Mapping[int, str],
    ) -> None:
        """Adds the samples that are absent, as far as there is room.

        Args:
            etag: of the shard.
            samples: numbers of the samples.
            features: ``[good samples, *shape]``, in order.
            failures: error messages by row, of the other samples.
        """
        key = shard_key(etag)
        good = np.array(
            [s for row, s in enumerate(samples) if row not in failures],
            np.int64,
        )
        with self._lock:
            self._add_good(key, good, features)
            shard = self._shard(key, samples.stop)
            new = {
                samples[row]: message
                for row, message in failures.items()
                if shard[samples[row]] == ABSENT
            }
            for sample, message in new.items():
                self._add_failure(key, sample, message)
            if new and self._disk is not None and self._appends_to_disk:
                try:
                    with folder_locked(self._disk.folder):
                        self._disk.add_failures(key, new)
                except OSError as error:
                    self._give_up_disk(self._disk, error)

    def _add_failure(self, key: bytes, sample: int, message: str) -> None:
        shard = self._shard(key, sample + 1)
        if shard[sample] == ABSENT:
            self._failures[key, sample] = message
            shard[sample] = FAILED

    def _add_good(
        self, key: bytes, samples: Rows, features: torch.Tensor
    ) -> None:
        if (
            self._disk is not None
            and self._appends_to_disk
            and not self._is_known(key, samples).all()
            and samples.max() < MAX_SAMPLES
        ):
            try:
                self._add_to_disk(self._disk, key, samples, features)
            except OSError as error:
                self._give_up_disk(self._disk, error)
        new = ~self._is_known(key, samples)
        if new.any():
            self._add_to_memory(
                key, samples[new], features[torch.from_numpy(new)]
            )

    def _is_known(self, key: bytes, samples: Rows) -> npt.NDArray[np.bool_]:
        shard = self._shard(key, int(samples.max(initial=0)) + 1)
        return np.not_equal(shard[samples], ABSENT)

    def _add_to_disk(
        self,
        disk: DiskRows,
        key: bytes,
        samples: Rows,
        features: torch.Tensor,
    ) -> None:
        with folder_locked(disk.folder):
            self.refresh()
            new = ~self._is_known(key, samples)
            count = int(new.sum())
            if not count:
                return
            segment = disk.segment_with_room(count, self._wanted_rows(count))
            if segment is None:
                return
            rows = segment.append(
                key, samples[new], features[torch.from_numpy(new)]
            )
        self._set(key, samples[new], self._number(segment), rows)

    def _add_to_memory(
        self, key: bytes, samples: Rows, features: torch.Tensor
    ) -> None:
        count = len(samples)
        segment = self._memory_segment
        if segment is None or segment.capacity - segment.num_rows < count:
            capacity = self._take_memory(count, self._wanted_rows(count))
            if not capacity:
                return
            try:
                segment = MemorySegment(
                    capacity, self.form.shape, self.form.dtype
                )
            except RuntimeError as error:  # of torch: the host refuses it
                self._take_memory = lambda least, most: 0
                logger.warning("features are not cached in memory: %s", error)
                return
            self._memory_segment = segment
        rows = segment.append(features)
        self._set(key, samples, self._number(segment), rows)

    def _wanted_rows(self, count: int) -> int:
        """Returns the rows for which a new segment takes room."""
        expected = self.expected_rows - self.num_rows
        # Shards that have changed give more rows than expected.
        return max(count, expected, self.num_rows // 4)

    def _number(self, segment: Segment) -> int:
        if segment not in self._segments:
            self._segments.append(segment)
        return self._segments.index(segment)

    def _set(
        self, key: bytes, samples: Rows, segment: int, rows: Rows
    ) -> None:
        shard = self._shard(key, int(samples.max()) + 1)
        self.num_rows += int((shard[samples] == ABSENT).sum())
        shard[samples] = (segment << _ROW_BITS) + rows

    def refresh(self) -> None:
        """Finds rows that other processes have added to the directory."""
        with self._lock:
            disk = self._disk
            if disk is None or not self._appends_to_disk:
                return
            try:
                for key, sample, message in disk.new_failures():
                    if 0 <= sample < MAX_SAMPLES:
                        self._add_failure(key, sample, message)
                for segment in disk.refresh():
                    first, records = segment.new_records()
                    keys = records["shard"].tobytes()
                    for start, stop in _runs(records["shard"]):
                        place = start * SHARD_KEY_BYTES
                        samples = records["sample"][start:stop]
                        rows = np.arange(first + start, first + stop)
                        likely = samples < MAX_SAMPLES
                        if likely.any():
                            self._set(
                                keys[place : place + SHARD_KEY_BYTES],
                                samples[likely].astype(np.int64),
                                self._number(segment),
                                rows[likely],
                            )
            except OSError as error:
                self._give_up_disk(disk, error)

    def _give_up_disk(self, disk: DiskRows, error: OSError) -> None:
        """Adds no more rows; those that are mapped stay in use."""
        if isinstance(error, TimeoutError):
            logger.info("features are not added to the cache: %s", error)
            return
        self._appends_to_disk = False
        logger.warning("%s", unusable_message(disk.folder, error))

    def _shard(self, key: bytes, stop: int) -> Rows:
        """Returns the places of a shard, at least up to a sample."""
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = np.full(stop, ABSENT, np.int64)
        elif len(found) < stop:
            more = np.full(max(stop, 2 * len(found)), ABSENT, np.int64)
            more[: len(found)] = found
            found = self._places[key] = more
        return found

    def close(self) -> None:
        """Closes the files; rows in memory end with the last reference."""
        with self._lock:
            if self._disk is not None:
                self._disk.close()
                self._disk = None


def _runs(shards: np.ndarray) -> Iterable[tuple[int, int]]:
    """Returns start and stop of runs of records of the same shard."""
    if not len(shards):
        return ()
    changes = np.flatnonzero((shards[1:] != shards[:-1]).any(axis=1)) + 1
    ends = [0, *changes.tolist(), len(shards)]
    return pairwise(ends)
