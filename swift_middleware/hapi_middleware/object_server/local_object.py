"""Reads an object from the object server to the right of the filter."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from swift.common.swob import Request, Response, wsgi_quote
from swift.common.utils import closing_if_possible, drain_and_close

from hapi_middleware.concurrency import sleep, yielding
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.multi_object_reads import (
    DAMAGED,
    INCOMPLETE,
    FetchedObject,
)
from hapi_middleware.requests.subrequests import ObjectBody, ObjectHead
from hapi_protocol.backend import (
    HEADER_POLICY,
    JobOrder,
    ObjectsOrder,
    StoredObject,
)
from hapi_protocol.errors import HapiError, UnavailableError
from hapi_protocol.headers import ByteRange
from hapi_protocol.multi_object import END, ObjectEntry

_FOREIGN = (
    "X-Static-Large-Object",
    "X-Object-Manifest",
    "X-Object-Sysmeta-Ec-",
    "X-Object-Sysmeta-Crypto-",
    "X-Object-Sysmeta-Symlink-",
    "X-Object-Transient-Sysmeta-Crypto-",
)
"""Headers, or their beginnings, of objects whose stored bytes are not those
of the user."""
_STALE_STATUS = 412
"""Precondition Failed (RFC 9110, 15.5.13): another version than
``If-Match``."""


class NotHereError(Exception):
    """The bytes are not on this disk, or not as the job names them.

    Attributes:
        status: HTTP status for the proxy, which asks another object server.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Wanted:
    """Bytes that a proxy has named.

    Attributes:
        path: ``/device/partition/account/container/object``, quoted.
        name: name of the source, for messages.
        etag: ETag of the object at ``path``.
        length_bytes: number of bytes wanted.
        part: the bytes; None for all.
    """

    path: str
    name: str
    etag: str
    length_bytes: int
    part: ByteRange | None = None

    @classmethod
    def by_job(cls, env: Env, order: JobOrder) -> Wanted:
        """The bytes of one object, which the request's path names."""
        job, part = order.job, order.part
        length = part.length_bytes if part else job.source_length_bytes
        path = wsgi_quote(env["PATH_INFO"])
        return cls(path, job.source_name, order.etag, length or 0, part)


class LocalObject:
    """Bytes of an object on this host; iterated once.

    Args:
        app: the object server.
        env: WSGI environment of the proxy's request.
        wanted: the bytes.

    Raises:
        NotHereError: the object is not readable here as it is named.
    """

    def __init__(self, app: Any, env: Env, wanted: Wanted) -> None:
        etag, part = wanted.etag, wanted.part
        # "If-Match" compares with the stored bytes: an ETag of other bytes
        # that Swift shows to users (manifests, fragments) does not match.
        headers = {"If-Match": f'"{etag}"'}
        if part is not None:
            headers["Range"] = str(part)
        response = _get(app, env, wanted.path, headers)
        expected = wanted.length_bytes
        try:
            _check(response, etag, expected, is_part=bool(part))
        except NotHereError:
            drain_and_close(response)
            raise
        head = ObjectHead.from_response(response)
        self._body = ObjectBody(
            response.app_iter,
            expected,
            wanted.name,
            None if part else head.md5,
        )

    def __iter__(self) -> Generator[bytes, None, None]:
        return yielding(self._body)

    def close(self) -> None:
        """Closes the object's file.  Idempotent."""
        self._body.close()


def _get(
    app: Any, env: Env, path: str, headers: Mapping[str, str]
) -> Response:
    """The object server's answer on an object of this host."""
    copied = ("swift.trans_id", "REMOTE_ADDR", "wsgi.errors")
    request = Request.blank(
        path,
        environ={key: env[key] for key in copied if key in env},
        headers={
            HEADER_POLICY: env.get("HTTP_X_BACKEND_STORAGE_POLICY_INDEX", "0"),
            "X-Trans-Id": env.get("HTTP_X_TRANS_ID", ""),
            **headers,
        },
    )
    return request.get_response(app)


def read_whole(app: Any, env: Env) -> None:
    """Reads the object of a request to its end, and drops the bytes.

    The object server then compares it with its ETag, and puts it aside if it
    is damaged.
    """
    response = _get(app, env, wsgi_quote(env["PATH_INFO"]), {})
    with closing_if_possible(response.app_iter):
        for _ in yielding(response.app_iter):
            pass


@dataclass(eq=False, repr=False)
class LocalObjects:
    """Many objects on this host, framed for the worker; iterated once.

    All are opened before the job begins.  One whose bytes turn out to be
    damaged is a row with an error, which the client may ask for again.

    Args:
        app: the object server.
        env: WSGI environment of the proxy's request.
        order: the order of the job.

    """

    app: Any
    env: Env
    order: ObjectsOrder

    def __post_init__(self) -> None:
        self._opened: deque[tuple[StoredObject, LocalObject]] = deque()

    def open(self) -> None:
        """Opens all objects; other green threads run in between.

        Raises:
            UnavailableError: one is not readable here as it is named.
        """
        container = self.order.job.source_name
        for stored in self.order.objects:
            name = f"{container}/{stored.key}"
            path = quote(f"/{stored.device}/{stored.partition}{name}")
            wanted = Wanted(path, name, stored.etag, stored.length_bytes)
            try:
                local = LocalObject(self.app, self.env, wanted)
            except NotHereError as error:
                raise UnavailableError(
                    "service_unavailable", f"{name}: {error}; retry"
                ) from error
            self._opened.append((stored, local))
            sleep()

    def __iter__(self) -> Iterator[bytes]:
        return yielding(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        number = 0
        while self._opened:
            stored, local = self._opened.popleft()
            with closing(local):
                fetched = _fetched(stored, local)
            yield from fetched.frames(number)
            number += 1
        yield END

    def close(self) -> None:
        """Closes all files.  Idempotent."""
        while self._opened:
            self._opened.popleft()[1].close()


def _fetched(stored: StoredObject, local: LocalObject) -> FetchedObject:
    entry = ObjectEntry(stored.index, stored.key, 200, stored.etag)
    try:
        return FetchedObject(entry, is_readable=True, pieces=deque(local))
    except HapiError as error:
        reason = DAMAGED if error.code == "source_damaged" else INCOMPLETE
        return FetchedObject(entry.failed(503, reason), is_readable=False)


def _check(
    response: Response, etag: str, expected: int, *, is_part: bool
) -> None:
    status = response.status_int
    if status == 416:
        raise NotHereError(_STALE_STATUS, "the object is shorter here")
    if not response.is_success:
        raise NotHereError(status, f"the object server answers {status}")
    for name in response.headers:
        if name.title().startswith(_FOREIGN):
            raise NotHereError(422, f"the object has the header {name}")
    head = ObjectHead.from_response(response)
    if (status, head.etag, head.length_bytes) != (
        206 if is_part else 200,
        etag,
        expected,
    ):
        raise NotHereError(_STALE_STATUS, "another version is here")
