"""Tar shards of any number of samples, made from a few tars."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hapi_protocol.samples import Sample
from hapi_protocol.shards import iter_samples

IMAGENET_TARS = "imagenet-*.tar"


def find_tars(
    sources: Sequence[Path], pattern: str = IMAGENET_TARS
) -> list[Path]:
    """The tars among files and folders.

    A folder with tars that match the pattern yields only these.

    Raises:
        ValueError: naming a source without a tar.
    """
    tars: list[Path] = []
    for source in sources:
        if source.is_file():
            paths = [source]
        else:
            paths = sorted(source.glob(pattern)) or sorted(
                source.glob("*.tar")
            )
        if not paths:
            raise ValueError(f"{source} is no tar and no folder of tars")
        tars += paths
    return tars


def write_shards(
    tars: Sequence[Path], folder: Path, samples: int, shard_samples: int
) -> list[Path]:
    """Repacks samples into shards, repeating them as often as needed.

    Raises:
        ValueError: the tars contain no sample.
    """
    endless = _endless(tars)
    paths = []
    for number in range(-(-samples // shard_samples)):
        path = folder / f"bench-{number:05d}.tar"
        first = number * shard_samples
        with tarfile.open(path, "w") as tar:
            for position in range(first, min(first + shard_samples, samples)):
                _add(tar, f"{position:06d}", next(endless))
        paths.append(path)
    return paths


def _endless(tars: Sequence[Path]) -> Iterator[Sample]:
    for repetition in itertools.count():
        before = repetition
        for path in tars:
            with path.open("rb") as file:
                for sample in iter_samples(file, name=path.name):
                    before = -1
                    yield sample
        if before >= 0:
            raise ValueError(f"no sample in {', '.join(map(str, tars))}")


def _add(tar: tarfile.TarFile, prefix: str, sample: Sample) -> None:
    base = sample.key.rpartition("/")[2]
    for extension, data in sample.members.items():
        member = tarfile.TarInfo(f"{prefix}-{base}.{extension}")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
