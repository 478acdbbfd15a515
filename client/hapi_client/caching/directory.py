"""A directory of cached features, shared by the processes of a host."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil

from hapi_client.caching.row_map import FORMAT_VERSION, RowFormat, RowMap
from hapi_splitter import private_folder
from hapi_splitter.private_folder import PrivateFolder, unlink
from hapi_splitter.units import bytes_text

logger = logging.getLogger(__name__)

OPEN_FACTOR = 10
"""Longer wait for a process that reserves the space of a file: a tmpfs takes
0.3 s for each GiB."""
FREE_SHARE = 0.5
"""Default limit: share of what is free on the disk or in the cache."""


class CacheDirectory(PrivateFolder):
    """Files of rows within a size limit; a file is locked while it is used.

    Args:
        path: the directory; made if it is absent.
        limit_bytes: size limit; None for half of what the disk has free or
            the cache has taken.

    Raises:
        OSError: if it cannot be used.
    """

    def __init__(
        self, path: str | os.PathLike[str], limit_bytes: int | None = None
    ) -> None:
        super().__init__(path, "samples", FORMAT_VERSION, ".rows")
        self._has_warned = False
        self.make()
        with self.locked():
            used = sum(entry.length_bytes for entry in self.entries())
        if limit_bytes is None:
            free = shutil.disk_usage(self.path).free
            limit_bytes = int(FREE_SHARE * (free + used))
        self.limit_bytes = limit_bytes

    def purge(self) -> tuple[int, int]:
        with self.locked():
            return super().purge()

    def open(self, form: RowFormat, least_rows: int = 1) -> RowMap | None:
        """Opens the file of some rows, which is made if it is absent.

        Its space is reserved, and not removed by others until it is closed.

        Args:
            form: facts and sizes of the rows.
            least_rows: number of rows below which it is not worth it.

        Returns:
            None with a warning if the limit allows fewer rows.

        Raises:
            OSError: if it cannot be made, locked or mapped.
        """
        seconds = OPEN_FACTOR * private_folder.LOCK_SECONDS
        with self.locked(seconds=seconds), self.opened() as folder:
            return self._open(form, least_rows, folder)

    def _open(
        self, form: RowFormat, least_rows: int, folder: int
    ) -> RowMap | None:
        name = form.key + self.suffix
        with contextlib.ExitStack() as undo:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            file = os.open(name, flags, 0o600, dir_fd=folder)
            undo.callback(os.close, file)
            header = os.pread(file, len(form.header), 0)
            if header and header != form.header:
                logger.warning(
                    "%s is damaged; its features are computed again",
                    self.path / name,
                )
                # Others may have mapped it: not changed, only unlinked.
                unlink(name, folder)
                return self._open(form, least_rows, folder)
            if not os.fstat(file).st_size:
                undo.callback(unlink, name, folder)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            capacity = self._reserve(file, form, least_rows)
            if capacity:
                # Opened again: a map keeps its file, and the lock of that,
                # open for as long as there are features of it.
                mapped = os.open(
                    name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder
                )
                undo.callback(os.close, mapped)
                memory = mmap.mmap(mapped, form.num_bytes(capacity))
                undo.pop_all()
                os.close(mapped)
                return RowMap(form, memory, file, str(self.path / name))
        return None

    def _reserve(self, file: int, form: RowFormat, least_rows: int) -> int:
        """Returns the number of rows that have space in a file.

        The space is taken now: a full disk must not end the process when
        mapped pages are used.
        """
        least_rows = max(1, least_rows)
        space = size = os.fstat(file).st_size
        if form.capacity(self.limit_bytes - form.first_byte) >= least_rows:
            wanted = form.num_bytes(form.num_rows) - size
            space += self.evict(max(0, wanted))
        capacity = form.capacity(space - form.first_byte)
        if capacity < form.num_rows and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the cache %s is full: its limit is %s, and running jobs use "
                "all of it; what does not fit is read again",
                self.path,
                bytes_text(self.limit_bytes),
            )
        if capacity < least_rows:
            return 0
        if (needed := form.num_bytes(capacity) - size) > 0:
            try:
                # Only new bytes: without support of the file system, the C
                # library writes into each block.
                os.posix_fallocate(file, size, needed)
            except OSError:
                capacity = form.capacity(size - form.first_byte)
                if not capacity:
                    raise
            os.pwrite(file, form.header, 0)
        os.utime(file)
        return capacity
