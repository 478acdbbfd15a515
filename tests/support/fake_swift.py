"""A fake Swift for unit tests of the filter.

Swift's own FakeSwift is not in its wheel.  This one authorises as the proxy
does (container read ACL, then ``swift.authorize``), answers conditional and
range requests, and records every answer, so that a test can assert that none
was left open.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from swift.common import swob
from swift.common.swob import (
    HTTPCreated,
    HTTPNoContent,
    HTTPNotFound,
    HTTPOk,
    Request,
    Response,
    wsgi_to_str,
)

CHUNK_BYTES = 64 * 1024
CLOSES_HEADS = hasattr(swob, "friendly_close")
"""Swift 2.30 never closes the empty body of an answer to a HEAD."""
CACHE_PATH = "/v1/AUTH_test/\x00hapi\x00features"
"""Path of the container of cached features."""


class TrackedBody:
    """Body of an answer; records if it was read to its end and closed."""

    def __init__(self, body: bytes | Iterator[bytes], what: str) -> None:
        self.what = what
        self.is_read = body == b""
        self.is_closed = False
        self._chunks = _chunks(body) if isinstance(body, bytes) else body

    def __iter__(self) -> TrackedBody:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._chunks)
        except StopIteration:
            self.is_read = True
            raise

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeObject:
    """One object: its bytes, or a function that returns their iterator."""

    body: bytes
    etag: str
    headers: dict[str, str]
    stream: Callable[[], Iterator[bytes]] | None = None
    on_request: Callable[[Request], Response | None] | None = None


_NOTHING = FakeObject(b"", "", {})


@dataclass
class FakeSwift:
    """A WSGI application; paths are ``/account/container[/object]``."""

    objects: dict[str, FakeObject] = field(default_factory=dict)
    read_acls: dict[str, str] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[TrackedBody] = field(default_factory=list)
    may_be_unread: bool = False
    """Set by tests in which an answer may be closed early."""
    on_private: Callable[[Request], Response | None] | None = None
    """Answers requests for cache entries, unless it returns None."""
    private_bytes: int | None = None
    """Length of all cache entries; None: their container does not exist."""

    def put(
        self, path: str, body: bytes, etag: str | None = None, **headers: str
    ) -> FakeObject:
        """Stores an object; only the owner may read its container."""
        etag = etag or hashlib.md5(body).hexdigest()
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        self.objects[path] = FakeObject(body, etag, named)
        self.read_acls.setdefault(path.rpartition("/")[0], "")
        return self.objects[path]

    def __call__(self, env: dict[str, Any], start_response: Any) -> Any:
        request = Request(env)
        self.calls.append(dict(env))
        response = self._answer(request)
        self._track(request, response)
        return response(env, start_response)

    def requests(self) -> list[tuple[str, str, str | None]]:
        """Method, path and ``swift.source`` of each object request."""
        return [
            (e["REQUEST_METHOD"], e["PATH_INFO"], e.get("swift.source"))
            for e in self.calls
            if e["PATH_INFO"].count("/") >= 4
        ]

    def assert_nothing_is_open(self) -> None:
        """Asserts that every answer was read to its end and closed."""
        for body in self.bodies:
            assert body.is_closed, f"never closed: {body.what}"
            assert body.is_read or self.may_be_unread, f"not read: {body.what}"

    def _answer(self, request: Request) -> Response:
        path = wsgi_to_str(request.path_info).removeprefix("/v1")
        account, container, name = ([*path.split("/", 3), None, None])[1:4]
        if request.path_info.startswith(CACHE_PATH):
            return self._private(request, path, name)
        if name is None:
            # Requests of get_account_info() and get_container_info().
            acl = self.read_acls.get(f"/{account}/{container}")
            headers = {"X-Container-Read": acl} if acl else {}
            return HTTPNoContent(request=request, headers=headers)
        request.acl = self.read_acls.get(f"/{account}/{container}")
        if "swift.authorize" in request.environ:
            refusal = request.environ["swift.authorize"](request)
            if refusal:
                return refusal
        if path not in self.objects:
            return HTTPNotFound(request=request)
        return self._object(request, self.objects[path])

    def _private(
        self, request: Request, path: str, name: str | None
    ) -> Response:
        assert request.environ["swift.authorize"](request) is None
        special = (
            self.on_private(request) if name and self.on_private else None
        )
        if special is not None:
            return special
        if name is None:
            return self._private_container(request)
        if request.method == "PUT":
            self.put(path, request.body)
            return HTTPCreated(request=request)
        if path not in self.objects:
            return HTTPNotFound(request=request)
        if request.method == "DELETE":
            del self.objects[path]
        return self._object(request, self.objects.get(path) or _NOTHING)

    def _private_container(self, request: Request) -> Response:
        if request.method == "PUT":
            self.private_bytes = 0
            return HTTPCreated(request=request)
        if self.private_bytes is None:
            return HTTPNotFound(request=request)
        headers = {"X-Container-Bytes-Used": str(self.private_bytes)}
        return HTTPNoContent(request=request, headers=headers)

    def _object(self, request: Request, found: FakeObject) -> Response:
        if found.on_request:
            special = found.on_request(request)
            if special is not None:
                return special
        if request.method not in ("GET", "HEAD"):
            return HTTPNoContent(request=request)
        response = HTTPOk(
            request=request,
            headers={"Content-Type": "application/x-tar", **found.headers},
            conditional_response=True,
        )
        response.etag = found.etag
        if found.stream and request.method == "GET":
            response.app_iter = found.stream()
        else:
            response.body = found.body
        response.content_length = len(found.body)
        response.fix_conditional_response()
        return response

    def _track(self, request: Request, response: Response) -> None:
        if response.response_iter is None:
            response.fix_conditional_response()
        chunks = response.response_iter
        body = b"".join(chunks) if isinstance(chunks, list) else chunks
        what = f"{response.status} to {request.method} {request.path}"
        tracked = TrackedBody(body, what)
        tracked.is_closed = request.method == "HEAD" and not CLOSES_HEADS
        self.bodies.append(tracked)
        response.response_iter = tracked


def _chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), CHUNK_BYTES):
        yield body[start : start + CHUNK_BYTES]
