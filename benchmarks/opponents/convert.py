"""One-off conversions that some opponents need, and what they cost.

``python -m benchmarks.opponents.convert`` answers questions on its standard
input (:mod:`benchmarks.remote`) until that ends.  The photographs come from
tar files on this machine, or, as for a user who has them in Swift only, over
the link.
"""

from __future__ import annotations

import importlib
import io
import os
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.opponents.login import OK, log_in
from benchmarks.opponents.tars import samples
from benchmarks.opponents.training import Place
from benchmarks.remote import serve
from PIL import Image
from swiftclient.client import Connection

QUALITY = 95
UPLOADS = 4
"""At a time."""
MDS_COLUMNS = {"image": "bytes", "label": "int"}

Samples = list[tuple[str, bytearray, int]]
"""Key, JPEG and label of each."""
Fields = Mapping[str, Any]
"""Of :class:`Place`."""


class Uploader:
    """Stores objects, a few at a time; a context.

    Attributes:
        num_bytes: of them so far.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(UPLOADS)
        self._under_way: set[Future[None]] = set()
        self._connections: list[Connection] = []
        self.num_bytes = 0

    def make(self, container: str) -> None:
        """Makes a container, if there is none."""
        self._connection().put_container(container)

    def put(self, container: str, name: str, data: bytes | bytearray) -> None:
        """Stores an object soon; waits while there are too many."""
        self.num_bytes += len(data)
        self._under_way.add(
            self._pool.submit(self._put, container, name, bytes(data))
        )
        if len(self._under_way) > 2 * UPLOADS:
            done, self._under_way = wait(
                self._under_way, return_when=FIRST_COMPLETED
            )
            _raise(done)

    def _put(self, container: str, name: str, data: bytes) -> None:
        self._connection().put_object(container, name, data)

    def _connection(self) -> Connection:
        if not hasattr(self._own, "connection"):
            place = self._place
            self._own.connection = Connection(
                place.auth_url, place.user, place.key
            )
            self._connections.append(self._own.connection)
        connection: Connection = self._own.connection
        return connection

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()
        if kind is None:
            _raise(self._under_way)


def _raise(done: Iterable[Future[None]]) -> None:
    for each in done:
        each.result()


@dataclass
class Source:
    """Where photographs come from.

    Attributes:
        place: the shards are read from here where ``paths`` is None.
        paths: tar files on this machine.
        num_bytes: that were read so far.
    """

    place: Place
    paths: Sequence[str] | None
    num_bytes: int = 0

    def shards(self) -> Iterator[tuple[str, Samples]]:
        """Name of each shard, and its samples."""
        yield from (
            self._downloaded() if self.paths is None else self._local()
        )

    def _local(self) -> Iterator[tuple[str, Samples]]:
        assert self.paths is not None
        for path in map(Path, self.paths):
            with path.open("rb") as file:
                yield path.name, list(samples(file))
            self.num_bytes += path.stat().st_size

    def _downloaded(self) -> Iterator[tuple[str, Samples]]:
        login = log_in(self.place)
        connection = login.connect()
        try:
            for name in self.place.shards:
                connection.request(
                    "GET",
                    f"{login.path}/{self.place.container}/{name}",
                    headers={"X-Auth-Token": login.token},
                )
                answer = connection.getresponse()
                if answer.status != OK:
                    raise OSError(f"a shard was answered {answer.status}")
                data = answer.read()
                self.num_bytes += len(data)
                yield name, list(samples(io.BytesIO(data)))
        finally:
            connection.close()


def images(source: Source, uploader: Uploader, container: str) -> Fields:
    """Stores single photographs, ``<key>.jpg``."""
    labels = {}
    for _, found in source.shards():
        for key, jpeg, label in found:
            uploader.put(container, f"{key}.jpg", jpeg)
            labels[key] = label
    return {"images": container, "labels": labels}


def mds(source: Source, uploader: Uploader, container: str) -> Fields:
    """Stores shards of mosaicml-streaming, about as large as the first tar."""
    from streaming import MDSWriter  # takes seconds

    shards = source.shards()
    first = next(shards)
    size_limit = sum(len(jpeg) for _, jpeg, _ in first[1])
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(
            out=folder, columns=MDS_COLUMNS, size_limit=size_limit
        ) as writer:
            for _, found in chain([first], shards):
                for _, jpeg, label in found:
                    writer.write({"image": bytes(jpeg), "label": label})
        for path in sorted(Path(folder).iterdir()):
            uploader.put(container, path.name, path.read_bytes())
    return {"mds": container}


def resized(
    source: Source, uploader: Uploader, container: str, resize_size: int
) -> Fields:
    """Stores tars of the same names, keys and labels, photographs resized."""
    for name, found in source.shards():
        uploader.put(container, name, _tar(found, resize_size))
    return {"resized": container}


def _tar(found: Samples, resize_size: int) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for key, jpeg, label in found:
            for extension, data in (
                ("jpg", smaller(jpeg, resize_size)),
                ("cls", str(label).encode()),
            ):
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return sink.getvalue()


def smaller(jpeg: bytes | bytearray, resize_size: int) -> bytes:
    """A photograph whose shorter side has so many pixels.

    One that is not larger stays as it is.
    """
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


def converted(
    convert: Callable[..., Fields],
    place: Mapping[str, Any],
    paths: Sequence[str] | None = None,
    container: str | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Answers a question.

    Args:
        convert: a function of this module.
        place: fields of :class:`Place`.
        paths: tar files on this machine; None reads the place's shards from
            Swift.
        container: to store in, is made; None for one that is named for the
            place's.
        arguments: of the function.

    Returns:
        ``place``, fields of it that are new; ``seconds``, ``bytes_read`` and
        ``bytes_written``.
    """
    started = time.monotonic()
    known = Place(**place)
    container = container or f"{known.container}-{convert.__name__}"
    source = Source(known, paths)
    with Uploader(known) as uploader:
        uploader.make(container)
        fields = convert(source, uploader, container, **arguments)
    return {
        "place": fields,
        "seconds": time.monotonic() - started,
        "bytes_read": source.num_bytes,
        "bytes_written": uploader.num_bytes,
    }


def ready(libraries: Sequence[str]) -> None:
    """Answers when these are imported, which takes some of them seconds."""
    for each in libraries:
        importlib.import_module(each)


def main() -> NoReturn:
    serve(
        {
            convert.__name__: partial(converted, convert)
            for convert in (images, mds, resized)
        }
        | {"ready": ready}
    )
    os._exit(0)


if __name__ == "__main__":
    main()
