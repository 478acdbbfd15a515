"""Stores the formats that some opponents need.

``python -m benchmarks.opponents.convert`` answers questions on its standard
input (:mod:`benchmarks.testbed.remote`) until that ends.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from PIL import Image
from swiftclient.client import Connection

from benchmarks.opponents.tars import samples
from benchmarks.opponents.training import Place
from benchmarks.testbed.remote import serve

QUALITY = 95
RESIZE_SIZE = 256
"""Pixels of the shorter side of resized photographs."""
MDS_COLUMNS = {"image": "bytes", "label": "int"}

Samples = list[tuple[str, bytearray, int]]
"""Key, JPEG and label of each sample."""
Shards = Iterator[tuple[str, Samples]]
"""Name and samples of each shard."""
Put = Callable[[str, bytes], None]
"""Stores an object by name."""


def images(shards: Shards, put: Put, container: str) -> Mapping[str, Any]:
    """Stores single photographs, ``<key>.jpg``."""
    labels = {}
    for _, photographs in shards:
        for key, jpeg, label in photographs:
            put(f"{key}.jpg", bytes(jpeg))
            labels[key] = label
    return {"images": container, "labels": labels}


def mds(shards: Shards, put: Put, container: str) -> Mapping[str, Any]:
    """Stores shards of mosaicml-streaming, of the first tar's size."""
    from streaming import MDSWriter  # takes seconds

    first = next(shards)
    size_limit = sum(len(jpeg) for _, jpeg, _ in first[1])
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(
            out=folder, columns=MDS_COLUMNS, size_limit=size_limit
        ) as writer:
            for _, photographs in chain([first], shards):
                for _, jpeg, label in photographs:
                    writer.write({"image": bytes(jpeg), "label": label})
        for path in sorted(Path(folder).iterdir()):
            put(path.name, path.read_bytes())
    return {"mds": container}


def resized(shards: Shards, put: Put, container: str) -> Mapping[str, Any]:
    """Stores the same tars with resized photographs."""
    for name, photographs in shards:
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w") as tar:
            for key, jpeg, label in photographs:
                _add(tar, f"{key}.jpg", smaller(jpeg, RESIZE_SIZE))
                _add(tar, f"{key}.cls", str(label).encode())
        put(name, sink.getvalue())
    return {"resized": container}


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def smaller(jpeg: bytes | bytearray, resize_size: int) -> bytes:
    """Shrinks a photograph to a number of pixels of its shorter side."""
    with Image.open(io.BytesIO(jpeg)) as image:
        scale = resize_size / min(image.size)
        if scale >= 1:
            return bytes(jpeg)
        width, height = (round(side * scale) for side in image.size)
        sink = io.BytesIO()
        image.convert("RGB").resize(
            (width, height), Image.Resampling.LANCZOS
        ).save(sink, "JPEG", quality=QUALITY)
    return sink.getvalue()


def _shards(paths: Sequence[str]) -> Shards:
    for path in map(Path, paths):
        with path.open("rb") as file:
            yield path.name, list(samples(file))


def converted(
    convert: Callable[[Shards, Put, str], Mapping[str, Any]],
    place: Mapping[str, Any],
    paths: Sequence[str],
    container: str,
) -> dict[str, Any]:
    """Converts a data set.

    ``place`` has fields of a :class:`Place`, ``paths`` are tar files on this
    machine, ``container`` is created.  Returns new fields of the place.
    """
    known = Place(**place)
    connection = Connection(known.auth_url, known.user, known.key)
    with closing(connection):
        connection.put_container(container)
        put = partial(connection.put_object, container)
        return dict(convert(_shards(paths), put, container))


def main() -> NoReturn:
    functions = (images, mds, resized)
    serve({task.__name__: partial(converted, task) for task in functions})
    os._exit(0)


if __name__ == "__main__":
    main()
