"""A Swift account over HTTP: authentication, containers, objects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import (
    ConnectionOptions,
    HttpClient,
    RequestBody,
)
from hapi_client.swift.response_body import ResponseBody
from hapi_client.swift.traffic_counters import Traffic
from hapi_client.swift.transport import CancelScope
from hapi_protocol.errors import ClientError, RightsError, SourceChangedError
from hapi_protocol.headers import ByteRange, ModelPath

LIST_LIMIT = 10_000
ENDING_PARTS = 8
"""Of a range: the last one of so many comes for longer than it takes to ask
for another range, where that one takes half a second and more."""

T = TypeVar("T", bound="SwiftAccount")


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing or HEAD says of an object; ``etag`` unquoted.

    Attributes:
        stored: when, as in Swift's listings (UTC); a HEAD does not say.
    """

    name: str
    etag: str
    length_bytes: int
    stored: str = field(default="", compare=False)


@dataclass(frozen=True)
class ContainerInfo:
    """What the listing of an account says of a container."""

    name: str
    num_objects: int
    length_bytes: int


class SwiftAccount:
    """One user's access to one account; shared by threads and forks.

    A forked child builds its own sockets on first use.

    Args:
        credentials: None reads the environment, as ``swift`` does.
        options: bounds of every wait.

    Attributes:
        credentials: as given, or found.
        options: likewise.

    Raises:
        HapiError: from every method; with status, code, object name and
            ``X-Trans-Id`` where Swift gave them.
    """

    def __init__(
        self,
        credentials: Credentials | None = None,
        options: ConnectionOptions | None = None,
    ) -> None:
        self.credentials = credentials or Credentials.from_environment(
            os.environ
        )
        self.options = options or ConnectionOptions()
        self._http = HttpClient(self.credentials, self.options)

    @property
    def traffic(self) -> Traffic:
        return self._http.traffic

    @property
    def storage_url(self) -> str:
        """``https://host/v1/account``, without a slash at the end."""
        return self._http.auth.storage_url()

    @property
    def account(self) -> str:
        return self.storage_url.rpartition("/")[2]

    def model_path(self, container: str, name: str) -> ModelPath:
        return ModelPath(self.account, container, name)

    def close(self) -> None:
        """Closes all sockets; the next use opens new ones."""
        self._http.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def working_for(self, scope: CancelScope) -> Iterator[None]:
        """Requests of this thread end when ``scope`` is cancelled."""
        with self._http.owners.working_for(scope):
            yield

    def cancel(self, scope: CancelScope) -> None:
        """Ends all requests made for ``scope``, now and later."""
        self._http.owners.cancel(scope)

    # -- the cluster -------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What ``/info`` of the proxy says."""
        with self._open_info() as body:
            return body.read_json(dict)

    def _open_info(self) -> ResponseBody:
        parts = urlsplit(self.storage_url)
        url = f"{parts.scheme}://{parts.netloc}/info"
        return self._open("GET", url, object_name="/info")

    def log_in(self) -> None:
        """Gets a token unless there is one."""
        self._http.auth.token()

    def head_account(self) -> Mapping[str, str]:
        """The headers of the account's HEAD."""
        what = f"account {self.account}"
        return self._done("HEAD", self.storage_url, object_name=what)

    def account_request(
        self, method: str, query: Mapping[str, str]
    ) -> dict[str, Any]:
        """The JSON that a request of the account itself is answered with."""
        url = f"{self.storage_url}?{urlencode(query)}"
        what = f"?{next(iter(query), '')}"
        with self._open(method, url, object_name=what) as body:
            return body.read_json(dict)

    # -- containers --------------------------------------------------

    def put_container(self, container: str) -> None:
        """Makes the container unless it is there."""
        self._done("PUT", self._url(container), object_name=container)

    def list(self, container: str, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose name begins with ``prefix``, in name order."""
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
        except RightsError as error:
            if error.status == 404:
                error.message = f"there is no container {container!r}"
            raise

    def containers(self) -> Iterator[ContainerInfo]:
        """All containers of the account, in name order."""
        for entry in self._entries(""):
            yield ContainerInfo(
                entry["name"], int(entry["count"]), int(entry["bytes"])
            )

    def _entries(
        self, container: str, prefix: str = ""
    ) -> Iterator[dict[str, Any]]:
        """Of a container's listing, or of the account's."""
        where = self._url(container) if container else self.storage_url
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
            url = f"{where}?{query}"
            with self._open("GET", url, object_name=name) as body:
                page = [] if body.status == 204 else body.read_json(list)
            yield from page
            if len(page) < LIST_LIMIT:
                return
            marker = page[-1]["name"]

    # -- objects -----------------------------------------------------

    def head(self, container: str, name: str) -> ObjectInfo | None:
        """The object's ETag and length; None where there is none."""
        try:
            headers = self._done(
                "HEAD",
                self._url(container, name),
                object_name=f"{container}/{name}",
            )
        except RightsError as error:
            if error.status == 404:
                return None
            raise
        return ObjectInfo(
            name,
            headers.get("ETag", "").strip('"'),
            int(headers.get("Content-Length", 0)),
        )

    def open(
        self, container: str, name: str, *, seconds: float | None = None
    ) -> ResponseBody:
        """The whole object as a stream; to be closed by the caller."""
        return self._open(
            "GET",
            self._url(container, name),
            object_name=f"{container}/{name}",
            seconds=seconds,
        )

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
        """Bytes of one version of an object.

        Args:
            byte_range: first and last byte.
            if_match: ETag of the version, without quotes.
            seconds: for the whole answer.
            reading: entered while the body comes.
            ending: called when the last eighth of it is still to come.

        Raises:
            SourceChangedError: when the object has another ETag by now.
            TruncatedStreamError: when the connection broke meanwhile.
        """
        headers = {"Range": str(byte_range), "If-Match": f'"{if_match}"'}
        try:
            body = self._open(
                "GET",
                self._url(container, name),
                headers,
                object_name=f"{container}/{name}",
                seconds=seconds,
            )
        except SourceChangedError as error:
            raise source_changed(container, name, error.trans_id) from error
        with body:
            if body.status != 206:
                raise ClientError(
                    "bad_configuration",
                    f"{container}/{name}: asked for {byte_range} and got "
                    f"status {body.status}; a gateway between drops Range",
                    object_name=f"{container}/{name}",
                )
            with reading():
                last_bytes = byte_range.length_bytes // ENDING_PARTS
                first = body.read(byte_range.length_bytes - last_bytes)
                ending()
                return first + body.read(last_bytes)

    def put(
        self,
        container: str,
        name: str,
        source: BinaryIO,
        length_bytes: int,
        *,
        md5: str | None = None,
        content_type: str = "application/octet-stream",
        expires_seconds: int | None = None,
    ) -> str:
        """Stores an object and returns its ETag.

        Args:
            source: seekable; read from where it stands, again from there
                when the request is repeated.
            length_bytes: as many are sent.
            md5: hex digest that Swift checks (422 when it differs).
            expires_seconds: after which Swift deletes the object.
        """
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(length_bytes),
        }
        if md5 is not None:
            headers["ETag"] = md5
        if expires_seconds is not None:
            headers["X-Delete-After"] = str(expires_seconds)
        answer = self._done(
            "PUT",
            self._url(container, name),
            headers,
            source=RequestBody(source, length_bytes, self.traffic),
            object_name=f"{container}/{name}",
        )
        return answer.get("ETag", "").strip('"')

    def delete(self, container: str, name: str) -> None:
        self._done(
            "DELETE",
            self._url(container, name),
            object_name=f"{container}/{name}",
        )

    def _url(self, *parts: str) -> str:
        return self.storage_url + "".join("/" + quote(part) for part in parts)

    def _open(
        self, method: str, url: str, *args: Any, **kwargs: Any
    ) -> ResponseBody:
        return self._http.open(method, url, *args, **kwargs)

    def _done(
        self, method: str, url: str, *args: Any, **kwargs: Any
    ) -> Mapping[str, str]:
        """Makes a request, reads the answer to its end, gives headers."""
        with self._open(method, url, *args, **kwargs) as body:
            body.read()
            return body.headers


def source_changed(
    container: str, name: str, trans_id: str | None = None
) -> SourceChangedError:
    """The error for a shard that is not the one of the index."""
    return SourceChangedError(
        "source_changed",
        f"{container}/{name} has changed since its index was written; run "
        "'hapi index' on the data set",
        object_name=f"{container}/{name}",
        trans_id=trans_id,
    )
