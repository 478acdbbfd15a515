"""Fixed numbers of feature rows, in memory or in a memory-mapped file."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

RECORD = np.dtype([("shard", "<u8", (2,)), ("sample", "<u4"), ("crc", "<u4")])
"""Facts of one row on disk: shard and sample, and a checksum of both and of
the row."""
SHARD_KEY_BYTES = 16

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowFormat:
    """Shape and dtype of a row of features.

    Attributes:
        shape: of one sample's features.
        dtype: of the features.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Segment(Protocol):
    """Rows of features: ``features`` is ``[capacity, *shape]``."""

    features: torch.Tensor
    capacity: int

    def damaged(self, rows: Rows) -> Rows:
        """Returns those of some rows that are not what was written."""
        ...


class MemorySegment:
    """Rows in memory, which is taken page by page as they are written."""

    def __init__(
        self, capacity: int, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.capacity = capacity
        self.num_rows = 0
        with torch.inference_mode(mode=False):
            self.features = torch.empty((capacity, *shape), dtype=dtype)

    def append(self, features: torch.Tensor) -> Rows:
        """Writes rows that have room; returns their numbers."""
        first, end = self.num_rows, self.num_rows + len(features)
        self.features[first:end] = features
        self.num_rows = end
        return np.arange(first, end)

    def damaged(self, rows: Rows) -> Rows:
        return rows[:0]


class DiskSegment:
    """Rows in ``N.npy``, and their records in ``N.rows``.

    A row is written before its record, and compared with the record's
    checksum when this process first reads it, so that neither a writer that
    is killed nor damage of the disk gives a wrong row.  One process appends
    at a time; any number read.

    Args:
        folder: folder of the files.
        number: ``N``.
        capacity: number of rows; None for a segment that exists.
        shape: of one row.
        dtype: of the features; bfloat16 is stored as uint16.

    Raises:
        OSError: if the files cannot be made, read or mapped.
        ValueError: if they are damaged.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        capacity: int | None = None,
    ) -> None:
        self.path = folder / f"{number}.npy"
        self._records_path = folder / f"{number}.rows"
        stored = _stored_dtype(dtype)
        self._row_bytes = torch.Size(shape).numel() * stored.itemsize
        if capacity is None:
            self._header_bytes, self.capacity = self._check(shape, stored)
        else:
            self.capacity = capacity
            self._header_bytes = self._create(capacity, shape, stored)
        try:
            mapped = np.memmap(
                self.path,
                stored,
                "r+",
                self._header_bytes,
                (self.capacity, *shape),
            )
        except OSError:  # some network file systems map no files
            if capacity is not None:
                self.path.unlink()
                self._records_path.unlink()
            raise
        self._file = os.open(self.path, os.O_RDWR)
        self._records_file = os.open(self._records_path, os.O_RDWR)
        self.features = torch.from_numpy(mapped).view(dtype)
        self._bytes = self.features.view(torch.uint8)
        self._is_verified = np.zeros(self.capacity, bool)
        self.records = np.empty(0, RECORD)

    def _create(
        self, capacity: int, shape: Sequence[int], stored: np.dtype
    ) -> int:
        header = _header((capacity, *shape), stored)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            # To be read too: where the file system reserves no room (NFS
            # before 4.2), the C library looks at each block that it writes.
            with temporary.open("w+b") as file:
                file.write(header)
                file.flush()
                # Takes the room now: a full disk must not end the process
                # when mapped pages are written.
                os.posix_fallocate(
                    file.fileno(), 0, len(header) + capacity * self._row_bytes
                )
            self._records_path.unlink(missing_ok=True)
            self._records_path.touch(0o600)
            temporary.rename(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return len(header)

    def _check(
        self, shape: Sequence[int], stored: np.dtype
    ) -> tuple[int, int]:
        """Returns the bytes of the header, and the number of rows."""
        with self.path.open("rb") as file:
            found = file.read(mmap.PAGESIZE)
            size = os.fstat(file.fileno()).st_size
        # Not parsed: all but the number of rows is known.
        length = len(_header((0, *shape), stored))
        capacity = (size - length) // max(1, self._row_bytes)
        expected = _header((capacity, *shape), stored)
        if (
            capacity < 1
            or size != len(expected) + capacity * self._row_bytes
            or found[: len(expected)] != expected
        ):
            raise ValueError(f"{self.path} is damaged")
        return len(expected), capacity

    def new_records(self) -> tuple[int, npt.NDArray[np.void]]:
        """Returns records that were added since the last call.

        Returns:
            The first one's row, and the records.
        """
        known = len(self.records)
        size = os.fstat(self._records_file).st_size // RECORD.itemsize
        count = min(size, self.capacity) - known
        if count <= 0:
            return known, self.records[:0]
        data = os.pread(
            self._records_file,
            count * RECORD.itemsize,
            known * RECORD.itemsize,
        )
        new = np.frombuffer(
            data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD
        )
        self.records = np.concatenate([self.records, new])
        return known, new

    def append(
        self, shard: bytes, samples: Rows, features: torch.Tensor
    ) -> Rows:
        """Writes rows that have room; returns their numbers.

        The caller holds the folder's lock, and has read all records.

        Args:
            shard: key of the shard, 16 bytes.
            samples: numbers of the samples, ``[n]``.
            features: ``[n, *shape]``.

        Raises:
            OSError: if the disk is full or fails.
        """
        first, count = len(self.records), len(samples)
        rows = np.arange(first, first + count)
        data = features.detach().cpu().contiguous().view(torch.uint8)
        values = data.reshape(count, -1).numpy()
        records = np.empty(count, RECORD)
        records["shard"] = np.frombuffer(shard, "<u8")
        records["sample"] = samples
        records["crc"] = [
            zlib.crc32(row.data, _seed(record))
            for row, record in zip(values, records, strict=True)
        ]
        place = self._header_bytes + first * self._row_bytes
        _write(self._file, values.data.cast("B"), place)
        _write(
            self._records_file,
            memoryview(records.tobytes()),
            first * RECORD.itemsize,
        )
        self.records = np.concatenate([self.records, records])
        self._is_verified[rows] = True
        return rows

    def damaged(self, rows: Rows) -> Rows:
        bad = []
        values = self._bytes.view(self.capacity, -1).numpy()
        for row in rows[~self._is_verified[rows]].tolist():
            record = self.records[row]
            if zlib.crc32(values[row].data, _seed(record)) != record["crc"]:
                bad.append(row)
            else:
                self._is_verified[row] = True
        return np.array(bad, np.int64)

    def close(self) -> None:
        """Closes the files; the map ends with its last reader."""
        for each in (self._file, self._records_file):
            os.close(each)


def _stored_dtype(dtype: torch.dtype) -> np.dtype:
    if dtype == torch.bfloat16:
        return np.dtype(np.uint16)
    found: np.dtype = torch.empty(0, dtype=dtype).numpy().dtype
    return found


def _header(shape: tuple[int, ...], stored: np.dtype) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file,
        {
            "descr": np.lib.format.dtype_to_descr(stored),
            "fortran_order": False,
            "shape": shape,
        },
    )
    return file.getvalue()


def _seed(record: np.void) -> int:
    return zlib.crc32(record.tobytes()[: SHARD_KEY_BYTES + 4])


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


@lru_cache(maxsize=4096)
def shard_key(etag: str) -> bytes:
    """Returns the key of a shard's content in records."""
    return hashlib.sha256(etag.encode()).digest()[:SHARD_KEY_BYTES]
