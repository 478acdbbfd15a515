"""Concurrent reads of the objects of a request for many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from swift.common.swob import Request, Response
from swift.common.utils import close_if_possible, drain_and_close

from hapi_middleware.concurrency import Timeout, map_ahead
from hapi_middleware.cors import save_cors_headers
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.authorization import object_request
from hapi_middleware.requests.subrequests import ObjectBody, ObjectHead
from hapi_protocol.multi_object import (
    END,
    ObjectEntry,
    entry_member,
    object_header,
    padding,
    too_large_message,
)
from hapi_protocol.printable import printable

INCOMPLETE = "service_unavailable: it could not be read to its end; retry"
DAMAGED = "source_damaged: its bytes are not those of its ETag; retry"
_NO_LENGTH = (
    "unsupported_object: it has no length or no ETag (a dynamic large object "
    "of too many segments); store it as a static large object"
)
_CODES = {401: "unauthorized", 403: "forbidden", 404: "not_found"}
_TEMPORARY = (408, 429, 498)
"""Timeout, and the two statuses with which Swift limits rates."""


@dataclass
class FetchedObject:
    """The result of one object's GET.

    Attributes:
        entry: description for the worker.
        is_readable: Swift lets the caller read the object.
        pieces: the object's bytes, if ``entry`` has no error.
    """

    entry: ObjectEntry
    is_readable: bool
    pieces: deque[bytes] = field(default_factory=deque)

    def frames(self, number: int) -> Iterator[bytes]:
        """Yields the object's members of the job's tar stream, once.

        Args:
            number: position of the object in that stream.
        """
        entry = self.entry
        if entry.error is not None:
            yield entry_member(entry, number)
            return
        length = sum(map(len, self.pieces))
        yield entry_member(entry, number) + object_header(number, length)
        while self.pieces:
            yield self.pieces.popleft()
        if zeros := padding(length):
            yield zeros


@dataclass(eq=False, repr=False)
class ObjectReader:
    """Reads objects of one container with the caller's own rights.

    Args:
        app: the rest of the pipeline.
        env: WSGI environment of a request that ``refuse_delegated`` accepts.
        container_path: ``/v1/account/container``, decoded.
        max_bytes: maximum length of one object.
        logger: Swift's.
    """

    app: Any
    env: Env
    container_path: str
    max_bytes: int
    logger: Any

    def __post_init__(self) -> None:
        self._thread_locals = self.logger.thread_locals

    def get(self, name: str) -> Response:
        """Swift's answer to the GET of an object."""
        return self._request(name).get_response(self.app)

    def _request(self, name: str, method: str = "GET") -> Request:
        path = quote(f"{self.container_path}/{name}")
        return object_request(self.env, path, method)

    def head(self, numbered: tuple[int, str]) -> ObjectHead | None:
        """Facts about an object, given as (index in the request, name).

        Returns:
            None if Swift does not let the caller read it now.
        """
        self.logger.thread_locals = self._thread_locals
        request = self._request(numbered[1], "HEAD")
        try:
            response = request.get_response(self.app)
            drain_and_close(response)
        except (Exception, Timeout):
            self.logger.exception("hapi: the HEAD of an object failed")
            return None
        if not response.is_success:
            return None
        save_cors_headers(self.env, response.headers)
        return ObjectHead.from_response(response, request)

    def read(self, numbered: tuple[int, str]) -> FetchedObject:
        """Reads one object, given as (index in the request, name).

        Never raises: a failure of one object must not stop the others.
        """
        # Swift's log lines of this thread name the request.
        self.logger.thread_locals = self._thread_locals
        index, name = numbered
        try:
            response = self.get(name)
            try:
                return self._read(index, name, response)
            finally:
                close_if_possible(response.app_iter)
        except (Exception, Timeout) as error:
            self.logger.warning(
                "hapi: %s breaks off: %s",
                printable(f"{self.container_path}/{name}"),
                printable(str(error)),
            )
            # The error's text may name hosts: it goes to the log only.
            is_damaged = getattr(error, "code", None) == "source_damaged"
            reason = DAMAGED if is_damaged else INCOMPLETE
            entry = ObjectEntry(index, name, 503, None, reason)
            return FetchedObject(entry, is_readable=False)

    def _read(
        self, index: int, name: str, response: Response
    ) -> FetchedObject:
        status = response.status_int
        if not response.is_success:
            drain_and_close(response)
            entry = ObjectEntry(index, name, status, None, _refusal(status))
            return FetchedObject(entry, is_readable=False)
        save_cors_headers(self.env, response.headers)
        head = ObjectHead.from_response(response)
        entry = ObjectEntry(index, name, status, head.etag or None)
        length = head.length_bytes
        if length is None or not head.etag:
            entry = entry.failed(status, _NO_LENGTH)
            return FetchedObject(entry, is_readable=True)
        if length > self.max_bytes:
            message = too_large_message(length, self.max_bytes)
            return FetchedObject(entry.failed(413, message), is_readable=True)
        body = ObjectBody(response.app_iter, length, name, head.md5)
        return FetchedObject(entry, is_readable=True, pieces=deque(body))


class FramedObjects:
    """The body of a job over many objects, in the request's order.

    Args:
        read: reads an object by (index, name); never raises.
        numbered: the objects, as (index, name).
        concurrency: number of objects read, or held in memory, at a time.
    """

    def __init__(
        self,
        read: Callable[[tuple[int, str]], FetchedObject],
        numbered: Iterable[tuple[int, str]],
        concurrency: int,
    ) -> None:
        self._objects = map_ahead(read, numbered, concurrency)
        self._first: deque[FetchedObject] = deque()

    def fetch_first_readable(self) -> bool:
        """Reads up to the first readable object; False if there is none."""
        for fetched in self._objects:
            self._first.append(fetched)
            if fetched.is_readable:
                return True
        return False

    def __iter__(self) -> Iterator[bytes]:
        number = 0
        while self._first:
            yield from self._first.popleft().frames(number)
            number += 1
        for fetched in self._objects:
            yield from fetched.frames(number)
            number += 1
        yield END

    def close(self) -> None:
        """Ends all reads.  Idempotent."""
        self._objects.close()


def _refusal(status: int) -> str:
    if status >= 500 or status in _TEMPORARY:
        return f"service_unavailable: Swift answers {status} now; retry"
    code = _CODES.get(status, "unsupported_object")
    return f"{code}: Swift answers {status} to your GET"
