"""The samples of a data set as rows of bytes, in memory or in a file.

One format for features and for samples as they are stored:

=========  ===================================================================
header     facts that determine the rows, as a line of JSON; a multiple of
           4096 bytes
states     ``[samples]`` uint8: absent, good, or cannot be decoded
checksums  ``[samples]`` uint32, CRC-32 of the row, its number and its state
rows       from the next multiple of 4096: features, the bytes of a sample, or
           the message of one that cannot be decoded
=========  ===================================================================

The row of a sample is its number in the index, so that any number of processes
and threads may write: two that compute the same sample write the same row.  A
row is written before its checksum, its state last, and it is compared before a
process first uses what others have written.  So neither a writer that is
killed, nor two at once, nor damage of a disk gives a wrong row, and no writer
waits for another one.  Files are written by ``pwrite``: a full disk is then an
error, and hosts that share a file on NFS do not overwrite one another's rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
ABSENT, GOOD, FAILED = 0, 1, 2
PAGE_BYTES = 4096
MAX_HEADER_BYTES = 1 << 20
# Another release may decode what this one cannot.
_RELEASE = zlib.crc32(PIL.__version__.encode())

Rows = npt.NDArray[np.int64]
"""Numbers of samples in the index."""


@dataclass(frozen=True, eq=False)
class RowFormat:
    """Facts and sizes of the rows of a data set.

    Attributes:
        facts: facts that determine the rows, fit for JSON.
        offsets: ``[samples + 1]`` int64, first byte of each row, and the end
            of the last one.
    """

    facts: Mapping[str, Any]
    offsets: Rows

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def header(self) -> bytes:
        """The first bytes of a file."""
        sizes = zlib.crc32(self.offsets.tobytes())
        facts = {**self.facts, "samples": self.num_rows, "sizes": sizes}
        text = json.dumps(facts, sort_keys=True).encode() + b"\n"
        return text.ljust(_whole_pages(len(text)), b" ")

    @cached_property
    def key(self) -> str:
        """Key of the facts, 32 hexadecimal digits."""
        return hashlib.sha256(self.header).hexdigest()[:32]

    @property
    def first_byte(self) -> int:
        """Position of the first row."""
        return _whole_pages(len(self.header) + 5 * self.num_rows)

    def num_bytes(self, capacity: int) -> int:
        """Returns the size of a map of the first ``capacity`` rows."""
        return self.first_byte + int(self.offsets[capacity])

    def capacity(self, row_bytes: int) -> int:
        """Returns how many of the first rows fit into some bytes."""
        return max(
            0, int(np.searchsorted(self.offsets, row_bytes, "right")) - 1
        )


def read_facts(path: Path) -> Mapping[str, Any]:
    """Returns the facts of a file; empty if they are damaged."""
    try:
        with path.open("rb") as file:
            facts = json.loads(file.readline(MAX_HEADER_BYTES))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


class RowMap:
    """The first rows of a data set, as many as have space.  Thread-safe.

    Args:
        form: facts and sizes of the rows.
        memory: mapped bytes.
        file: descriptor of the file that is mapped, which is closed in the
            end; None for anonymous memory.
        name: name for messages.

    Attributes:
        form: as given.
        capacity: number of rows that have space.
        rows: mapped bytes of the rows.
    """

    def __init__(
        self,
        form: RowFormat,
        memory: mmap.mmap,
        file: int | None = None,
        name: str = "memory",
    ) -> None:
        self.form = form
        self.capacity = form.capacity(len(memory) - form.first_byte)
        self.rows = memoryview(memory)[form.first_byte :]
        self._memory = memory
        self._file = file
        self._name = name
        self._close: Callable[[], object] = lambda: None
        if file is not None:
            self._close = finalizer = weakref.finalize(self, os.close, file)
            # Not while threads of a process that ends may write.
            finalizer.atexit = False
        self._lock = threading.Lock()
        self._states_at = len(form.header)
        self._checksums_at = self._states_at + form.num_rows
        self._states = np.frombuffer(
            memory, np.uint8, form.num_rows, self._states_at
        )
        self._checksums = np.frombuffer(
            memory, "<u4", form.num_rows, self._checksums_at
        )
        self._is_checked = np.zeros(form.num_rows, bool)
        self._is_writable = True
        self._has_damage = False

    @property
    def length_bytes(self) -> int:
        """Bytes of all rows that have space."""
        return int(self.form.offsets[self.capacity])

    def states_of(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Returns the states of rows: ABSENT, GOOD or FAILED."""
        states = self._states[rows]
        states[(states > FAILED) | (rows >= self.capacity)] = ABSENT
        return states

    def read(self, first: int, stop: int) -> memoryview:
        """Returns the bytes of the rows ``first`` to ``stop - 1``."""
        offsets = self.form.offsets
        return self.rows[offsets[first] : offsets[stop]]

    def message(self, row: int) -> str:
        """Returns the message of a row that cannot be decoded."""
        return bytes(self.read(row, row + 1)).rstrip(b"\0").decode()

    def put(
        self, rows: Rows, values: Sequence[Any], state: int = GOOD
    ) -> None:
        """Writes the rows that are absent and have space.

        Args:
            rows: numbers of the samples, ascending.
            values: bytes of each row.
            state: state of all of them.
        """
        is_new = (rows < self.capacity) & (self.states_of(rows) == ABSENT)
        new = np.flatnonzero(is_new)
        runs = np.split(new, np.flatnonzero(np.diff(rows[new]) != 1) + 1)
        for run in runs if len(new) else ():
            self._put_run(int(rows[run[0]]), [values[n] for n in run], state)

    def put_message(self, row: int, message: str) -> None:
        """Writes that a sample cannot be decoded.

        The message is shortened to the length of the row.
        """
        length = len(self.read(row, row + 1))
        text = message.encode()
        if len(text) > length:
            kept = text[: length - 3].decode(errors="ignore")
            text = f"{kept}...".encode()[:length]
        self.put(np.array([row]), [text.ljust(length, b"\0")], FAILED)

    def _put_run(self, first: int, values: Sequence[Any], state: int) -> None:
        parts = [
            (
                self.form.first_byte + int(self.form.offsets[first]),
                b"".join(values),
            )
        ]
        if self._file is not None:  # else nobody else reads or writes it
            checksums = [
                _checksum(value, first + n, state)
                for n, value in enumerate(values)
            ]
            data = np.array(checksums, "<u4").tobytes()
            parts.append((self._checksums_at + 4 * first, data))
        parts.append((self._states_at + first, bytes([state]) * len(values)))
        for part in parts:
            if not self._write(*part):
                break

    def _write(self, start: int, data: bytes) -> bool:
        """Writes bytes; returns False if that is not possible any more."""
        with self._lock:
            if not self._is_writable:
                return False
            if self._file is None:
                self._memory[start : start + len(data)] = data
                return True
            try:
                while data:
                    written = os.pwrite(self._file, data, start)
                    data, start = data[written:], start + written
            except OSError as error:
                self._is_writable = False
                logger.warning("%s", unusable_message(self._name, error))
                return False
            return True

    def num_unchecked(self, rows: Rows) -> int:
        """Returns the number of rows that :meth:`check` has to compare.

        Those in anonymous memory need not: nobody else writes them.
        """
        if self._file is None:
            return 0
        return int(np.count_nonzero(~self._is_checked[rows]))

    def check(self, rows: Rows) -> bool:
        """Compares rows with their checksums, and forgets those that differ.

        Returns:
            True if all rows are known, whether good or not decodable.
        """
        states = self.states_of(rows)
        is_known = states != ABSENT
        if self._file is None:
            return bool(is_known.all())
        for n in np.flatnonzero(is_known & ~self._is_checked[rows]).tolist():
            row, state = int(rows[n]), int(states[n])
            value = self.read(row, row + 1)
            if _checksum(value, row, state) == self._checksums[row]:
                self._is_checked[row] = True
            else:
                is_known[n] = False
                self._forget(row, state)
        return bool(is_known.all())

    def _forget(self, row: int, state: int) -> None:
        if state == GOOD and not self._has_damage:
            self._has_damage = True
            logger.warning(
                "cached samples in %s are damaged; they are read again",
                self._name,
            )
        self._write(self._states_at + row, bytes([ABSENT]))

    def close(self) -> None:
        """Closes the file; what was read stays valid."""
        with self._lock:
            self._is_writable = False
            self._close()


def unusable_message(path: str | os.PathLike[str], error: Exception) -> str:
    """Returns the warning of a directory or file that cannot be used."""
    reason = getattr(error, "strerror", None) or error
    return (
        f"no features are cached in {os.fspath(path)}: {reason}; make room, "
        "or give another directory"
    )


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _checksum(value: Any, row: int, state: int) -> int:
    seed = row << 2 | state
    if state == FAILED:
        seed ^= _RELEASE
    return zlib.crc32(value, seed & 0xFFFFFFFF)
