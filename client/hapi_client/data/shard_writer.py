"""Packing of folders and files into WebDataset shards.

The layout is torchvision's ``ImageFolder``: ``DIR/<class>/…/<image>``, or
arrays (``.npy``) instead of images.  Labels are positions in the sorted class
names; a flat folder has none.  Samples are ordered by a hash of their key, so
that shards mix classes.  The same folder always gives the same bytes, so that
an interrupted upload can continue.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from hapi_protocol.errors import ClientError
from hapi_protocol.samples import (
    ARCHIVE,
    ARRAY,
    IMAGE,
    SNIFF_BYTES,
    Medium,
    SampleError,
    is_hidden,
    sniff,
)
from hapi_protocol.shards import DEFAULT_LIMITS
from hapi_splitter.inputs.image_header import read_header

DEFAULT_SHARD_SAMPLES = 1000
DEFAULT_SHARD_BYTES = 128 * 1024 * 1024
PACKED_NAME = re.compile(r"shard-\d{6}\.tar")
_ENDS = {"jpeg": b"\xff\xd9", "png": b"IEND\xaeB`\x82", "gif": b";"}
"""Last bytes of images, but for zeros; phones add others, such as a film."""


@dataclass(frozen=True)
class SampleFile:
    """An image or array of the folder.

    Attributes:
        path: path of the file.
        key: ``<class>/<name>``, without dots in the name; other bytes than
            UTF-8 are escaped.
        label: number of its class; None without classes.
        length_bytes: size of the file.
    """

    path: Path
    key: str
    label: int | None
    length_bytes: int


@dataclass(frozen=True)
class SampleFolder:
    """The samples of a folder, in the order in which they are packed.

    Attributes:
        class_names: names of its class folders; empty without classes.
        files: samples of all classes.
        ignored: files that are not samples; hidden files do not count.
        medium: kind of all samples.
        dangling: links that lead nowhere, or back to a folder above.
    """

    class_names: tuple[str, ...]
    files: tuple[SampleFile, ...]
    ignored: tuple[Path, ...]
    medium: Medium
    dangling: tuple[Path, ...] = ()


def find_class_names(folder: Path) -> tuple[str, ...]:
    """Returns the sorted names of the class folders."""
    return tuple(
        sorted(
            _text(entry.name)
            for entry in folder.iterdir()
            if entry.is_dir() and not is_hidden(entry.name)
        )
    )


def _text(name: str) -> str:
    """A file's name; bytes that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def read_folder(folder: Path) -> SampleFolder:
    """Lists the samples of a folder of class folders.

    Links are followed.

    Raises:
        ClientError: ``bad_configuration`` if it contains neither images nor
            arrays, or both, or a class without any, or a file that cannot
            be read or has too long a path.
    """
    dangling: list[Path] = []
    ignored: list[Path] = []
    by_class: dict[str, list[Path]] = {}
    for entry in sorted(folder.iterdir()):
        if is_hidden(entry.name):
            continue
        if entry.is_dir():
            paths = sorted(_files_below(entry, dangling))
            by_class.setdefault(_text(entry.name), []).extend(paths)
        else:
            ignored.append(entry)
    by_class = dict(sorted(by_class.items()))
    class_names = tuple(by_class)
    medium = _medium_of(
        folder, [p for paths in by_class.values() for p in paths]
    )
    files: list[SampleFile] = []
    for label, (name, paths) in enumerate(by_class.items()):
        samples = [path for path in paths if medium.has(path.suffix)]
        ignored += [path for path in paths if not medium.has(path.suffix)]
        if not samples:
            raise ClientError(
                "bad_configuration",
                f"class folder {folder / name} has no {medium.name} "
                f"({', '.join(medium.extensions)}); put some into it, or "
                "remove it",
            )
        files += _sample_files(folder, samples, label, set())
    files.sort(key=lambda file: hashlib.sha256(file.key.encode()).digest())
    return SampleFolder(
        class_names, tuple(files), tuple(ignored), medium, tuple(dangling)
    )


def read_flat(sources: Sequence[Path]) -> SampleFolder:
    """Lists samples without classes: files, and all files of folders.

    Raises:
        ClientError: as :func:`read_folder`.
    """
    dangling: list[Path] = []
    places: list[tuple[Path, list[Path]]] = []
    for source in sources:
        if source.is_dir():
            places.append((source, sorted(_files_below(source, dangling))))
        else:
            places.append((source.parent, [source]))
    paths = [path for _, below in places for path in below]
    medium = _medium_of(sources[0], paths)
    keys: set[str] = set()
    files = [
        file
        for folder, below in places
        for file in _sample_files(
            folder, [p for p in below if medium.has(p.suffix)], None, keys
        )
    ]
    files.sort(key=lambda file: hashlib.sha256(file.key.encode()).digest())
    ignored = tuple(path for path in paths if not medium.has(path.suffix))
    return SampleFolder((), tuple(files), ignored, medium, tuple(dangling))


