"""A Swift account over HTTP: containers and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import urlencode

from hapi_client.swift.account_session import AccountSession, headers_of
from hapi_client.swift.http_client import RequestBody
from hapi_client.swift.read_errors import unreadable
from hapi_client.swift.response_body import ResponseBody
from hapi_protocol.errors import ClientError, HapiError, NotFoundError
from hapi_protocol.headers import ByteRange

LIST_LIMIT = 10_000
LAST_PART_RATIO = 8
"""Length of a range divided by that of its last part. For ranges that take
half a second or more, the last part takes longer than one more request."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object as a listing or HEAD describes it.

    Attributes:
        name: name of the object.
        etag: its ETag, without quotes.
        length_bytes: its length.
        stored: time of upload as in Swift's listings (UTC); empty after a
            HEAD.
    """

    name: str
    etag: str
    length_bytes: int
    stored: str = field(default="", compare=False)


@dataclass(frozen=True)
class ContainerInfo:
    """A container as the account's listing describes it."""

    name: str
    num_objects: int
    length_bytes: int


class SwiftAccount(AccountSession):
    """One user's access to the containers and objects of an account.

    Arguments, attributes and errors are those of :class:`AccountSession`.
    """

    def put_container(
        self, container: str, read_acl: str | None = None
    ) -> None:
        """Creates the container unless it exists.

        Args:
            container: name of the container.
            read_acl: its new ``X-Container-Read``; None to set none.
        """
        headers = {} if read_acl is None else {"X-Container-Read": read_acl}
        url = self._url(container)
        headers_of(self._open("PUT", url, headers, object_name=container))

    def read_acl(self, container: str) -> str | None:
        """Returns the ``X-Container-Read`` of a container of one's own.

        It is empty without one, and None if the container does not exist.
        """
        try:
            headers = headers_of(
                self._open("HEAD", self._url(container), object_name=container)
            )
        except NotFoundError:
            return None
        return headers.get("X-Container-Read", "")

    def list(self, container: str, prefix: str = "") -> Iterator[ObjectInfo]:
        """Lists the objects whose name begins with ``prefix``, by name."""
        try:
            for entry in self._entries(container, prefix):
                # An SLO's listing has its manifest's hash in "hash".
                etag = entry.get("slo_etag") or entry["hash"]
                yield ObjectInfo(
                    entry["name"],
                    etag.strip('"'),
                    int(entry["bytes"]),
                    entry.get("last_modified", ""),
                )
        except NotFoundError as error:
            error.message = f"there is no container {container!r}"
            raise

    def containers(self) -> Iterator[ContainerInfo]:
        """Lists the containers of the account, by name."""
        for entry in self._entries(""):
            yield ContainerInfo(
                entry["name"], int(entry["count"]), int(entry["bytes"])
            )

    def _entries(
        self, container: str, prefix: str = ""
    ) -> Iterator[dict[str, Any]]:
        """Lists a container; ``""`` lists the account's containers."""
        base_url = self._url(container) if container else self.storage_url
        name = container or f"account {self.account}"
        marker = ""
        while True:
            query = urlencode(
                {
                    "format": "json",
                    "limit": LIST_LIMIT,
                    "prefix": prefix,
                    "marker": marker,
                }
            )
            url = f"{base_url}?{query}"
            with self._open("GET", url, object_name=name) as body:
                page = [] if body.status == 204 else body.read_json(list)
            yield from page
            if len(page) < LIST_LIMIT:
                return
            marker = page[-1]["name"]

    def head(
        self,
        container: str,
        name: str,
        *,
        account: str | None = None,
        seconds: float | None = None,
    ) -> ObjectInfo | None:
        """Returns an object's ETag and length; None if it does not exist.

        Args:
            container: container of the object.
            name: name of the object.
            account: account of the container; None for :attr:`account`.
            seconds: deadline of a single attempt; None for the default
                deadline with retries.
        """
        try:
            headers = headers_of(
                self._open_object(
                    "HEAD",
                    container,
                    name,
                    account=account,
                    seconds=seconds,
                    read_seconds=seconds,
                    retry=seconds is None,
                )
            )
        except NotFoundError:
            return None
        return ObjectInfo(
            name,
            headers.get("ETag", "").strip('"'),
            int(headers.get("Content-Length", 0)),
        )

    def open(
        self, container: str, name: str, *, seconds: float | None = None
    ) -> ResponseBody:
        """Opens the whole object as a stream, which the caller closes."""
        return self._open_object("GET", container, name, seconds=seconds)

    def get_object(
        self,
        container: str,
        name: str,
        *,
        if_match: str | None = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        seconds: float | None = None,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
        ending: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Reads a whole object, see :meth:`ResponseBody.read_whole`.

        Args:
            container: container of the object.
            name: name of the object.
            if_match: ETag of the version, without quotes; None for any.
            headers: further headers, such as ``X-Newest``.
            query: parameters of the URL, such as ``multipart-manifest``.
            seconds: see :meth:`get_range` for this and all others.
            reading: makes a context.
            ending: called at the end.

        Raises:
            SourceChangedError: if the object has another ETag by now.
            TruncatedStreamError: if the connection breaks.
            UnavailableError: ``source_damaged``: its bytes are not those of
                its ETag.
        """
        with self._open_version(
            container, name, if_match, headers or {}, seconds, query
        ) as body:
            with reading():
                data = body.read_whole()
            ending()
            return data

    def get_range(
        self,
        container: str,
        name: str,
        byte_range: ByteRange,
        *,
        if_match: str,
        seconds: float | None = None,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
        ending: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Reads a range of bytes of one version of an object.

        Args:
            container: container of the object.
            name: name of the object.
            byte_range: first and last byte.
            if_match: ETag of the version, without quotes.
            seconds: deadline of the whole response.
            reading: makes a context that is entered while the body arrives.
            ending: called when only the last eighth is still to come.

        Raises:
            SourceChangedError: if the object has another ETag by now.
            TruncatedStreamError: if the connection breaks.
        """
        with (
            self.open_range(
                container, name, byte_range, if_match=if_match, seconds=seconds
            ) as body,
            reading(),
        ):
            last_bytes = byte_range.length_bytes // LAST_PART_RATIO
            first = body.read(byte_range.length_bytes - last_bytes)
            ending()
            return first + body.read(last_bytes)

    def open_range(
        self,
        container: str,
        name: str,
        byte_range: ByteRange,
        *,
        if_match: str,
        seconds: float | None = None,
    ) -> ResponseBody:
        """Opens a range of one version of an object, as :meth:`open`."""
        headers = {"Range": str(byte_range)}
        body = self._open_version(container, name, if_match, headers, seconds)
        if body.status != 206:
            with body:
                raise ClientError(
                    "bad_configuration",
                    f"{container}/{name}: a request for {byte_range} returned "
                    f"status {body.status} instead of 206; a gateway on the "
                    "path drops the Range header",
                )
        return body

    def _open_version(
        self,
        container: str,
        name: str,
        etag: str | None,
        headers: Mapping[str, str],
        seconds: float | None,
        query: Mapping[str, str] | None = None,
    ) -> ResponseBody:
        if etag is not None:
            headers = {**headers, "If-Match": f'"{etag}"'}
        try:
            return self._open_object(
                "GET", container, name, headers, query=query, seconds=seconds
            )
        except HapiError as error:
            if etag is None:
                raise
            raise unreadable(error, container, name) from error

    def put(
        self,
        container: str,
        name: str,
        source: BinaryIO,
        length_bytes: int,
        *,
        md5: str | None = None,
        content_type: str = "application/octet-stream",
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> str:
        """Stores an object and returns its ETag.

        Args:
            container: container of the object.
            name: name of the object.
            source: seekable file, read from its current position; a repeated
                request starts there again.
            length_bytes: number of bytes to send.
            md5: hex digest that Swift checks (422 if it differs).
            content_type: type of the object.
            headers: further headers, such as ``If-None-Match``.
            query: parameters of the URL, such as ``multipart-manifest``.
        """
        sent = {
            **(headers or {}),
            "Content-Type": content_type,
            "Content-Length": str(length_bytes),
        }
        if md5 is not None:
            sent["ETag"] = md5
        body = RequestBody(source, length_bytes, self.traffic)
        response = headers_of(
            self._open_object(
                "PUT", container, name, sent, query=query, source=body
            )
        )
        return response.get("ETag", "").strip('"')

    def delete(
        self,
        container: str,
        name: str,
        *,
        query: Mapping[str, str] | None = None,
    ) -> None:
        """Deletes an object; with ``multipart-manifest``, its segments too."""
        headers_of(self._open_object("DELETE", container, name, query=query))
