"""A folder of feature files, and the manifest of what is complete.

Each file has the features of consecutive spans.  Any number of processes fill
a folder: one locks a file while it writes it, and enters it in the manifest
when it is on the disk.  Readers of folders pass over the manifest's name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hapi_client.atomic_file import file_lock, try_lock, write_atomically
from hapi_protocol.errors import ClientError, TooSlowError

logger = logging.getLogger(__name__)

MANIFEST = "_manifest.json"
MAX_PART_SAMPLES = 10_000
DEFAULT_PARTS = 16
"""Files of a small data set, so that several processes can share it."""
MANIFEST_SECONDS = 60.0
"""Longest wait for another process that changes the manifest."""
PART_SECONDS = 3600.0
"""Longest wait for a file that other processes write."""
_POLL_SECONDS = 0.2
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """A file of consecutive spans.

    Attributes:
        name: name of the file.
        first: number of its first span.
        stop: number of the span after its last.
        num_samples: samples of its spans.
    """

    name: str
    first: int
    stop: int
    num_samples: int


def default_part_samples(num_samples: int) -> int:
    """Returns the default of the maximum number of samples of a file."""
    return max(
        1, min(MAX_PART_SAMPLES, math.ceil(num_samples / DEFAULT_PARTS))
    )


def parts_of(
    sizes: Sequence[int], max_samples: int, suffix: str
) -> list[Part]:
    """Divides a data set into files.

    Args:
        sizes: samples of each span.
        max_samples: maximum number of samples of a file of several spans.
        suffix: suffix of the files.
    """
    starts, num_samples = [0], 0
    for number, size in enumerate(sizes):
        if num_samples and num_samples + size > max_samples:
            starts.append(number)
            num_samples = 0
        num_samples += size
    return [
        Part(
            f"part-{number:05d}-of-{len(starts):05d}{suffix}",
            first,
            stop,
            sum(sizes[first:stop]),
        )
        for number, (first, stop) in enumerate(pairwise([*starts, len(sizes)]))
    ]


class FeatureFolder:
    """Files of a data set's features, which are computed once.

    Args:
        path: folder; it is made, in one that exists.
        description: facts that determine the files, as JSON.
        parts: the files.

    Raises:
        ClientError: ``bad_configuration`` for a folder of other files, or
            of another description, naming the difference.
    """

    def __init__(
        self,
        path: Path,
        description: Mapping[str, Any],
        parts: Sequence[Part],
    ) -> None:
        self._path, self._manifest = path, path / MANIFEST
        self._parts = parts
        check_folder(path)
        path.mkdir(exist_ok=True)
        with file_lock(self._manifest, MANIFEST_SECONDS):
            if not self._manifest.exists():
                self._write({**description, "files": {}})
            self._check(json.loads(json.dumps(description)))

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Facts of the complete files by name."""
        files: dict[str, dict[str, Any]] = _read(self._manifest)["files"]
        return files

    def fill(
        self,
        write: Callable[[Part, Path], Mapping[str, int]],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Writes the files that are missing or damaged.

        Returns when all are complete, whoever wrote them.

        Args:
            write: writes a file and returns facts about it.
            rank: rank of this process among those that began together.
            world_size: number of these.

        Raises:
            TooSlowError: if another process does not end.
        """
        for part in self._parts[rank::world_size]:
            self._check_file(part)
        deadline = time.monotonic() + PART_SECONDS
        while missing := self._missing():
            start = len(missing) * rank // world_size
            written = [
                part
                for part in missing[start:] + missing[:start]
                if self._write_part(part, write)
            ]
            if written:
                deadline = time.monotonic() + PART_SECONDS
            elif time.monotonic() > deadline:
                raise TooSlowError(
                    "too_slow",
                    f"other runs have written {missing[0].name} of "
                    f"{self._path} for {PART_SECONDS:.0f} s; end them, and "
                    "repeat this command",
                )
            else:
                time.sleep(_POLL_SECONDS)

    def _missing(self) -> list[Part]:
        files = self.files
        return [part for part in self._parts if part.name not in files]

    def _write_part(
        self, part: Part, write: Callable[[Part, Path], Mapping[str, int]]
    ) -> bool:
        """Writes a file, unless another process does or did."""
        path = self._path / part.name
        with try_lock(path) as is_locked:
            if not is_locked or part.name in self.files:
                return False
            facts = write(part, path)
            self._enter(part, {**facts, **_sums(path)})
        return True

    def _check_file(self, part: Part) -> None:
        """Strikes a damaged file from the manifest."""
        path = self._path / part.name
        with try_lock(path) as is_locked:
            facts = self.files.get(part.name)
            if not is_locked or facts is None:
                return
            found = _sums(path) if path.exists() else {"bytes": 0}
            if facts | found != facts:
                logger.warning(
                    "%s is not what was written: %s; it is computed again",
                    path,
                    found,
                )
                self._enter(part, None)

    def _enter(self, part: Part, facts: Mapping[str, Any] | None) -> None:
        with file_lock(self._manifest, MANIFEST_SECONDS):
            manifest = _read(self._manifest)
            files = {**manifest["files"], part.name: facts}
            names = (part.name for part in self._parts)
            manifest["files"] = {n: files[n] for n in names if files.get(n)}
            self._write(manifest)

    def _write(self, manifest: Mapping[str, Any]) -> None:
        is_complete = len(manifest["files"]) == len(self._parts)
        text = json.dumps({**manifest, "complete": is_complete}, indent=1)
        with write_atomically(self._manifest) as file:
            file.write(text.encode())

    def _check(self, description: Mapping[str, Any]) -> None:
        found = _read(self._manifest)
        differences = [
            f"{name} is {_short(one)} there and {_short(other)} here"
            for name, one, other in _differences(found, description)
        ]
        if differences:
            raise ClientError(
                "bad_configuration",
                f"{self._path} has features of another run: "
                f"{'; '.join(differences)}; give another folder, or delete "
                "this one",
            )


def check_folder(path: Path) -> None:
    """Checks that a folder is new, empty, or has a manifest.

    Raises:
        ClientError: ``bad_configuration`` naming another file in it.
    """
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


def _read(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest["files"], dict):
            raise ValueError("files is no object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClientError(
            "bad_configuration",
            f"{path} cannot be read as a manifest: {error}; restore it, or "
            "delete the folder",
        ) from error
    return dict(manifest)


def _differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in wanted:
        one, other = found.get(name), wanted[name]
        if isinstance(one, dict) and isinstance(other, dict):
            both = {**dict.fromkeys(one), **other}
            yield from _differences(one, both, f"{prefix}{name}.")
        elif one != other:
            yield prefix + name, one, other


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _sums(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
