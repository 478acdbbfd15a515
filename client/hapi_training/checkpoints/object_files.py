"""Objects of Swift, as ``torch.distributed.checkpoint`` wants its files."""

from __future__ import annotations

import io
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError, NotFoundError
from hapi_training.checkpoints.segments import (
    NUM_THREADS,
    SEGMENT_BYTES,
    Segment,
    put_manifest,
    put_segment,
    read_range,
    segments_of,
)

_AHEAD_BYTES = NUM_THREADS * SEGMENT_BYTES
# Of a save, a rank and its file; of segments, their numbers.
_FILE_NAME = re.compile(r"__([0-9a-f-]{36})_\d+_\d+\.distcp(/\d{6})?")


class ObjectFiles:
    """Reads and writes objects as torch's reader and writer do files.

    Paths are ``swift://container/prefix/name``.  A copy in another process
    makes a connection of its own.
    """

    def __init__(self, connection: Connection | None) -> None:
        self._given = connection
        self._made: Connection | None = None

    @property
    def _connection(self) -> Connection:
        if self._given is not None:
            return self._given
        if self._made is None:
            self._made = Connection()
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        if self._given is not None:
            raise ClientError(
                "bad_configuration",
                "a connection cannot be given to another process; leave out "
                "connection=, and set the credentials in the environment",
            )
        return {"_given": None, "_made": None}

    def init_path(self, path: str | os.PathLike[str]) -> str:
        location = parse_location(str(path))
        segments_of(location.container)
        return str(location)

    def concat_path(self, path: str, name: str) -> str:
        return f"{path}/{name}"

    def mkdir(self, path: str) -> None:
        location = parse_location(path)
        for container in (location.container, segments_of(location.container)):
            self._connection.put_container(container)

    def exists(self, path: str) -> bool:
        return self._connection.head(*_object(path)) is not None

    def get(self, path: str) -> bytes:
        # Replicas may be old.
        newest = {"X-Newest": "true"}
        return self._connection.get_object(*_object(path), headers=newest)

    def put(self, path: str, data: bytes) -> None:
        self._connection.put(*_object(path), io.BytesIO(data), len(data))

    @contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator[Any]:
        if mode == "rb":
            yield _Source(self._connection, *_object(path))
            return
        upload = _Upload(self._connection, path)
        try:
            yield upload
            upload.close()
        finally:
            upload.end()

    def collect(self, path: str, save_id: str) -> None:
        """Deletes objects and segments of other saves in a prefix."""
        location = parse_location(path)
        prefix = location.object_name("")
        for container in (location.container, segments_of(location.container)):
            for info in self._connection.list(container, f"{prefix}__"):
                file = _FILE_NAME.fullmatch(info.name[len(prefix) :])
                if file and file[1] != save_id:
                    try:
                        self._connection.delete(container, info.name)
                    except NotFoundError:
                        # Of a request that was repeated.
                        continue


def _object(path: str) -> tuple[str, str]:
    location = parse_location(path)
    return location.container, location.prefix


class _Upload:
    """An object that is sent while it is written.

    It is there when it is closed, and not after an error.
    """

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._container, self._name = _object(path)
        self._buffer = bytearray()
        self._position = self._num_segments = 0
        self._sending: deque[Future[Segment]] = deque()
        self._sent: list[Segment] = []
        self._is_closed = False
        self._executor = ThreadPoolExecutor(NUM_THREADS, "hapi-segment")

    def tell(self) -> int:
        return self._position

    def write(self, data: bytes) -> int:
        self._buffer += data
        self._position += len(data)
        # Up to 1,000 segments are 176 GiB.
        length = SEGMENT_BYTES * (1 + self._num_segments // 100)
        while len(self._buffer) >= length:
            self._send(length)
        return len(data)

    def flush(self) -> None:
        """Nothing: a part of a segment cannot be sent."""

    def _send(self, length: int) -> None:
        # As many wait as are sent.
        if len(self._sending) >= 2 * NUM_THREADS:
            self._sent.append(self._sending.popleft().result())
        name = f"{self._name}/{self._num_segments:06}"
        self._num_segments += 1
        data = bytes(self._buffer[:length])
        del self._buffer[:length]
        self._sending.append(
            self._executor.submit(
                put_segment,
                self._connection,
                segments_of(self._container),
                name,
                lambda start, size: data[start : start + size],
                0,
                length,
            )
        )

    def close(self) -> None:
        """Makes the object."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._buffer:
            self._send(len(self._buffer))
        self._sent += [sending.result() for sending in self._sending]
        place = self._container, self._name
        if self._sent:
            put_manifest(self._connection, *place, self._sent)
        else:
            # No object has no segments.
            self._connection.put(*place, io.BytesIO(), 0)

    def end(self) -> None:
        """Sends nothing any more."""
        self._executor.shutdown(cancel_futures=True)


class _Source:
    """One version of an object, read from its beginning on."""

    def __init__(
        self, connection: Connection, container: str, name: str
    ) -> None:
        info = connection.head(container, name)
        if info is None:
            raise ClientError("bad_state", f"{container}/{name} is missing")
        self._size = info.length_bytes
        self._version = connection, container, name, info.etag
        self._start, self._data = 0, b""

    def read(self, start: int, length: int) -> bytes:
        """Returns bytes of the object; reads some of those that follow."""
        offset = start - self._start
        if not 0 <= offset <= len(self._data) - length:
            stop = min(self._size, start + max(length, _AHEAD_BYTES))
            self._data = read_range(*self._version, start, stop)
            self._start, offset = start, 0
        return self._data[offset : offset + length]
