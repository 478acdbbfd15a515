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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ALIGNMENT = 4096
"""Bytes to which disks and direct I/O align their blocks."""
# Chosen: from 4 MiB on a write is no faster (1 to 32 MiB were tried), and two
# threads that copy and write in turn leave no gaps.
BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 2
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

    def write_every(first: int) -> None:
        buffer = mmap.mmap(-1, BUFFER_BYTES)
        view = torch.frombuffer(buffer, dtype=torch.uint8)
        for offset in range(first, stop, NUM_BUFFERS * BUFFER_BYTES):
            length = min(BUFFER_BYTES, aligned(stop - offset))
            copy_to(view[:length], offset)
            _write(file, memoryview(buffer)[:length], offset)

    try:
        with ThreadPoolExecutor(NUM_BUFFERS, "hapi-write") as writers:
            firsts = range(start, stop, BUFFER_BYTES)[:NUM_BUFFERS]
            # Raises the error of any.
            list(writers.map(write_every, firsts))
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
