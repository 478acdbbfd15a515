"""Checks of a directory before a cluster is started in it."""

from __future__ import annotations

import errno
import importlib.util
import os
import tempfile
from pathlib import Path

from hapi_cluster.errors import (
    DirectoryError,
    NotAClusterError,
    SwiftMissingError,
    XattrError,
)
from hapi_cluster.paths import ClusterPaths

XATTR_NAME = "user.hapi.probe"
LARGE_XATTR_BYTES = 8000
"""About the metadata that Swift allows on an object."""
SMALL_XATTR_WARNING = (
    "on this file system (ext4) objects with more than 4 kB of metadata get "
    "503; training data has less. /dev/shm and XFS have no such limit."
)


def require_swift() -> None:
    """Raises SwiftMissingError unless Swift's servers can be imported."""
    try:
        spec = importlib.util.find_spec("swift.proxy.server")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise SwiftMissingError(
            "OpenStack Swift is not installed in this Python.",
            "pip install 'swift-hapi[cluster]'",
        )


def prepare_directory(paths: ClusterPaths) -> None:
    """Creates the directory, or checks that it holds a usable cluster.

    Raises:
        DirectoryError: see its subclasses for the cases.
    """
    directory = paths.directory
    if any(c in str(directory) for c in "%\r\n"):
        raise DirectoryError(
            f"{str(directory)!r} is not possible in Swift's configuration.",
            "Choose a directory without % and line breaks in its path.",
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = set(os.listdir(directory)) - {"lost+found"}
    except OSError as error:
        raise _unusable(directory, error) from error
    if names and not is_cluster(paths):
        raise NotAClusterError(
            f"{directory} is not empty and holds no cluster"
            f" (it has {sorted(names)[0]!r}).",
            "Choose an empty or a new directory.",
        )
    check_xattrs(directory)
    # Marks it as a cluster's directory, even if its first start fails.
    paths.lock.touch(0o600)


def is_cluster(paths: ClusterPaths) -> bool:
    """Returns True if a cluster was ever started in this directory."""
    return paths.state.is_file() or paths.lock.is_file()


def check_xattrs(directory: Path) -> list[str]:
    """Returns warnings about the file system.

    Raises:
        XattrError: the file system cannot be used.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as probe:
            return _probe_xattrs(directory, probe.name)
    except OSError as error:
        raise _unusable(directory, error) from error


def _probe_xattrs(directory: Path, path: str) -> list[str]:
    try:
        os.setxattr(path, XATTR_NAME, b"1")
    except OSError as error:
        raise XattrError(
            f"{directory} has no user extended attributes, in which Swift"
            f" stores its metadata ({error.strerror}).",
            "Choose a directory on XFS, ext4 or tmpfs (/dev/shm; tmpfs"
            " has them since Linux 6.6).",
        ) from error
    try:
        os.setxattr(path, XATTR_NAME, bytes(LARGE_XATTR_BYTES))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.E2BIG, errno.EDQUOT):
            raise
        return [SMALL_XATTR_WARNING]
    return []


def _unusable(directory: Path, error: OSError) -> DirectoryError:
    return DirectoryError(
        f"cannot use {directory}: {error.strerror}.",
        "Choose a directory that you may create and write.",
    )
