"""Fetches the tests of the installed Swift from its sdist.

The wheel has no tests.  Only ``test/`` and ``etc/`` are unpacked, so that the
Swift under test is the installed one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path

from swift_functional.errors import NotRunError

WANTED = ("test", "etc", "PKG-INFO")
PIP_SECONDS = 300.0
PIP_LINES = 6


def installed_version() -> str:
    """Version of the installed Swift."""
    return version("swift")


def default_cache() -> Path:
    """``swift-hapi`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swift-hapi"


def unpacked_sdist(cache: Path, wanted: str) -> Path:
    """Returns a folder with ``test/`` and ``etc/`` of a version of Swift.

    It is made once: pip fetches the sdist unless the cache already has
    ``swift-<version>.tar.gz``.

    Raises:
        NotRunError: it cannot be fetched, or is of another version.
    """
    folder = cache / f"swift-{wanted}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        archive = cache / f"swift-{wanted}.tar.gz"
        if not archive.exists():
            _download(archive, wanted)
        _unpack(archive, folder)
    _check(folder, wanted)
    return folder


def _download(archive: Path, wanted: str) -> None:
    print(f"fetching the sdist of swift {wanted}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as place:
        options = ["--no-deps", "--no-binary", "swift", "--dest", place]
        command = [sys.executable, "-m", "pip", "download", *options]
        try:
            done = subprocess.run(
                [*command, "--retries", "2", f"swift=={wanted}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PIP_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _no_sdist(
                archive, f"pip did not end within {PIP_SECONDS:g} s"
            ) from error
        fetched = Path(place) / archive.name
        if done.returncode != 0 or not fetched.exists():
            lines = done.stdout.rstrip().splitlines()[-PIP_LINES:]
            raise _no_sdist(archive, "\n".join(["output of pip:", *lines]))
        fetched.replace(archive)


def _no_sdist(archive: Path, why: str) -> NotRunError:
    return NotRunError(
        f"no Swift tests: {archive.name} cannot be fetched; {why}\n"
        "Let pip reach a package index (PIP_INDEX_URL), or put the file"
        f" into {archive.parent}."
    )


def _unpack(archive: Path, folder: Path) -> None:
    place = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(place, _members(tar, folder.name), filter="data")
        (place / folder.name).rename(folder)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise NotRunError(
            f"{archive} cannot be unpacked: {error}\nRemove it."
        ) from error
    finally:
        shutil.rmtree(place)


def _members(tar: tarfile.TarFile, top: str) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        first, _, rest = member.name.partition("/")
        if first == top and rest.partition("/")[0] in WANTED:
            yield member


def _check(folder: Path, wanted: str) -> None:
    try:
        text = (folder / "PKG-INFO").read_text()
        (folder / "test" / "functional" / "__init__.py").stat()
    except FileNotFoundError as error:
        raise NotRunError(
            f"{folder} holds no tests of Swift ({error.filename} is"
            " missing).\nRemove it and its .tar.gz."
        ) from error
    found = HeaderParser().parsestr(text)["Version"]
    if found != wanted:
        raise NotRunError(
            f"{folder} is of swift {found}, installed is {wanted}.\n"
            "Remove it and its .tar.gz."
        )
