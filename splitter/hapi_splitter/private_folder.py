"""Folders of a user that only this project writes to and deletes from.

A folder has a mark, in which its kind and version are written. What has none
is not ours, and nothing in it is deleted: a folder with other things in it, or
a link, which another user may have made where both may write.

Its entries are the files ``KEY.SUFFIX``.  Beyond a size limit the least
recently used are removed, but for those that a process has locked because it
uses them for long.  Locks end with their process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import logging
import os
import pwd
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

MARK = "CACHEDIR.TAG"
"""By which backup programs know folders that need no backup
(bford.info/cachedir)."""
_SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"
LOCK = "lock"
LOCK_SECONDS = 2.0
"""Longest wait for another process that makes or removes entries."""
PART_SUFFIX = ".part"
"""Suffix of a file that will replace an entry."""
LOCK_SUFFIX = ".lock"
_LEFTOVER_SECONDS = 3600.0
"""Age after which the files of a writer that was killed are removed."""
_KEY = re.compile("[0-9a-z]+")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Entry:
    """A file of a folder.

    Attributes:
        key: its name without the suffix.
        path: the file.
        length_bytes: its size.
        used: Unix time of the last use.
    """

    key: str
    path: Path
    length_bytes: int
    used: float


class PrivateFolder:
    """A folder with a mark: ``PARENT/KIND-VERSION``.

    Args:
        parent: the folder that the user names.
        kind: kind of its entries.
        version: version of their format.
        suffix: suffix of the entries' names.
        limit_bytes: size limit of all entries.

    Attributes:
        path: the folder.
        suffix: as given.
        limit_bytes: as given.
    """

    def __init__(
        self,
        parent: str | os.PathLike[str],
        kind: str,
        version: int,
        suffix: str,
        limit_bytes: int = 0,
    ) -> None:
        self.path = Path(parent).expanduser() / f"{kind}-{version}"
        self.suffix = suffix
        self.limit_bytes = limit_bytes
        self._text = f"{_SIGNATURE}\n# {kind} of HAPI, version {version}\n"

    def make(self) -> None:
        """Makes it with its mark, if it is absent.

        Raises:
            OSError: if it cannot be made, or is not :meth:`opened`.
        """
        parent = self.path.parent
        if parent.exists() and not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.path.lexists(self.path) or _is_empty(self.path):
            _check_parent(parent)
            # Appears with its mark; an empty one is replaced.
            made = Path(tempfile.mkdtemp(prefix=".hapi-", dir=parent))
            try:
                (made / MARK).write_text(self._text)
                made.rename(self.path)
            except OSError as error:
                shutil.rmtree(made)
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        with self.opened():
            pass

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Opens it for functions with ``dir_fd``.

        Raises:
            FileNotFoundError: if it is absent.
            PermissionError: if it is a link, or not the user's alone.
            FileExistsError: if it has no mark.
        """
        _check_owner(self.path, self.path.lstat())
        _check_parent(self.path.parent)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        folder = os.open(self.path, flags)
        try:
            self._check_mark(folder)
            yield folder
        finally:
            os.close(folder)

    def _check_mark(self, folder: int) -> None:
        text = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            # Opening a pipe of this name would wait for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(MARK, flags, dir_fd=folder)) as file:
                text = file.read(len(self._text) + 1)
        if text != self._text:
            raise FileExistsError(
                errno.EEXIST,
                f"{self.path} was not made by HAPI (it has no {MARK} of its "
                "own); move it away, or give another folder",
            )

    @contextlib.contextmanager
    def locked(
        self, name: str = LOCK, seconds: float | None = None
    ) -> Iterator[bool]:
        """Excludes other processes.

        Args:
            name: name of the file to lock.
            seconds: longest wait; None for :data:`LOCK_SECONDS`.

        Yields:
            True if another process had the lock.

        Raises:
            TimeoutError: if another process has it for longer.
            OSError: if the file system has no locks.
        """
        seconds = LOCK_SECONDS if seconds is None else seconds
        deadline = time.monotonic() + seconds
        has_waited = False
        with self.opened() as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            while True:
                # Opened again in each turn: its owner may remove the file.
                file = os.open(name, flags, 0o600, dir_fd=folder)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    os.close(file)
                    if not isinstance(error, BlockingIOError):
                        raise
                if not has_waited:
                    logger.info("waiting for the owner of %s", name)
                has_waited = True
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"another process holds {self.path / name}",
                    )
                time.sleep(0.005)
            try:
                yield has_waited
            finally:
                # A process forked meanwhile has the file open, too.
                fcntl.flock(file, fcntl.LOCK_UN)
                os.close(file)

    def entries(self) -> list[Entry]:
        """Returns all entries, the least recently used first.

        Raises:
            OSError: if the folder is not the user's own.
        """
        try:
            with self.opened() as folder:
                entries = list(self._files(folder, self.suffix))
        except FileNotFoundError:
            return []
        return sorted(entries, key=lambda entry: entry.used)

    def evict(self, wanted_bytes: int = 0) -> int:
        """Removes unused entries, and the files of writers that were killed.

        Args:
            wanted_bytes: size of new data.

        Returns:
            The part of it that the limit allows, in bytes.
        """
        entries = self.entries()
        total = sum(entry.length_bytes for entry in entries)
        for entry in entries:
            if total + wanted_bytes <= self.limit_bytes:
                break
            if self.remove(entry.key):
                total -= entry.length_bytes
        with self.opened() as folder:
            for suffix in (PART_SUFFIX, LOCK_SUFFIX):
                for file in self._files(folder, suffix):
                    if time.time() - file.used > _LEFTOVER_SECONDS:
                        unlink(file.key + suffix, folder)
        return max(0, min(wanted_bytes, self.limit_bytes - total))

    def remove(self, key: str) -> bool:
        """Removes an entry; returns False if a process has locked it."""
        with self.opened() as folder:
            if _is_locked(key + self.suffix, folder):
                return False
            unlink(key + self.suffix, folder)
        return True

    def purge(self) -> tuple[int, int]:
        """Removes all entries that no process has locked.

        Returns:
            Numbers of the entries removed and of those in use.

        Raises:
            OSError: if they cannot be removed.
        """
        removed = [self.remove(entry.key) for entry in self.entries()]
        return sum(removed), len(removed) - sum(removed)

    def _files(self, folder: int, suffix: str) -> Iterator[Entry]:
        for name in os.listdir(folder):
            key = name.removesuffix(suffix)
            if key == name or not _KEY.match(key):
                continue  # Nothing else is deleted.
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield Entry(
                        key,
                        self.path / name,
                        status.st_size,
                        status.st_mtime,
                    )


