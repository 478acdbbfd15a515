"""A folder of feature files, and the manifest of what is complete.

Each file has the features of consecutive spans.  Any number of processes fill
a folder: one locks a file while it writes it, and enters it in the manifest
when it is on the disk.  Readers of folders pass over the manifest's name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from hapi_client.atomic_file import check_writable, file_lock, write_atomically
from hapi_client.sampling.distributed import Rank
from hapi_protocol.errors import ClientError, TooSlowError

logger = logging.getLogger(__name__)

MANIFEST = "_manifest.json"
MAX_PART_SAMPLES = 10_000
MIN_PARTS = 16
"""Files of a small data set, so that several processes can share it."""
MANIFEST_SECONDS = 60.0
"""Longest wait for another process that changes the manifest."""
PART_SECONDS = 3600.0
"""Longest wait for a file that another process writes."""
NOTE_SECONDS = 30.0
"""Wait after which the user reads of it."""
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Part:
    """A file of the spans ``first`` to ``stop - 1``, and their samples."""

    name: str
    first: int
    stop: int
    num_samples: int


WritePart: TypeAlias = Callable[[Part, Path], Mapping[str, int]]
"""Writes a file; returns facts about it."""


def default_part_samples(num_samples: int) -> int:
    """Returns the default of the maximum number of samples of a file."""
    return min(MAX_PART_SAMPLES, -(-num_samples // MIN_PARTS))


def parts_of(sizes: Sequence[int], max_samples: int) -> list[Part]:
    """Divides a data set into files.

    Args:
        sizes: samples of each span.
        max_samples: maximum number of samples of a file of several spans.
    """
    starts, num_samples = [0], 0
    for number, size in enumerate(sizes):
        if num_samples and num_samples + size > max_samples:
            starts.append(number)
            num_samples = 0
        num_samples += size
    names = (
        f"part-{number:05d}-of-{len(starts):05d}.parquet"
        for number in range(len(starts))
    )
    return [
        Part(name, first, stop, sum(sizes[first:stop]))
        for name, (first, stop) in zip(
            names, pairwise([*starts, len(sizes)]), strict=True
        )
    ]


class FeatureFolder:
    """Files of a data set's features, which are computed once.

    Args:
        path: the folder; it is made in one that exists.
        about: facts that determine features and files, as JSON.
        parts: the files.

    Raises:
        ClientError: ``bad_configuration`` for a folder of other features,
            naming the difference.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], parts: Sequence[Part]
    ) -> None:
        self._path, self._manifest, self._parts = path, path / MANIFEST, parts
        path.mkdir(exist_ok=True)
        wanted = json.loads(json.dumps(dict(about)))
        with file_lock(self._manifest, MANIFEST_SECONDS):
            if not self._manifest.exists():
                self._write({"about": wanted, "files": {}})
            found = self._read()["about"]
        different = [
            f"{name} was {_short(found.get(name))} and is now "
            f"{_short(wanted.get(name))}"
            for name in {**found, **wanted}
            if found.get(name) != wanted.get(name)
        ]
        if different:
            raise ClientError(
                "bad_configuration",
                f"{path} has features of another run: {'; '.join(different)}; "
                "give another folder, or delete this one",
            )

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Facts of the complete files by name."""
        return dict(self._read()["files"])

    def fill(self, write: WritePart, rank: Rank) -> None:
        """Writes the files that are missing or damaged.

        Returns when all are complete, whoever wrote them.

        Args:
            write: writes a file.
            rank: rank among the processes that have begun together.

        Raises:
            TooSlowError: if another process does not end.
        """
        for part in self._parts[rank.rank :: rank.world_size]:
            self._check(part)
        deadline = time.monotonic() + PART_SECONDS
        has_noted = False
        while missing := self._missing():
            # Ranks begin at different places.
            start = len(missing) * rank.rank // rank.world_size
            order = missing[start:] + missing[:start]
            if any(self._write_part(part, write) for part in order):
                deadline = time.monotonic() + PART_SECONDS
            elif time.monotonic() > deadline:
                raise TooSlowError(
                    "too_slow",
                    f"other runs have written {missing[0].name} of "
                    f"{self._path} for {PART_SECONDS:.0f} s; end them, and "
                    "repeat this command",
                )
            else:
                waited = time.monotonic() - deadline + PART_SECONDS
                if waited > NOTE_SECONDS and not has_noted:
                    has_noted = True
                    logger.warning(
                        "waiting for another run, which writes %s",
                        self._path / missing[0].name,
                    )
                time.sleep(_POLL_SECONDS)

    def _missing(self) -> list[Part]:
        files = self.files
        return [part for part in self._parts if part.name not in files]

    def _write_part(self, part: Part, write: WritePart) -> bool:
        """Writes a file, unless another process does or did."""
        path = self._path / part.name
        with file_lock(path, required=False) as is_locked:
            if not is_locked or part.name in self.files:
                return False
            if path.is_symlink():
                path.unlink()  # what it names may be no part of this folder
            facts = write(part, path)
            self._enter(part, {**facts, **_sums(path)})
        return True

    def _check(self, part: Part) -> None:
        """Removes a damaged file from the manifest."""
        path = self._path / part.name
        with file_lock(path, required=False) as is_locked:
            facts = self.files.get(part.name)
            if not is_locked or facts is None:
                return
            try:
                is_intact = path.exists() and facts | _sums(path) == facts
            except OSError as error:
                raise ClientError(
                    "bad_configuration",
                    f"{path} cannot be read: {error}; make it readable, or "
                    "delete it",
                ) from error
            if not is_intact:
                logger.warning(
                    "%s is missing or damaged, and is computed again", path
                )
                self._enter(part, None)

    def _enter(self, part: Part, facts: Mapping[str, Any] | None) -> None:
        with file_lock(self._manifest, MANIFEST_SECONDS):
            manifest = self._read()
            files = {**manifest["files"], part.name: facts}
            self._write({**manifest, "files": files})

    def _write(self, manifest: Mapping[str, Any]) -> None:
        files = {k: v for k, v in sorted(manifest["files"].items()) if v}
        is_complete = len(files) == len(self._parts)
        text = {**manifest, "files": files, "complete": is_complete}
        with write_atomically(self._manifest) as file:
            file.write(json.dumps(text, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        try:
            manifest = json.loads(self._manifest.read_bytes())
            files = manifest["files"]
            names = (x.name for x in self._parts if x.name in files)
            return {
                "about": {**manifest["about"]},
                "files": {name: {**files[name]} for name in names},
            }
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ClientError(
                "bad_configuration",
                f"{self._manifest} cannot be read: {error}; restore it, or "
                "delete the folder",
            ) from error


def check_folder(path: Path) -> None:
    """Checks, before any work, that a folder can be made or continued.

    Raises:
        ClientError: ``bad_configuration`` if it cannot be written, or naming
            a file in it that is not of a run.
    """
    if path.is_file():
        raise ClientError(
            "bad_configuration",
            f"{path}/ is not a folder but a file; give another, or delete it",
        )
    check_writable(path / MANIFEST if path.is_dir() else path)
    names = sorted(os.listdir(path)) if path.is_dir() else []
    # What is left of a manifest that was not completed is no other file.
    others = [name for name in names if not name.startswith(MANIFEST)]
    # Listed before: another process writes the manifest first.
    if others and not (path / MANIFEST).exists():
        raise ClientError(
            "bad_configuration",
            f"{path} has other files, such as {others[0]}, but no "
            f"{MANIFEST}; give a new folder",
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _sums(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    if not path.is_file():
        raise OSError("it is no file")  # reading a pipe would wait for ever
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
