"""Features of one model, cut and transform in a cache directory."""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import PIL

from hapi_client.caching.directory import CacheDirectory
from hapi_client.caching.segments import DiskSegment, RowFormat

logger = logging.getLogger(__name__)

FAILURES_BYTES = 4 << 20
"""Longest file of samples that cannot be decoded; others are tried again."""
_FAILURES = "failures"


class DiskRows:
    """The segments of one entry of a cache directory.

    Args:
        directory: the cache.
        facts: facts that determine the features, fit for JSON.
        form: shape and dtype of a row.

    Raises:
        OSError: if the directory cannot be used.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        facts: Mapping[str, Any],
        form: RowFormat,
    ) -> None:
        self._directory = directory
        self._form = form
        self.folder, self._handle = directory.open(facts)
        self._segments: list[DiskSegment] = []
        self._next = 0
        self._is_full = False
        self._failures_read = 0
        numbers = (path.stem for path in self.folder.glob("*.npy"))
        try:
            for number in sorted(int(n) for n in numbers if n.isdigit()):
                self._open(number)
        except OSError:
            self.close()
            raise

    def refresh(self) -> list[DiskSegment]:
        """Returns all segments; opens new ones, and removes damaged ones."""
        while (self.folder / f"{self._next}.npy").exists():
            self._open(self._next)
        return self._segments

    def _open(self, number: int) -> None:
        self._next = number + 1
        try:
            segment = DiskSegment(
                self.folder, number, self._form.shape, self._form.dtype
            )
        except ValueError as error:
            logger.warning("%s; its features are computed again", error)
            # Others may have mapped them: not changed, only unlinked.
            for path in self.folder.glob(f"{number}.*"):
                path.unlink(missing_ok=True)
        else:
            self._segments.append(segment)

    def segment_with_room(
        self, rows: int, wanted_rows: int
    ) -> DiskSegment | None:
        """Returns a segment for some rows; None if the cache is full.

        The caller holds the folder's lock.

        Args:
            rows: number of rows to add.
            wanted_rows: number of rows for which a new one takes room.

        Raises:
            OSError: if the disk is full or fails.
        """
        for segment in self._segments:
            if segment.capacity - len(segment.records) >= rows:
                return segment
        if self._is_full:
            return None
        row_bytes = self._form.num_bytes
        with self._directory.locked():
            room = self._directory.room_bytes(wanted_rows * row_bytes)
            if room < rows * row_bytes:
                self._is_full = True
                self._directory.warn_full()
                return None
            for leftover in self.folder.glob("*.tmp"):
                leftover.unlink()  # of a process that was killed
            segment = DiskSegment(
                self.folder,
                self._next,
                self._form.shape,
                self._form.dtype,
                room // row_bytes,
            )
        self._segments.append(segment)
        self._next += 1
        return segment

    def new_failures(self) -> Iterator[tuple[bytes, int, str]]:
        """Reads what processes have added since the last call.

        Yields:
            Key of the shard, number of the sample and error message.
        """
        try:
            with (self.folder / _FAILURES).open("rb") as file:
                file.seek(self._failures_read)
                lines = file.read(FAILURES_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return
        for line in lines:
            if not line.endswith(b"\n"):  # of a process that was killed
                break
            self._failures_read += len(line)
            checksum, _, text = line.rstrip().partition(b" ")
            # Damage must not make a good sample a bad one.
            if checksum == _checksum(text):
                with suppress(ValueError):
                    key, sample, message, version = json.loads(text)
                    if version == PIL.__version__:
                        yield bytes.fromhex(key), sample, message

    def add_failures(self, key: bytes, failures: Mapping[int, str]) -> None:
        """Appends samples that cannot be decoded.

        The caller holds the folder's lock.

        Args:
            key: of the shard.
            failures: error messages by number of the sample.

        Raises:
            OSError: if the disk is full or fails.
        """
        lines = []
        for sample, message in failures.items():
            # Another release may decode what this one cannot.
            fields = [key.hex(), sample, message, PIL.__version__]
            text = json.dumps(fields).encode()
            lines.append(_checksum(text) + b" " + text + b"\n")
        with (self.folder / _FAILURES).open("ab") as file:
            if file.tell() < FAILURES_BYTES:
                # First the rest of a line whose writer was killed.
                file.write(b"\n" + b"".join(lines))

    def close(self) -> None:
        """Lets others remove the entry."""
        for segment in self._segments:
            segment.close()
        os.close(self._handle)


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
