"""Tar shards of any number of samples, made from a few given ones."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.tars import find_tars as find_tars

from hapi_protocol.shards import Sample, iter_samples


def write_shards(
    tars: Sequence[Path], folder: Path, samples: int, shard_samples: int
) -> list[Path]:
    """Repacks samples into shards, each as often as it takes.

    Args:
        tars: WebDataset shards.
        folder: where to; must exist.
        samples: in all.
        shard_samples: of each shard.

    Raises:
        ValueError: when the tars hold no sample.
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