def _files_below(folder: Path, dangling: list[Path]) -> Iterator[Path]:
    """Yields the files of a folder, through links, each folder once a path."""
    open_folders = {folder: {_identity(folder)}}
    for place, folders, names in os.walk(folder, followlinks=True):
        path = Path(place)
        above = open_folders.pop(path)
        for name in list(folders):
            below = path / name
            identity = _identity(below)
            if is_hidden(name) or identity in above:
                folders.remove(name)
                if identity in above:
                    dangling.append(below)
            else:
                open_folders[below] = above | {identity}
        for name in names:
            file = path / name
            if is_hidden(name):
                continue
            if file.is_file():
                yield file
            elif file.is_symlink():
                dangling.append(file)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def find_sample(folder: Path) -> Path | None:
    """Returns a sample of a folder of class folders, if it has any."""
    return next(
        (
            path
            for path in folder.glob("*/**/*")
            if is_sample(path)
            and not is_hidden(path.relative_to(folder).as_posix())
        ),
        None,
    )


def is_sample(path: Path) -> bool:
    """True for a visible image or array file, by its suffix."""
    return (
        path.is_file()
        and not is_hidden(path.name)
        and any(medium.has(path.suffix) for medium in (IMAGE, ARRAY, ARCHIVE))
    )


def _medium_of(folder: Path, paths: Sequence[Path]) -> Medium:
    media = {
        medium: path
        for path in paths
        for medium in (IMAGE, ARRAY, ARCHIVE)
        if medium.has(path.suffix)
    }
    if len(media) > 1:
        kinds = " and ".join(
            f"{medium.name}s ({path.name})" for medium, path in media.items()
        )
        raise ClientError(
            "bad_configuration",
            f"{folder} contains {kinds}, but a data set has only one kind; "
            "upload them separately",
        )
    if not media:
        raise ClientError(
            "bad_configuration",
            f"{folder} has neither images ({', '.join(IMAGE.extensions)}) or "
            "arrays (npy, npz), in class folders or not, nor .tar files",
        )
    return next(iter(media))


def is_damaged(image: bytes) -> bool:
    """Returns True for an image that jobs refuse, or whose end is missing.

    Only headers are read, and images that do not end as their format does are
    decoded; other damage is found when a job decodes it.
    """
    kind = sniff(image[:SNIFF_BYTES]) or ""
    is_whole = image.rstrip(b"\0").endswith(_ENDS.get(kind, b""))
    if kind in ("webp", "bmp"):
        first, more = (4, 8) if kind == "webp" else (2, 0)
        stated = int.from_bytes(image[first : first + 4], "little")
        is_whole = stated + more <= len(image)
    try:
        read_header(image)
        if not is_whole:
            with Image.open(io.BytesIO(image)) as opened:
                opened.load()
    except (SampleError, OSError, ValueError, SyntaxError):
        return True
    return False


def _sample_files(
    folder: Path,
    paths: Sequence[Path],
    label: int | None,
    keys: set[str],
) -> Iterator[SampleFile]:
    for path in paths:
        relative = path.relative_to(folder)
        # A key ends at the first dot of the base name.
        stem = _text(
            (relative.parent / relative.stem.replace(".", "_")).as_posix()
        )
        _check_path(path, stem)
        key = stem
        number = 1
        while key in keys:
            number += 1
            key = f"{stem}-{number}"
        keys.add(key)
        yield SampleFile(path, key, label, path.stat().st_size)


def _check_path(path: Path, key: str) -> None:
    limit = DEFAULT_LIMITS.max_key_bytes
    if len(key.encode()) > limit:
        raise ClientError(
            "bad_configuration",
            f"the path of {_text(str(path))} gives a key of "
            f"{len(key.encode())} bytes; at most {limit}: use shorter names",
        )
    if not os.access(path, os.R_OK):
        raise ClientError(
            "bad_configuration",
            f"{_text(str(path))} cannot be read; change its permissions, or "
            "move it away",
        )


def split_shards(
    files: Iterable[SampleFile], shard_samples: int, shard_bytes: int
) -> Iterator[list[SampleFile]]:
    """Groups files by shard; a shard exceeds its limits only with one file."""
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
    """Writes ``key.jpg`` (or ``key.npy``) and ``key.cls`` of each file.

    Equal files give equal bytes.
    """
    with tarfile.open(
        fileobj=target, mode="w", format=tarfile.PAX_FORMAT
    ) as tar:
        for file in files:
            with file.path.open("rb") as stored:
                extension = file.path.suffix.lower()
                data = stored.read()
            _add(tar, file.key + extension, data)
            if file.label is not None:
                _add(tar, f"{file.key}.cls", str(file.label).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
