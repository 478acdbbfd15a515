"""A folder of checkpoints, which several processes write together.

``step-000000000012.pt`` is whole: it was written as ``….part``, synced and
renamed.  Writers tell each other by empty files that their part is there, so
that processes of any hosts that share the folder can write one checkpoint.
``run.json`` names the run that the folder belongs to.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from hapi_protocol.errors import ClientError
from hapi_training.checkpoints.direct_write import (
    aligned,
    reserve,
    write_range,
)
from hapi_training.checkpoints.torch_file import FileBytes
from hapi_training.state_transfer import loaded

VERSION = 1
# Measured on two cores: two and four writers are slower than one.
CORES_PER_WRITER = 2.0
MIN_RANGE_BYTES = 8 << 20
"""Least bytes of a writer: smaller ones cost more than they gain."""
POLL_SECONDS = 0.01
_FACTS = ("version", "run", "folder")
FILE_NAME = re.compile(r"step-(\d{12})\.pt")
# A file's name, an attempt, and what it is.
_UNFINISHED = re.compile(r"(.+)\.[0-9a-f]{32}\.\w+")


def most_writers() -> int:
    """Returns how many processes write faster than fewer on this host."""
    return max(1, int((os.cpu_count() or 1) / CORES_PER_WRITER))


def file_name(step: int) -> str:
    return f"step-{step:012}.pt"


def clean(
    folder: Path, is_meant: Callable[[str], bool] = lambda name: True
) -> None:
    """Removes what writers of files that were killed have left.

    Args:
        folder: the folder.
        is_meant: returns True for the names of these files.
    """
    for path in folder.glob("*.*"):
        unfinished = _UNFINISHED.fullmatch(path.name)
        if unfinished and is_meant(unfinished[1]):
            path.unlink(missing_ok=True)


class Folder:
    """A folder of one run's checkpoints.

    Args:
        path: the folder; it is made if needed.

    Raises:
        ClientError: ``bad_configuration`` if that is not possible.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with naming(path):
            path.mkdir(parents=True, exist_ok=True)

    @property
    def place(self) -> Path:
        """The folder, as a user names it."""
        return self.path

    @property
    def locked(self) -> Path:
        """File that one run locks."""
        return self.path / "run"

    def file(self, step: int) -> Path:
        return self.path / file_name(step)

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, the newest first."""
        with os.scandir(self.path) as entries:
            names = [
                FILE_NAME.fullmatch(e.name) for e in entries if e.is_file()
            ]
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def owner(self, run: str) -> dict[str, Any]:
        """Returns the run that the folder belongs to, and the folder's id.

        Args:
            run: the run, if the folder has no checkpoints yet.

        Raises:
            ClientError: ``bad_state`` for a folder of another version.
        """
        path = self.path / "run.json"
        if not path.exists():
            facts = {"version": VERSION, "run": run, "folder": uuid4().hex}
            with suppress(FileExistsError), self._written(facts) as new:
                os.link(new, path)
        facts = self._facts(path)
        if facts["run"] != run and not self.steps():
            # Of a run that was killed before its first checkpoint.
            facts["run"] = run
            with self._written(facts) as new:
                new.replace(path)
        return facts

    @contextmanager
    def _written(self, facts: Mapping[str, Any]) -> Iterator[Path]:
        """Makes a file that gets its name when it is whole."""
        new = self.path / f"run.{uuid4().hex}.new"
        try:
            new.write_text(json.dumps(facts))
            yield new
        finally:
            new.unlink(missing_ok=True)

    def _facts(self, path: Path) -> dict[str, Any]:
        try:
            facts = json.loads(path.read_text())
            if facts["version"] == VERSION:
                return {name: facts[name] for name in _FACTS}
            reason = f"its version is {facts['version']!r}"
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise ClientError(
            "bad_state",
            f"{path} is not of version {VERSION} ({reason}); delete it if it "
            "is damaged, or give another folder as local=",
        )

    def size(self, step: int) -> int:
        """Length of a checkpoint, in bytes."""
        return self.file(step).stat().st_size

    def whole(self, step: int) -> bytes:
        """Reads a checkpoint.

        Raises:
            ClientError: ``bad_configuration`` if it cannot be read.
        """
        path = self.file(step)
        with naming(path):
            return path.read_bytes()

    def remove(self, step: int) -> None:
        self.file(step).unlink(missing_ok=True)

    def clean(self, before: float = math.inf) -> None:
        """Removes what writers that were killed have left.

        Args:
            before: only of earlier steps.
        """
        clean(self.path, lambda name: self._is_before(name, before))

    def _is_before(self, name: str, before: float) -> bool:
        step = FILE_NAME.fullmatch(name)
        return step is not None and int(step[1]) < before


class OneFile(Folder):
    """A file that each checkpoint replaces; for one run after another.

    Args:
        path: the file, or a link to it.
    """

    def __init__(self, path: Path) -> None:
        # The target of a link is locked and replaced, not the link.
        self._target = path.resolve()
        self._is_known = False
        super().__init__(self._target.parent)

    @property
    def place(self) -> Path:
        return self._target

    @property
    def locked(self) -> Path:
        return self._target

    def file(self, step: int) -> Path:
        return self._target

    def steps(self) -> list[int]:
        # Its step is not known before it is read.
        return [0] if self._target.exists() else []

    def owner(self, run: str) -> dict[str, Any]:
        if not self._is_known and self._target.exists():
            # It may be anything, such as the weights of a finished run.
            try:
                run = loaded(self.whole(0))["run"]
            except Exception as error:
                raise ClientError(
                    "bad_state",
                    f"{self._target} exists, and is no checkpoint; give "
                    "another file as local=",
                ) from error
        self._is_known = True
        # Ranks of other hosts write a file of their own.
        return {"run": run, "folder": f"{platform.node()}:{self._target}"}

    def remove(self, step: int) -> None:
        """Nothing: there are no older ones."""

    def _is_before(self, name: str, before: float) -> bool:
        return name == self._target.name


def place_of(place: str | os.PathLike[str]) -> Folder:
    """Returns the folder, or the file if there is one or it is named so.

    Raises:
        ClientError: ``bad_configuration`` for what is no path.
    """
    if not isinstance(place, str | os.PathLike) or not str(place):
        raise ClientError(
            "bad_configuration",
            f"local={place!r} is no path; give a folder, or a file (….pt)",
        )
    path = Path(place)
    with naming(path):
        is_file = path.is_file() or (
            path.suffix == ".pt" and not path.is_dir()
        )
        return OneFile(path) if is_file else Folder(path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes an error of the system one that names the place.

    Raises:
        ClientError: ``bad_configuration``.
    """
    try:
        yield
    except OSError as error:
        raise ClientError(
            "bad_configuration",
            f"{path} cannot be written or read: {error}; make room, or choose "
            "another place; the checkpoints before are whole",
        ) from error


