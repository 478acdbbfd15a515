"""Samples as they are stored, cached where their features cannot be.

Random changes that never repeat give other features in each epoch, and
features may be larger than photographs.  Their bytes are the same in each
epoch, and save the network, though neither decoding nor layers.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hapi_client.caching.directory import (
    CacheDirectory,
    folder_locked,
    unusable_message,
)
from hapi_client.caching.segments import shard_key
from hapi_protocol.data_index import IndexRow, Span

logger = logging.getLogger(__name__)

RECORD = np.dtype([("sample", "<u4"), ("crc", "<u4")])
ROOM_BYTES = 64 * 1024 * 1024
"""Room that is taken in the directory at a time."""


class StoredBytes:
    """Bytes of samples, by the ETag of their shard.  Thread-safe.

    Args:
        take_memory: takes a number of bytes of memory; returns False if
            there is too little.
        disk: copies of shards on the disk; None for none.
    """

    def __init__(
        self, take_memory: Callable[[int], bool], disk: ShardCopies | None
    ) -> None:
        self._take_memory = take_memory
        self._disk = disk
        self._samples: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()

    def holds(self, span: Span) -> bool:
        """Returns True if all samples of a span are likely to be there."""
        disk = self._disk
        return all(
            (span.etag, row.sample) in self._samples
            or (disk is not None and disk.holds(span.etag, row.sample))
            for row in span.rows
        )

    def get(self, span: Span) -> bytes | None:
        """Returns the bytes of a span; None if some are absent or damaged."""
        # All of them, so that each damaged sample is found at once.
        parts = [self._sample(span.etag, row) for row in span.rows]
        good = [each for each in parts if each is not None]
        return b"".join(good) if len(good) == len(parts) else None

    def _sample(self, etag: str, row: IndexRow) -> bytes | None:
        data = self._samples.get((etag, row.sample))
        if data is None and self._disk is not None:
            return self._disk.get(etag, row)
        return data

    def put(self, span: Span, data: bytes) -> None:
        """Adds the samples of a span that are absent, if they have room.

        Args:
            span: the span.
            data: its byte range of the shard.
        """
        first = span.byte_range.first
        samples = {
            row: data[row.offset - first : row.offset - first + row.length]
            for row in span.rows
        }
        with self._lock:
            if self._disk is not None:
                try:
                    self._disk.put(span.etag, samples)
                except TimeoutError as error:
                    logger.info("samples are not added: %s", error)
                except OSError as error:
                    logger.warning(
                        "%s", unusable_message(self._disk.folder, error)
                    )
                    self._disk = None
            for row, each in samples.items():
                key = span.etag, row.sample
                if key in self._samples or (
                    self._disk is not None and self._disk.holds(*key)
                ):
                    continue
                if not self._take_memory(len(each)):
                    break
                self._samples[key] = each

    def refresh(self) -> None:
        """Finds samples that other processes have added to the directory."""
        if self._disk is not None:
            self._disk.refresh()

    def close(self) -> None:
        """Frees memory and files."""
        with self._lock:
            self._samples.clear()
            if self._disk is not None:
                self._disk.close()
                self._disk = None


class SampleCache:
    """Stored samples of one job, without shards that have changed.

    Args:
        stored: where they are.
        changed: ETags of the job's shards that the store no longer has.
    """

    def __init__(self, stored: StoredBytes, changed: Collection[str]) -> None:
        self._stored = stored
        self._changed = frozenset(changed)

    def holds(self, span: Span) -> bool:
        """Returns True if all samples of a span are likely to be there."""
        return span.etag not in self._changed and self._stored.holds(span)

    def get(self, span: Span) -> bytes | None:
        """Returns the bytes of a span; None if some are absent or damaged."""
        return None if span.etag in self._changed else self._stored.get(span)

    def put(self, span: Span, data: bytes) -> None:
        """Adds a span; see :meth:`StoredBytes.put`."""
        if span.etag not in self._changed:
            self._stored.put(span, data)

    def refresh(self) -> None:
        """Finds samples that other processes have added to the directory."""
        self._stored.refresh()


class ShardCopies:
    """Sparse copies of shards: each sample at the place that it has there.

    ``SHARD.tar`` has the bytes, and ``SHARD.rows`` a record for each sample
    with a checksum, which is written later and compared at each read.

    Args:
        directory: the cache.
        facts: whose shards these are, fit for JSON.

    Raises:
        OSError: if the directory cannot be used.
    """

    def __init__(
        self, directory: CacheDirectory, facts: Mapping[str, Any]
    ) -> None:
        self._directory = directory
        self.folder, self._handle = directory.open(facts)
        self._copies: dict[str, _Copy] = {}
        self._lock = threading.Lock()
        self._room_bytes = 0
        self._is_full = False

    def holds(self, etag: str, sample: int) -> bool:
        """Returns True if there is a record of a sample."""
        return sample in self._copy(etag).checksums

    def get(self, etag: str, row: IndexRow) -> bytes | None:
        """Returns a sample's bytes; None if it is absent or damaged."""
        copy = self._copy(etag)
        checksum = copy.checksums.get(row.sample)
        if checksum is None:
            return None
        try:
            with copy.path.open("rb") as file:
                data = os.pread(file.fileno(), row.length, row.offset)
        except OSError as error:
            logger.warning("%s", unusable_message(copy.path, error))
            data = b""
        if _checksum(etag, row, data) == checksum:
            return data
        logger.warning(
            "%s: sample %s is damaged; it is read again", copy.path, row.key
        )
        copy.checksums.pop(row.sample, None)
        return None

    def put(self, etag: str, samples: Mapping[IndexRow, bytes]) -> None:
        """Writes the samples that are absent, if they have room.

        Raises:
            OSError: if the disk is full or fails.
        """
        copy = self._copy(etag)
        with folder_locked(self.folder):
            copy.refresh()
            new = {
                row: data
                for row, data in samples.items()
                if row.sample not in copy.checksums
            }
            if not new or not self._take(sum(row.length for row in new)):
                return
            with _opened(copy.path) as file:
                for row, data in new.items():
                    file.seek(row.offset)
                    file.write(data)
            copy.append(
                {row.sample: _checksum(etag, row, d) for row, d in new.items()}
            )

    def _take(self, num_bytes: int) -> bool:
        if self._is_full:
            return False
        if self._room_bytes < num_bytes:
            with self._directory.locked():
                self._room_bytes = self._directory.room_bytes(
                    max(num_bytes, ROOM_BYTES)
                )
        if self._room_bytes < num_bytes:
            self._is_full = True
            self._directory.warn_full()
            return False
        self._room_bytes -= num_bytes
        return True

    def _copy(self, etag: str) -> _Copy:
        with self._lock:
            if etag not in self._copies:
                path = self.folder / f"{shard_key(etag).hex()}.tar"
                self._copies[etag] = _Copy(path)
            return self._copies[etag]

    def refresh(self) -> None:
        """Finds samples that other processes have added."""
        with self._lock:
            copies = list(self._copies.values())
        for each in copies:
            each.refresh()

    def close(self) -> None:
        """Lets others remove the copies."""
        os.close(self._handle)


class _Copy:
    """The copy of one shard: its path, and checksums by sample."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = path.with_suffix(".rows")
        self._lock = threading.Lock()
        self._read_bytes = 0
        self.checksums: dict[int, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Reads records that were added."""
        with self._lock, suppress(FileNotFoundError):
            with self._records.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
            count = len(data) // RECORD.itemsize
            records = np.frombuffer(data, RECORD, count)
            self.checksums.update(records.tolist())
            self._read_bytes += count * RECORD.itemsize

    def append(self, checksums: Mapping[int, int]) -> None:
        """Adds records; a part of one, of a killed writer, is overwritten."""
        records = np.array([*checksums.items()], RECORD)
        with _opened(self._records) as file:
            file.seek(self._read_bytes)
            file.write(records.tobytes())
        self.refresh()


def _opened(path: Path) -> BinaryIO:
    """Opens a file to change it; made if it is absent."""
    path.touch(0o600)
    return path.open("r+b")


def _checksum(etag: str, row: IndexRow, data: bytes) -> int:
    name = shard_key(etag) + row.sample.to_bytes(4, "little")
    return zlib.crc32(data, zlib.crc32(name))
