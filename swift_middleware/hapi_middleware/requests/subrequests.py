"""Reads the source and the model package by sub-requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from swift.common.swob import Request, Response
from swift.common.utils import close_if_possible, drain_and_close

from hapi_middleware.concurrency import Timeout
from hapi_middleware.cors import save_cors_headers
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.authorization import (
    source_request,
)
from hapi_protocol.backend import HEADER_POLICY
from hapi_protocol.errors import (
    HapiError,
    SourceChangedError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
    make_error,
)
from hapi_protocol.headers import ByteRange
from hapi_protocol.sample_checks import check_md5, etag_md5

_RETRY_SECONDS = 1.0
"""An upload that was seen half way has ended then."""
_NEWEST: Mapping[str, str] = MappingProxyType({"X-Newest": "true"})
"""Makes Swift ask all replicas, of which the newest answers."""
_LINK = "Content-Location"
"""Header of symlinks and of versioned objects."""
_NOT_STORED = ("X-Object-Version-Id", "X-Backend-Crypto-Cipher")
"""Headers of versioned and of encrypted objects."""


class SwiftAnswerError(Exception):
    """Carries an answer of Swift that goes to the client unchanged."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


@dataclass(frozen=True)
class ObjectHead:
    """Facts about a readable object, from the headers of its HEAD or GET.

    Attributes:
        etag: bare ETag; empty if there is none.
        length_bytes: None if Swift does not know the length.
        is_manifest: the object is a static or dynamic large object.
        policy_index: index of the object's storage policy; None if a filter
            answered with another object.
        is_plain: the stored bytes are those that the user reads, and an
            object server has them under the object's own name.
        is_static_manifest: the object is a static large object, and neither
            encrypted nor an old version.
        link_target: ``/account/container/object`` that a symlink shows.
    """

    etag: str
    length_bytes: int | None
    is_manifest: bool
    policy_index: int | None = None
    is_plain: bool = False
    is_static_manifest: bool = False
    link_target: str | None = None

    @property
    def md5(self) -> str | None:
        """MD5 of the object's bytes, as Swift's ETag has it, if it has."""
        return etag_md5(self.etag, is_manifest=self.is_manifest)

    @classmethod
    def from_response(
        cls, response: Response, request: Request | None = None
    ) -> ObjectHead:
        """Reads the headers of an answer.

        Args:
            response: the answer.
            request: the request, in which Swift's proxy leaves the policy.
        """
        headers = response.headers
        policy = request and request.headers.get(HEADER_POLICY)
        is_manifest = (
            "X-Static-Large-Object" in headers
            or "X-Object-Manifest" in headers
        )
        is_stored = not any(name in headers for name in _NOT_STORED) and not (
            request and "X-Open-Expired" in request.headers
        )
        location = headers.get(_LINK)
        return cls(
            etag=bare_etag(headers.get("Etag", "")),
            length_bytes=response.content_length,
            is_manifest=is_manifest,
            policy_index=int(policy) if policy else None,
            is_plain=is_stored and not is_manifest and not location,
            is_static_manifest=is_stored
            and not location
            and "X-Static-Large-Object" in headers,
            link_target=_link_target(location)
            if is_stored and not is_manifest and location
            else None,
        )


def _link_target(location: str) -> str | None:
    """``/account/container/object`` in a path of an object, else None."""
    parts = unquote(location).split("/", 4)
    if "?" in location or len(parts) != 5 or not all(parts[2:]):
        return None
    return "/" + "/".join(parts[2:])


def bare_etag(value: str) -> str:
    """An ETag without quotes and ``W/`` (etag-quoter adds them)."""
    return value.strip().removeprefix("W/").strip('"')


@dataclass(eq=False)
class ObjectBody:
    """The bytes of one object, for instance of a GET; can be iterated once.

    The last bytes come only if all together have the right digest.

    Args:
        chunks: the bytes as they come; closed with the body.
        length_bytes: their number.
        name: ``/account/container/object``.
        md5: MD5 that the bytes must have; None if it is not known.

    Raises:
        UnavailableError: while iterating, if the answer has another length
            than announced or breaks off; ``source_damaged`` if it has
            another digest.
    """

    chunks: Iterable[bytes]
    length_bytes: int
    name: str
    md5: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        missing = self.length_bytes
        digest = hashlib.md5(usedforsecurity=False)
        held = b""
        try:
            for chunk in self.chunks:
                missing -= len(chunk)
                if missing < 0:
                    break
                if self.md5:
                    digest.update(chunk)
                if self.md5 and not missing:
                    # Read on to the end: only then does an object server
                    # put a damaged file aside.
                    held += chunk
                elif chunk:
                    yield chunk
        except (Exception, Timeout) as error:
            raise self._incomplete(str(error)) from error
        if missing:
            raise self._incomplete(f"{missing} bytes are missing")
        if self.md5:
            check_md5(self.name, digest.hexdigest(), self.md5)
        if held:
            yield held

    def close(self) -> None:
        close_if_possible(self.chunks)

    def _incomplete(self, reason: str) -> UnavailableError:
        return _unavailable(
            self.name,
            f"{self.name} could not be read to its end: {reason}",
        )


def _unavailable(name: str, message: str) -> UnavailableError:
    return UnavailableError(
        "service_unavailable",
        message,
        object_name=name,
        retry_after=_RETRY_SECONDS,
    )