class SharedWrite:
    """One checkpoint, written by some processes.

    Args:
        folder: the folder.
        step: step of the checkpoint.
        attempt: text that is equal for all writers, and for no other write.
        writer: number of this writer; the first one commits.
        num_writers: number of processes that share the folder.
        max_writers: most of them that write; the others wait.
        timeout_seconds: longest wait for the other writers.
        has_ended: returns True if they write nothing any more.
    """

    def __init__(
        self,
        folder: Folder,
        step: int,
        attempt: str,
        writer: int,
        num_writers: int,
        max_writers: int,
        timeout_seconds: float,
        has_ended: Callable[[], bool],
    ) -> None:
        self._has_ended = has_ended
        self._folder = folder
        self._final = folder.file(step)
        self._part = self._final.with_name(
            f"{self._final.name}.{attempt}.part"
        )
        self.writer, self._num_writers = writer, num_writers
        self._max_writers = min(num_writers, max_writers)
        self._timeout = timeout_seconds

    def write(self, data: FileBytes) -> None:
        """Writes this process's range.

        Raises:
            ClientError: ``bad_configuration`` if it cannot be written;
                ``worker_lost``.
        """
        with naming(self._final), self._failing():
            if self.writer == 0:
                new = self._part.with_suffix(".new")
                reserve(new, data.size)
                new.rename(self._part)
            else:
                self._wait(self._part.exists)
            start, stop = self._range(data.size)
            if start < stop:
                write_range(self._part, start, stop, data.copy_to)
            self._marker(self.writer).touch()

    def commit(self, size: int) -> Path:
        """Gives the file its name, when all have written their ranges.

        Args:
            size: length of the file in bytes.

        Returns:
            The file.

        Raises:
            ClientError: as of :meth:`write`.
        """
        with naming(self._final), self._failing():
            if self.writer:
                # The first writer has renamed it.
                self._wait(lambda: not self._part.exists())
                return self._final
            for writer in range(1, self._num_writers):
                self._wait(self._marker(writer).exists)
            with self._part.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
            self._part.rename(self._final)
            _sync_folder(self._folder.path)
            self._remove_markers()
        return self._final

    def _range(self, size: int) -> tuple[int, int]:
        """First byte and end of what this process writes."""
        count = max(1, min(self._max_writers, size // MIN_RANGE_BYTES))
        length = aligned(-(-size // count))
        start = min(size, self.writer * length)
        return start, min(size, start + length)

    def _marker(self, name: object) -> Path:
        return self._part.with_suffix(f".{name}")

    def _wait(self, holds: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not holds():
            waited = time.monotonic() - began
            if self._marker("failed").exists():
                raise ClientError(
                    "worker_lost",
                    f"another process could not write its part of "
                    f"{self._final}; look at its output",
                )
            if waited > self._timeout or self._has_ended():
                raise ClientError(
                    "worker_lost",
                    f"another process has not written its part of "
                    f"{self._final}; look at its output",
                )
            time.sleep(min(POLL_SECONDS, 5e-4 + waited / 8))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Tells the other writers of an error."""
        try:
            yield
        except BaseException:
            if self._num_writers > 1:
                with suppress(OSError):
                    self._marker("failed").touch()
            if not self.writer:
                with suppress(OSError):
                    self._part.with_suffix(".new").unlink(missing_ok=True)
                    self._part.unlink(missing_ok=True)
            raise

    def _remove_markers(self) -> None:
        for writer in range(self._num_writers):
            self._marker(writer).unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    """Waits until names of files are on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
