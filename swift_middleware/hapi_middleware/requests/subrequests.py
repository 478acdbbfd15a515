"""Objects read by sub-requests: what their HEAD says, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swift.common.swob import Request, Response
from swift.common.utils import close_if_possible, drain_and_close

from hapi_middleware.concurrency import Timeout
from hapi_middleware.cors import note_verdict
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.authorization import (
    model_request,
    refusal,
    source_request,
)
from hapi_protocol.errors import (
    HapiError,
    PackageError,
    SourceChangedError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
    make_error,
)
from hapi_protocol.headers import ByteRange, ModelPath
from hapi_protocol.job_messages import ModelIdentity

MIN_PACKAGE_BYTES = 22
"""An empty zip archive: its end-of-central-directory record alone."""

_RETRY_SECONDS = 1.0


class SwiftAnswerError(Exception):
    """Swift's own answer, which goes to the client as it is."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


@dataclass(frozen=True)
class ObjectHead:
    """What the HEAD of a readable object says."""

    etag: str
    length_bytes: int | None
    is_manifest: bool

    @classmethod
    def from_response(cls, response: Response) -> ObjectHead:
        headers = response.headers
        return cls(
            etag=bare_etag(headers.get("Etag", "")),
            length_bytes=response.content_length,
            is_manifest="X-Static-Large-Object" in headers
            or "X-Object-Manifest" in headers,
        )


def bare_etag(value: str) -> str:
    """An ETag without quotes and weakness (etag-quoter adds them)."""
    return value.strip().removeprefix("W/").strip('"')


class ObjectBody:
    """The bytes of one GET answer, once, and no fewer than announced.

    Raises:
        UnavailableError: while iterating, when Swift cannot deliver all.
    """

    def __init__(self, response: Response, length_bytes: int, name: str):
        self.length_bytes = length_bytes
        self._response = response
        self._name = name

    def __iter__(self) -> Iterator[bytes]:
        left = self.length_bytes
        try:
            for chunk in self._response.app_iter:
                left -= len(chunk)
                if left < 0:
                    break
                if chunk:
                    yield chunk
        except (Exception, Timeout) as error:
            raise self._broken(str(error)) from error
        if left:
            raise self._broken(f"{left} bytes are missing")

    def close(self) -> None:
        close_if_possible(self._response.app_iter)

    def _broken(self, why: str) -> UnavailableError:
        return UnavailableError(
            "service_unavailable",
            f"{self._name} could not be read to its end: {why}",
            object_name=self._name,
            retry_after=_RETRY_SECONDS,
        )


class Source:
    """The object that the client's own request names."""

    def __init__(self, app: Any, env: Env, name: str) -> None:
        self._app = app
        self._env = env
        self._name = name

    def head(self) -> ObjectHead:
        """
        Raises:
            SwiftAnswerError: the client's plain request would fail, thus.
        """
        response = source_request(self._env, "HEAD").get_response(self._app)
        drain_and_close(response)
        if not response.is_success:
            raise self._plain_answer(response)
        note_verdict(self._env, response.headers)
        return ObjectHead.from_response(response)

    def _plain_answer(self, head: Response) -> SwiftAnswerError | HapiError:
        why = self._why_only_head_fails(head)
        # The client's own request, its annotation taken off.
        response = Request(self._env).get_response(self._app)
        if response.status_int >= 400:
            return SwiftAnswerError(response)
        close_if_possible(response.app_iter)
        return UnavailableError(
            "service_unavailable",
            f"{self._name}: {why}",
            object_name=self._name,
            retry_after=_RETRY_SECONDS,
        )

    def _why_only_head_fails(self, head: Response) -> str:
        if head.status_int == 404:
            return "it appeared while it was being read; repeat"
        text = f"Swift answers {head.status} to the filter's own HEAD of it"
        if (
            head.status_int in (401, 403)
            and "swift.authorize" not in self._env
        ):
            return (
                f"{text}, and grants the request itself: the filter must "
                "stand right of the authentication"
            )
        return f"{text}, and then grants the request itself; repeat"

    def open(self, head: ObjectHead, part: ByteRange | None) -> ObjectBody:
        """The bytes, of the version that ``head`` has seen.

        Raises:
            SourceChangedError: the client named a version; it is gone.
            UnavailableError: it changed since our own HEAD; repeat.
            SwiftAnswerError: Swift refuses the GET.
        """
        wanted = {}
        if part:
            wanted = {"Range": str(part), "If-Match": f'"{head.etag}"'}
        request = source_request(self._env, "GET", wanted)
        response = request.get_response(self._app)
        expected = part.length_bytes if part else head.length_bytes
        try:
            self._check(response, head, part, expected)
        except HapiError:
            close_if_possible(response.app_iter)
            raise
        return ObjectBody(response, expected or 0, self._name)

    def _check(
        self,
        response: Response,
        head: ObjectHead,
        part: ByteRange | None,
        expected: int | None,
    ) -> None:
        status = response.status_int
        if status == 412 and part:
            raise source_changed(self._name, head.etag, None)
        if not response.is_success:
            raise SwiftAnswerError(response)
        etag = bare_etag(response.headers.get("Etag", ""))
        found = response.content_length
        if (status, etag, found) != (
            206 if part else 200,
            head.etag,
            expected,
        ):
            raise UnavailableError(
                "service_unavailable",
                f"{self._name} changed while it was being read (status "
                f"{status}, ETag {etag}, {found} bytes); repeat",
                object_name=self._name,
                retry_after=_RETRY_SECONDS,
            )