@dataclass(eq=False, repr=False)
class Source:
    """The object that the client's own request names."""

    app: Any
    env: Env
    name: str

    def head(self, wanted_etag: str | None = None) -> ObjectHead:
        """Reads the object's headers with the client's rights.

        Args:
            wanted_etag: ETag of the version that the client names.  If another
                one is found, all replicas are asked: after each restart of an
                object server some are stale, until the replicator has passed.

        Raises:
            SwiftAnswerError: Swift's answer to the client's plain request,
                if that fails.
            UnavailableError: only the filter's own HEAD fails.
        """
        head = self._head({})
        if wanted_etag not in (None, head.etag):
            head = self._head(_NEWEST)
        return head

    def _head(self, headers: Mapping[str, str]) -> ObjectHead:
        request = source_request(self.env, "HEAD", headers)
        response = request.get_response(self.app)
        drain_and_close(response)
        if not response.is_success:
            raise self._plain_answer(response)
        save_cors_headers(self.env, response.headers)
        return ObjectHead.from_response(response, request)

    def _plain_answer(self, head: Response) -> SwiftAnswerError | HapiError:
        # Decided first: the request below may change the environment.
        reason = self._why_only_head_fails(head)
        # The client's own request, without its annotation.
        response = Request(self.env).get_response(self.app)
        if response.status_int >= 400:
            return SwiftAnswerError(response)
        close_if_possible(response.app_iter)
        return _unavailable(self.name, f"{self.name}: {reason}")

    def _why_only_head_fails(self, head: Response) -> str:
        if head.status_int == 404:
            return "it was created during this request; retry"
        text = f"Swift answers {head.status} to the filter's own HEAD of it"
        if head.status_int in (401, 403) and "swift.authorize" not in self.env:
            return (
                f"{text}, and allows the request itself: the filter must be "
                "right of the authentication in the pipeline"
            )
        return f"{text}, and then allows the request itself; retry"

    def open(self, head: ObjectHead, part: ByteRange | None) -> ObjectBody:
        """Opens the bytes of the version that ``head`` describes.

        Args:
            head: result of :meth:`head`.
            part: the range to read; None for the whole object.

        Raises:
            SourceChangedError: a range was given and the object changed.
            UnavailableError: the object changed since ``head``.
            SwiftAnswerError: Swift refuses the GET.
        """
        headers = {}
        if part:
            headers = {"Range": str(part), "If-Match": f'"{head.etag}"'}
        try:
            return self._open(head, part, headers)
        except (SourceChangedError, UnavailableError):
            # The replica that answered may be stale.
            return self._open(head, part, {**headers, **_NEWEST})

    def _open(
        self,
        head: ObjectHead,
        part: ByteRange | None,
        headers: Mapping[str, str],
    ) -> ObjectBody:
        request = source_request(self.env, "GET", headers)
        response = request.get_response(self.app)
        expected = part.length_bytes if part else head.length_bytes
        try:
            self._check(response, head, part, expected)
        except HapiError:
            close_if_possible(response.app_iter)
            raise
        md5 = None if part else head.md5
        return ObjectBody(response.app_iter, expected or 0, self.name, md5)

    def _check(
        self,
        response: Response,
        head: ObjectHead,
        part: ByteRange | None,
        expected: int | None,
    ) -> None:
        status = response.status_int
        if status == 412 and part:
            raise source_changed_error(self.name, head.etag, None)
        if not response.is_success:
            raise SwiftAnswerError(response)
        etag = bare_etag(response.headers.get("Etag", ""))
        length = response.content_length
        if (status, etag, length) != (
            206 if part else 200,
            head.etag,
            expected,
        ):
            raise _unavailable(
                self.name,
                f"{self.name} changed while it was being read (status "
                f"{status}, ETag {etag}, {length} bytes); retry",
            )


def source_changed_error(
    name: str, expected_etag: str, etag: str | None
) -> SourceChangedError:
    """The error for an object that is not the version the client named."""
    now = f"it is now {etag}" if etag else "it has another one now"
    return SourceChangedError(
        "source_changed",
        f"{name} no longer has the ETag {expected_etag}: {now}; renew the "
        "index",
        object_name=name,
        details={"wanted_etag": expected_etag, "found_etag": etag},
    )


def source_length_for_job(
    name: str, head: ObjectHead, part: ByteRange | None, max_bytes: int
) -> int:
    """Number of bytes of the source that the worker will be sent.

    Args:
        name: ``/account/container/object``.
        head: facts about the source.
        part: requested range; None for the whole object.
        max_bytes: the filter's ``max_object_bytes``.

    Raises:
        UnsupportedError: the object's length or ETag is unknown.
        AnnotationError: ``bad_range``: beyond the object's end.
        TooLargeError: ``object_too_large``.
    """
    if head.length_bytes is None or not head.etag:
        raise UnsupportedError(
            "unsupported_object",
            f"{name} has no length or no ETag (a dynamic large object of too "
            "many segments); store it as a static large object",
            object_name=name,
        )
    if part and part.last >= head.length_bytes:
        raise make_error(
            "bad_range",
            f"{part} is beyond the {head.length_bytes} bytes of {name}",
            object_name=name,
        )
    length = part.length_bytes if part else head.length_bytes
    if length > max_bytes:
        raise TooLargeError(
            "object_too_large",
            f"{name}: {length} bytes; at most {max_bytes} may be sent to "
            "the worker: request a part with X-Hapi-Range",
            object_name=name,
            details={"length_bytes": length, "max_object_bytes": max_bytes},
        )
    return length
