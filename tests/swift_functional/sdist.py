"""The tests of the installed Swift: its wheel has none, its sdist has them.

Only ``test/`` and ``etc/`` are unpacked, so that the Swift under test is the
installed one.
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
    """Of Swift."""
    return version("swift")


def default_cache() -> Path:
    """``swift-hapi`` in the user's folder of caches."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swift-hapi"


def unpacked_sdist(cache: Path, wanted: str) -> Path:
    """The folder with ``test/`` and ``etc/`` of that version of Swift.

    Made once: fetched by pip, unless ``swift-<version>.tar.gz`` lies in the
    cache already.

    Raises:
        NotRunError: when it cannot be had, or is of another version.
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
                archive, f"pip was not done after {PIP_SECONDS:g} s"
            ) from error
        fetched = Path(place) / archive.name
        if done.returncode != 0 or not fetched.exists():
            lines = done.stdout.rstrip().splitlines()[-PIP_LINES:]
            raise _no_sdist(archive, "\n".join(["pip said:", *lines]))
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
