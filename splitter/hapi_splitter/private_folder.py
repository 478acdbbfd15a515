"""Folders of a user that only this project writes to and deletes from.

A folder has a mark, in which its kind and version are written. What has none
is not ours, and nothing in it is deleted: a folder with other things in it, or
a link, which another user may have made where both may write.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

MARK = "CACHEDIR.TAG"
"""By which backup programs know folders that need no backup
(bford.info/cachedir)."""
_SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class PrivateFolder:
    """A folder with a mark: ``PARENT/KIND-VERSION``.

    Args:
        parent: the folder that the user names.
        kind: of what is in it.
        version: of its format.

    Attributes:
        path: the folder.
    """

    def __init__(
        self, parent: str | os.PathLike[str], kind: str, version: int
    ) -> None:
        self.path = Path(parent).expanduser() / f"{kind}-{version}"
        self._text = f"{_SIGNATURE}\n# {kind} of HAPI, version {version}\n"

    @classmethod
    def at(cls, path: Path) -> PrivateFolder:
        """Returns the folder of a :attr:`path`."""
        kind, _, version = path.name.rpartition("-")
        return cls(path.parent, kind, int(version))

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


def is_folder(path: Path) -> bool:
    """Returns True for a folder that is no link."""
    return path.is_dir() and not path.is_symlink()


def _is_empty(path: Path) -> bool:
    try:
        return is_folder(path) and not os.listdir(path)
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
