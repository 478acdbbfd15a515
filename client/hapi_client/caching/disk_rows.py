"""Features of one model, cut and transform in a cache directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from hapi_client.caching.directory import CacheDirectory
from hapi_client.caching.segments import DiskSegment, RowFormat

logger = logging.getLogger(__name__)


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

    def close(self) -> None:
        """Lets others remove the entry."""
        for segment in self._segments:
            segment.close()
        os.close(self._handle)
