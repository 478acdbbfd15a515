"""Writes parts of a file to a disk, past the cache of the system.

Two buffers: one is filled while the other is written.  Direct I/O needs
memory, offsets and lengths that are aligned; a file system without it gets
ordinary writes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

ALIGNMENT = 4096
"""Bytes to which disks and direct I/O align their blocks."""
# Chosen: from 4 MiB on a write is no faster (1 to 32 MiB were tried).
BUFFER_BYTES = 8 << 20
# Linux only; elsewhere writes go through the cache.
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP)


def reserve(path: Path, size: int) -> None:
    """Makes a file with space for ``size`` bytes, or fails at once.

    Raises:
        OSError: the disk is full, for instance.
    """
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, aligned(size))


def aligned(size: int) -> int:
    """Returns the least multiple of ``ALIGNMENT`` that is not below."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_range(
    path: Path,
    start: int,
    stop: int,
    copy_to: Callable[[torch.Tensor, int], None],
) -> None:
    """Writes bytes of a file, and waits until they are on the disk.

    Args:
        path: file that :func:`reserve` has made.
        start: first byte, a multiple of ``ALIGNMENT``.
        stop: end; the file is filled up to a multiple of ``ALIGNMENT``.
        copy_to: copies bytes from an offset on to a tensor.

    Raises:
        OSError: as of the system.
    """
    file = _open(path)
    buffers = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(2)]
    views = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
    try:
        with ThreadPoolExecutor(1, "hapi-write") as writer:
            writing: Future[None] | None = None
            for number, offset in enumerate(range(start, stop, BUFFER_BYTES)):
                length = min(BUFFER_BYTES, aligned(stop - offset))
                copy_to(views[number % 2][:length], offset)
                if writing is not None:
                    writing.result()
                data = memoryview(buffers[number % 2])[:length]
                writing = writer.submit(_write, file, data, offset)
            if writing is not None:
                writing.result()
        os.fsync(file)
    finally:
        os.close(file)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | O_DIRECT)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, os.O_WRONLY)


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            count = os.pwrite(file, data, offset)
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno not in _NO_DIRECT or not flags & O_DIRECT:
                raise
            # A file system with larger blocks, or one that refuses late.
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~O_DIRECT)
            continue
        data, offset = data[count:], offset + count
