"""A folder of class folders, packed into WebDataset shards.

The layout is torchvision's ``ImageFolder``: ``DIR/<class>/…/<image>``, or
arrays (``.npy``) in the images' place.
Labels are positions in the sorted class names.  Samples are spread over the
shards by a hash of their path, so that no shard holds one class only, and
the same folder always gives the same bytes: an upload that broke off
continues where it was.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from hapi_protocol.errors import ClientError
from hapi_protocol.shards import ARRAY, IMAGE, Medium

DEFAULT_SHARD_SAMPLES = 1000
DEFAULT_SHARD_BYTES = 128 * 1024 * 1024
PACKED_NAME = re.compile(r"shard-\d{6}\.tar")


@dataclass(frozen=True)
class SampleFile:
    """One image or array of the folder.

    Attributes:
        path: where it lies.
        key: ``<class>/<name>``, without dots in the name.
        label: of its class.
        length_bytes: of the file.
    """

    path: Path
    key: str
    label: int
    length_bytes: int


@dataclass(frozen=True)
class SampleFolder:
    """A folder's samples, in the order in which they are packed.

    Attributes:
        class_names: of its class folders.
        files: of all classes.
        ignored: files that are none.
        medium: of all of them.
    """

    class_names: tuple[str, ...]
    files: tuple[SampleFile, ...]
    ignored: tuple[Path, ...]
    medium: Medium


def find_class_names(folder: Path) -> tuple[str, ...]:
    """Names of the folder's class folders, sorted."""
    return tuple(
        sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )
    )


def read_folder(folder: Path) -> SampleFolder:
    """Lists a folder of class folders.

    Raises:
        ClientError: ``bad_configuration`` when it holds neither images nor
            arrays, or both, or a class none.
    """
    class_names = find_class_names(folder)
    found = {
        name: sorted(p for p in (folder / name).rglob("*") if p.is_file())
        for name in class_names
    }
    medium = _medium_of(folder, [p for paths in found.values() for p in paths])
    files: list[SampleFile] = []
    ignored: list[Path] = []
    for label, (name, paths) in enumerate(found.items()):
        samples = [path for path in paths if medium.has(path.suffix)]
        ignored += [path for path in paths if not medium.has(path.suffix)]
        if not samples:
            raise ClientError(
                "bad_configuration",
                f"class folder {folder / name} has no {medium.name} "
                f"({', '.join(medium.extensions)})",
            )
        files += _sample_files(folder, samples, label)
    files.sort(key=lambda file: hashlib.sha256(file.key.encode()).digest())
    return SampleFolder(class_names, tuple(files), tuple(ignored), medium)


def _medium_of(folder: Path, paths: Sequence[Path]) -> Medium:
    found = {
        medium: path
        for path in paths
        for medium in (IMAGE, ARRAY)
        if medium.has(path.suffix)
    }
    if len(found) > 1:
        image, array = found[IMAGE], found[ARRAY]
        raise ClientError(
            "bad_configuration",
            f"{folder} holds images ({image.name}) and arrays ({array.name}), "
            "and a data set has one of them; upload each by itself",
        )
    if not found:
        raise ClientError(
            "bad_configuration",
            f"{folder} has neither class folders with images "
            f"({', '.join(IMAGE.extensions)}) or arrays "
            f"({', '.join(ARRAY.extensions)}) nor .tar files",
        )
    return next(iter(found))


def unreadable(samples: SampleFolder) -> Iterator[Path]:
    """Images whose headers nobody can read.

    Only headers are looked at: what is damaged behind them shows when the
    image is decoded.
    """
    if samples.medium is not IMAGE:
        return
    for file in samples.files:
        try:
            with Image.open(file.path, formats=("JPEG", "PNG")):
                pass
        except (OSError, ValueError, SyntaxError):
            yield file.path
        except Image.DecompressionBombError:
            continue  # of many pixels, for which there is a limit elsewhere


def _sample_files(
    folder: Path, paths: Sequence[Path], label: int
) -> Iterator[SampleFile]:
    seen: set[str] = set()
    for path in paths:
        place = path.relative_to(folder)
        # A key ends at the first dot of the base name.
        stem = (place.parent / place.stem.replace(".", "_")).as_posix()
        key = stem
        number = 1
        while key in seen:
            number += 1
            key = f"{stem}-{number}"
        seen.add(key)
        yield SampleFile(path, key, label, path.stat().st_size)


def split_shards(
    files: Iterable[SampleFile], shard_samples: int, shard_bytes: int
) -> Iterator[list[SampleFile]]:
    """Runs of files, each within both bounds or of one file."""
    shard: list[SampleFile] = []
    total_bytes = 0
    for file in files:
        if shard and (
            len(shard) >= shard_samples
            or total_bytes + file.length_bytes > shard_bytes
        ):
            yield shard
            shard, total_bytes = [], 0
        shard.append(file)
        total_bytes += file.length_bytes
    if shard:
        yield shard


def write_shard(files: Iterable[SampleFile], target: BinaryIO) -> None:
    """Writes ``key.jpg`` or ``key.npy``, and ``key.cls``, of each file; equal
    files, equal bytes."""
    with tarfile.open(
        fileobj=target, mode="w", format=tarfile.PAX_FORMAT
    ) as tar:
        for file in files:
            with file.path.open("rb") as stored:
                extension = file.path.suffix.lower()
                # The size as read now, should the file have changed.
                data = stored.read()
            _add(tar, file.key + extension, data)
            _add(tar, f"{file.key}.cls", str(file.label).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