def unlink(name: str, folder: int) -> None:
    """Removes a file of an opened folder, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _is_locked(name: str, folder: int) -> bool:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(name, flags, dir_fd=folder)
    except OSError:  # gone, or a link
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # on a file system without locks nobody has one
        return isinstance(error, BlockingIOError)
    finally:
        # Before its removal: NFS keeps a file that is open.
        os.close(file)
    return False


def _is_empty(path: Path) -> bool:
    try:
        is_folder = path.is_dir() and not path.is_symlink()
        return is_folder and not os.listdir(path)
    except PermissionError:
        return False


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(
            errno.EPERM, f"{path} is a link or a file, not a folder"
        )
    if status.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, f"{path} belongs to user {status.st_uid}"
        )
    if status.st_mode & _OTHERS:
        # A checksum shows damage, not what another user has written.
        raise PermissionError(
            errno.EPERM,
            f"other users may write to {path}; chmod 700 it if nobody did",
        )


def _check_parent(path: Path) -> None:
    """Refuses a folder in which others may replace ours."""
    status = path.stat()
    if status.st_mode & stat.S_ISVTX:
        return
    is_others = status.st_uid != os.geteuid() and os.geteuid() != 0
    is_shared = status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    )
    if is_others or is_shared:
        raise PermissionError(
            errno.EPERM,
            f"other users may write to {path}; give a folder of your own",
        )


def _is_own_group(group: int) -> bool:
    """Returns True for the group that many systems make for each user."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        return grp.getgrgid(group).gr_name == name
    except KeyError:
        return False
