"""A folder of class folders, packed into WebDataset shards.

The layout is torchvision's ``ImageFolder``: ``DIR/<class>/…/<image>``.
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

from hapi_protocol.errors import ClientError
from hapi_protocol.shards import IMAGE_EXTENSIONS

DEFAULT_SHARD_SAMPLES = 1000
DEFAULT_SHARD_BYTES = 128 * 1024 * 1024
PACKED_NAME = re.compile(r"shard-\d{6}\.tar")


@dataclass(frozen=True)
class ImageFile:
    """One image of the folder.

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
class ImageFolder:
    """A folder's images, in the order in which they are packed."""

    class_names: tuple[str, ...]
    files: tuple[ImageFile, ...]
    num_ignored: int


def find_class_names(folder: Path) -> tuple[str, ...]:
    """Names of the folder's class folders, sorted."""
    return tuple(
        sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )
    )


def read_folder(folder: Path) -> ImageFolder:
    """Lists a folder of class folders.

    Raises:
        ClientError: ``bad_configuration`` when it holds no image, or a
            class none.
    """
    class_names = find_class_names(folder)
    files: list[ImageFile] = []
    num_ignored = 0
    for label, name in enumerate(class_names):
        paths = sorted(p for p in (folder / name).rglob("*") if p.is_file())
        images = [path for path in paths if _is_image(path)]
        num_ignored += len(paths) - len(images)
        if not images:
            raise ClientError(
                "bad_configuration",
                f"class folder {folder / name} has no image "
                f"({', '.join(IMAGE_EXTENSIONS)})",
            )
        files += _image_files(folder, images, label)
    if not files:
        raise ClientError(
            "bad_configuration",
            f"{folder} has neither class folders with images nor .tar files",
        )
    files.sort(key=lambda file: hashlib.sha256(file.key.encode()).digest())
    return ImageFolder(class_names, tuple(files), num_ignored)


def _is_image(path: Path) -> bool:
    return path.suffix[1:].lower() in IMAGE_EXTENSIONS


def _image_files(
    folder: Path, images: Sequence[Path], label: int
) -> Iterator[ImageFile]:
    seen: set[str] = set()
    for path in images:
        place = path.relative_to(folder)
        # A key ends at the first dot of the base name.
        stem = (place.parent / place.stem.replace(".", "_")).as_posix()
        key = stem
        number = 1
        while key in seen:
            number += 1
            key = f"{stem}-{number}"
        seen.add(key)
        yield ImageFile(path, key, label, path.stat().st_size)


def split_shards(
    files: Iterable[ImageFile], shard_samples: int, shard_bytes: int
) -> Iterator[list[ImageFile]]:
    """Runs of files, each within both bounds or of one file."""
    shard: list[ImageFile] = []
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


def write_shard(files: Iterable[ImageFile], target: BinaryIO) -> None:
    """Writes ``key.jpg`` and ``key.cls`` members; equal files, equal bytes."""
    with tarfile.open(
        fileobj=target, mode="w", format=tarfile.PAX_FORMAT
    ) as tar:
        for file in files:
            with file.path.open("rb") as image:
                extension = file.path.suffix.lower()
                # The size as read now, should the file have changed.
                data = image.read()
            _add(tar, file.key + extension, data)
            _add(tar, f"{file.key}.cls", str(file.label).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
