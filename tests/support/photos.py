"""Real JPEGs for tests: crops of the photographs scikit-image bundles."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
"""One class each, label by position."""


@lru_cache(maxsize=len(PHOTOS))
def photo(name: str) -> Image.Image:
    import skimage

    folder = Path(skimage.__file__).parent / "data"
    return Image.open(folder / name).convert("RGB")


def jpegs(
    count: int, *, size: int = 240, seed: int = 0
) -> Iterator[tuple[bytes, int]]:
    """``count`` crops at quality 90 and the number of their photograph."""
    random = np.random.default_rng(seed)
    for number in range(count):
        label = number % len(PHOTOS)
        image = photo(PHOTOS[label])
        left = int(random.integers(0, image.width - size + 1))
        top = int(random.integers(0, image.height - size + 1))
        crop = image.crop((left, top, left + size, top + size))
        sink = io.BytesIO()
        crop.save(sink, "JPEG", quality=90)
        yield sink.getvalue(), label


def tar_of(members: Iterable[tuple[str, bytes]]) -> bytes:
    """A tar of regular members, in the order given."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def shard(
    count: int, *, size: int = 240, seed: int = 0, labels: bool = True
) -> bytes:
    """A WebDataset shard of ``count`` crops, keys ``s<seed>-<number>``."""
    members = []
    for number, (data, label) in enumerate(jpegs(count, size=size, seed=seed)):
        key = f"s{seed}-{number:04d}"
        members.append((f"{key}.jpg", data))
        if labels:
            members.append((f"{key}.cls", str(label).encode()))
    return tar_of(members)


def shards_of(
    counts: Iterable[int], *, size: int = 240, seed: int = 0
) -> dict[str, bytes]:
    """Shards ``0.tar``, ``1.tar`` and so on, with these numbers of crops."""
    return {
        f"{number}.tar": shard(count, size=size, seed=number + seed)
        for number, count in enumerate(counts)
    }


def with_corrupt_member(data: bytes, key: str) -> bytes:
    """The same shard with the scan of ``key``'s JPEG cut away."""
    members = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for info in archive:
            file = archive.extractfile(info)
            assert file is not None
            content = file.read()
            if info.name == f"{key}.jpg":
                content = content[:200] + b"\x00" * (len(content) - 200)
            members.append((info.name, content))
    return tar_of(members)