def source_changed(
    name: str, wanted: str, found: str | None
) -> SourceChangedError:
    """The error for an object that is not the version that was named."""
    now = f"it is now {found}" if found else "it is another one now"
    return SourceChangedError(
        "source_changed",
        f"{name} no longer has the ETag {wanted}: {now}; renew the index",
        object_name=name,
        details={"wanted_etag": wanted, "found_etag": found},
    )


def job_length(
    name: str, head: ObjectHead, part: ByteRange | None, max_bytes: int
) -> int:
    """Bytes that the worker will be sent.

    Raises:
        UnsupportedError: the object's length or ETag is unknown.
        AnnotationError: ``bad_range``, beyond the object's end.
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
            f"{part} reaches beyond the {head.length_bytes} bytes of {name}",
            object_name=name,
        )
    length = part.length_bytes if part else head.length_bytes
    if length > max_bytes:
        raise TooLargeError(
            "object_too_large",
            f"{name}: {length} bytes; at most {max_bytes} may be sent to "
            "the worker: ask for a part by X-Hapi-Range",
            object_name=name,
            details={"length_bytes": length, "max_object_bytes": max_bytes},
        )
    return length


class Package:
    """The model package that an annotation names.

    Args:
        app: the rest of the pipeline.
        env: of the client's request.
        path: of the package.
        max_bytes: it may have.
        is_own: it is the object that the client's own request names, and
            is read with all that this request has been granted.
    """

    def __init__(
        self,
        app: Any,
        env: Env,
        path: ModelPath,
        max_bytes: int,
        *,
        is_own: bool = False,
    ) -> None:
        self._app = app
        self._env = env
        self._path = path
        self._url = f"/v1{path.quoted()}"
        self._max_bytes = max_bytes
        self._is_own = is_own
        self.name = f"/{path.account}/{path.container}/{path.object}"

    def identify(self) -> ModelIdentity:
        """Who the model is, once the caller has shown the right to GET it.

        Raises:
            RightsError: as Swift answers the caller's own GET.
            PackageError: a manifest, or too short to be a package.
            TooLargeError: ``package_too_large``.
        """
        response = self._ask("HEAD")
        drain_and_close(response)
        if not response.is_success:
            raise refusal(response.status_int, "model", self.name)
        return self.identity_by(ObjectHead.from_response(response))

    def open(self, identity: ModelIdentity) -> ObjectBody | None:
        """The package's bytes, or None when it is another version now.

        Raises:
            RightsError: the caller may no longer read it.
        """
        response = self._ask("GET")
        if not response.is_success:
            drain_and_close(response)
            raise refusal(response.status_int, "model", self.name)
        try:
            found = self.identity_by(ObjectHead.from_response(response))
        except HapiError:
            close_if_possible(response.app_iter)
            raise
        if found != identity:
            close_if_possible(response.app_iter)
            return None
        return ObjectBody(response, identity.length_bytes, self.name)

    def _ask(self, method: str) -> Response:
        if self._is_own:
            request = source_request(self._env, method)
        else:
            request = model_request(self._env, method, self._url)
        return request.get_response(self._app)

    def identity_by(self, head: ObjectHead) -> ModelIdentity:
        """Who the model is, by a HEAD that the caller had the right to.

        Raises:
            PackageError: a manifest, or too short to be a package.
            TooLargeError: ``package_too_large``.
        """
        if head.is_manifest:
            # The HEAD of a manifest authorises none of its segments.
            raise PackageError(
                "package_is_manifest",
                f"the model {self.name} is a large-object manifest; upload "
                "the package as one object",
                object_name=self.name,
            )
        length = head.length_bytes or 0
        if length < MIN_PACKAGE_BYTES or not head.etag:
            raise PackageError(
                "bad_package",
                f"the model {self.name} has {length} bytes and is no model "
                "package",
                object_name=self.name,
            )
        if length > self._max_bytes:
            raise TooLargeError(
                "package_too_large",
                f"the model {self.name} has {length} bytes; at most "
                f"{self._max_bytes} are allowed here",
                object_name=self.name,
                details={"max_package_bytes": self._max_bytes},
            )
        return ModelIdentity(
            account=self._path.account,
            container=self._path.container,
            object=self._path.object,
            etag=head.etag,
            length_bytes=length,
        )
