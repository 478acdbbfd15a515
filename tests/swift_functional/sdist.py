"""Fetches the tests of the installed Swift from its sdist.

The wheel has no tests.  Only ``test/`` and ``etc/`` are unpacked, so that the
Swift under test is the installed one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from swift_functional import NotRunError

WANTED = (("test",), ("etc",))
PIP_SECONDS = 300.0


def default_cache() -> Path:
    """``swift-hapi`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swift-hapi"


def unpacked_sdist(cache: Path, version: str) -> Path:
    """Returns a folder with ``test/`` and ``etc/`` of a version of Swift.

    It is made once: pip fetches the sdist unless the cache already has
    ``swift-<version>.tar.gz``.

    Raises:
        NotRunError: it cannot be fetched or unpacked.
    """
    folder = cache / f"swift-{version}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        archive = cache / f"{folder.name}.tar.gz"
        if not archive.exists():
            _download(cache, f"swift=={version}")
        _unpack(archive, folder)
    return folder


def _download(cache: Path, wanted: str) -> None:
    words = (sys.executable, "-m", "pip", "download", "--no-deps")
    options = ("--no-binary", "swift", "--retries", "2", "--dest", str(cache))
    try:
        subprocess.run(
            [*words, *options, wanted],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            timeout=PIP_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise NotRunError(
            f"the sdist of {wanted} cannot be fetched: {error}\nLet pip reach"
            " a package index (PIP_INDEX_URL), or put the .tar.gz into"
            f" {cache}."
        ) from error


def _unpack(archive: Path, folder: Path) -> None:
    """Unpacks next to the folder, which is there only when it is whole."""
    try:
        with (
            tempfile.TemporaryDirectory(dir=folder.parent) as place,
            tarfile.open(archive) as tar,
        ):
            members = [m for m in tar if Path(m.name).parts[1:2] in WANTED]
            tar.extractall(place, members, filter="data")
            Path(place, folder.name, "test", "functional").stat()
            Path(place, folder.name).rename(folder)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise NotRunError(
            f"{archive} cannot be unpacked: {error}\nRemove it."
        ) from error
