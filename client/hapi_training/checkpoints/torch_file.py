"""Files of ``torch.save``, laid out before their tensors are written.

torch writes a *skeleton*: everything but the bytes of the tensors.  That
takes a millisecond; threads and processes
then fill in the bytes.  The file is the one that ``torch.save`` writes
without checksums, which ``torch.load`` does not check.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

# torch's options are those of the process.
_lock = threading.Lock()


@dataclass(frozen=True)
class Layout:
    """A file: bytes at offsets, and holes for the bytes of tensors.

    Attributes:
        size: length of the file, in bytes.
        parts: offset and bytes of each part of the skeleton, in order.
        holes: offset and length of the bytes of each storage, in order.
    """

    size: int
    parts: Sequence[tuple[int, bytes]]
    holes: Sequence[tuple[int, int]]

    def fits(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """True if storages have the bytes of the holes."""
        return [s.nbytes() for s in storages] == [n for _, n in self.holes]

    def filled(
        self, storages: Sequence[torch.UntypedStorage], limit: int
    ) -> Layout:
        """Returns a layout without the holes of at most ``limit`` bytes."""
        parts = [
            (offset, bytes(bytes_of(storage).cpu().numpy()))
            for (offset, length), storage in zip(
                self.holes, storages, strict=True
            )
            if length <= limit
        ]
        holes = [hole for hole in self.holes if hole[1] > limit]
        return replace(self, parts=[*self.parts, *parts], holes=holes)


class _Recorder(io.RawIOBase):
    """Notes what torch writes, and where it leaves holes."""

    def __init__(self) -> None:
        self.position = 0
        self.parts: list[tuple[int, bytes]] = []
        self.holes: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        self.parts.append((self.position, bytes(data)))
        self.position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR, "torch moves over holes only"
        self.holes.append((self.position, offset))
        self.position += offset
        return self.position

    def tell(self) -> int:
        return self.position


class _StoragePickler(pickle.Pickler):
    """Finds the storages of a content in the order of torch's pickler."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.storages: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.storage.TypedStorage):
            obj = obj._untyped_storage
        if not isinstance(obj, torch.UntypedStorage):
            return None
        self.storages.setdefault(obj._cdata, obj)
        return "storage"


def storages_of(content: Any) -> list[torch.UntypedStorage]:
    """Returns the storages of all tensors, each once, in torch's order."""
    pickler = _StoragePickler()
    pickler.dump(content)
    # torch leaves no hole for those without bytes.
    return [s for s in pickler.storages.values() if s.nbytes()]


def layout_of(content: Any) -> tuple[Layout, list[torch.UntypedStorage]]:
    """Lays out the file of a content that ``torch.save`` takes.

    Returns:
        The layout, and the storages whose bytes its holes are for.
    """
    recorder = _Recorder()
    # A prototype since torch 2.6.
    skip_data = getattr(torch.serialization, "skip_data", None)
    if skip_data is not None:
        _save(content, recorder, skip_data())
        storages = storages_of(content)
        layout = Layout(recorder.position, recorder.parts, recorder.holes)
        if layout.fits(storages):
            return layout, storages
        recorder = _Recorder()
    # The same file, slower: its bytes are in memory once more.
    _save(content, recorder, nullcontext())
    return Layout(recorder.position, recorder.parts, ()), []


def _save(
    content: Any, file: Any, skipping: AbstractContextManager[None]
) -> None:
    with _lock, skipping:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(content, file)
        finally:
            torch.serialization.set_crc32_options(before)


class FileBytes:
    """The bytes of a file: those of its skeleton and of tensors.

    Args:
        layout: layout of the file.
        storages: bytes of the holes, on any device.
    """

    def __init__(
        self, layout: Layout, storages: Sequence[torch.UntypedStorage]
    ) -> None:
        pieces: list[tuple[int, torch.Tensor]] = [
            (offset, torch.frombuffer(bytearray(data), dtype=torch.uint8))
            for offset, data in layout.parts
            if data
        ]
        for (offset, _), storage in zip(layout.holes, storages, strict=True):
            pieces.append((offset, bytes_of(storage)))
        self._pieces = sorted(pieces, key=lambda piece: piece[0])
        self.size = layout.size

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        """Copies the bytes from ``start`` on to a tensor of bytes.

        What is between the pieces, and behind the end, becomes zero.
        """
        stop, done = start + len(target), start
        for offset, data in self._pieces:
            first, last = max(start, offset), min(stop, offset + len(data))
            if first < last:
                target[done - start : first - start].zero_()
                target[first - start : last - start].copy_(
                    data[first - offset : last - offset]
                )
                done = last
        target[done - start :].zero_()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a view of the bytes of a storage."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage)
