"""Objects of a request for many: each read whole, some at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from swift.common.swob import Response
from swift.common.utils import close_if_possible, drain_and_close

from hapi_middleware.concurrency import Timeout, run_ahead
from hapi_middleware.cors import note_verdict
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.authorization import object_request
from hapi_middleware.requests.subrequests import ObjectHead
from hapi_protocol.multi_object import (
    END,
    ObjectEntry,
    entry_member,
    object_header,
    padding,
    too_large,
)

_BROKEN = "service_unavailable: it could not be read to its end; repeat"
_UNKNOWN = (
    "unsupported_object: it has no length or no ETag (a dynamic large object "
    "of too many segments); store it as a static large object"
)
_CODES = {401: "unauthorized", 403: "forbidden", 404: "not_found"}
_TEMPORARY = (408, 429, 498)


class BrokenReadError(Exception):
    """An answer that has not as many bytes as it said."""


@dataclass
class ReadObject:
    """What one object's GET gave.

    Attributes:
        entry: for the worker.
        is_readable: Swift lets the caller read it.
        pieces: its bytes, where it has no error.
    """

    entry: ObjectEntry
    is_readable: bool
    pieces: deque[bytes] = field(default_factory=deque)

    def frames(self) -> Iterator[bytes]:
        """It as members of the job's tar stream; can be asked for once."""
        entry = self.entry
        if entry.error is not None:
            yield entry_member(entry)
            return
        length = sum(map(len, self.pieces))
        yield entry_member(entry) + object_header(entry.index, length)
        while self.pieces:
            yield self.pieces.popleft()
        if rest := padding(length):
            yield rest


class ObjectReader:
    """Reads objects of one container as the caller's own GETs would.

    Args:
        app: the rest of the pipeline.
        env: of the client's request, which no middleware has overridden.
        container_path: ``/v1/account/container``, decoded.
        max_bytes: of one object.
        logger: Swift's.
    """

    def __init__(
        self,
        app: Any,
        env: Env,
        container_path: str,
        max_bytes: int,
        logger: Any,
    ) -> None:
        self._app = app
        self._env = env
        self._container_path = container_path
        self._max_bytes = max_bytes
        self._logger = logger
        self._thread_locals = logger.thread_locals

    def get(self, name: str) -> Response:
        """Swift's answer to the GET of an object."""
        path = quote(f"{self._container_path}/{name}")
        return object_request(self._env, path).get_response(self._app)

    def read(self, numbered: tuple[int, str]) -> ReadObject:
        """An object that stands in this place of the request.

        Nothing that happens to it harms the others.
        """
        # What Swift logs here is about this request, too.
        self._logger.thread_locals = self._thread_locals
        index, name = numbered
        try:
            response = self.get(name)
            try:
                return self._read(index, name, response)
            finally:
                close_if_possible(response.app_iter)
        except (Exception, Timeout) as error:
            self._logger.warning(
                "hapi: %s/%s breaks off: %s", self._container_path, name, error
            )
            # Its text goes to the log alone: it may name hosts.
            entry = ObjectEntry(index, name, 503, None, _BROKEN)
            return ReadObject(entry, is_readable=False)

    def _read(self, index: int, name: str, response: Response) -> ReadObject:
        status = response.status_int
        if not response.is_success:
            drain_and_close(response)
            entry = ObjectEntry(index, name, status, None, _refusal(status))
            return ReadObject(entry, is_readable=False)
        note_verdict(self._env, response.headers)
        head = ObjectHead.from_response(response)
        entry = ObjectEntry(index, name, status, head.etag or None)
        length = head.length_bytes
        if length is None or not head.etag:
            return ReadObject(entry.failed(status, _UNKNOWN), is_readable=True)
        if length > self._max_bytes:
            why = too_large(length, self._max_bytes)
            return ReadObject(entry.failed(413, why), is_readable=True)
        pieces = _pieces(response.app_iter, length)
        return ReadObject(entry, is_readable=True, pieces=pieces)


class ObjectFrames:
    """The body of a job over many objects, in their order.

    Args:
        read: an object, by its place and name; never raises.
        names: of the objects.
        concurrency: objects that are read, or held in memory, at a time.
    """

    def __init__(
        self,
        read: Callable[[tuple[int, str]], ReadObject],
        names: Iterable[str],
        concurrency: int,
    ) -> None:
        self._objects = run_ahead(read, enumerate(names), concurrency)
        self._first: deque[ReadObject] = deque()

    def find_readable(self) -> bool:
        """Reads up to the first object that the caller may read."""
        for found in self._objects:
            self._first.append(found)
            if found.is_readable:
                return True
        return False

    def __iter__(self) -> Iterator[bytes]:
        while self._first:
            yield from self._first.popleft().frames()
        for found in self._objects:
            yield from found.frames()
        yield END

    def close(self) -> None:
        """Ends all reads.  Idempotent."""
        self._objects.close()


def _pieces(chunks: Iterable[bytes], length: int) -> deque[bytes]:
    pieces: deque[bytes] = deque()
    left = length
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            break
        if chunk:
            pieces.append(chunk)
    if left:
        raise BrokenReadError(f"{left} of {length} bytes are missing")
    return pieces


def _refusal(status: int) -> str:
    if status >= 500 or status in _TEMPORARY:
        code, when = "service_unavailable", "now"
    else:
        code, when = _CODES.get(status, "unsupported_object"), "to your GET"
    return f"{code}: Swift answers {status} {when}"
