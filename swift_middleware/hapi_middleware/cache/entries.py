"""Entries of the feature cache: names, contents, and requests for them.

An entry is an object in the reserved namespace of the source's account, which
clients cannot see (object versioning stores old versions there as well).
Only this module makes pre-authorised requests, for entries alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from swift.common.request_helpers import get_reserved_name
from swift.common.swob import Request
from swift.common.wsgi import make_pre_authed_request

from hapi_middleware.requests.authorization import SWIFT_SOURCE

CONTAINER = get_reserved_name("hapi", "features")
"""Container of the entries in each account."""
CONTENT_TYPE = "application/vnd.hapi.features"
MAX_NAME_BYTES = 1024
"""Maximum length of an entry's name; Swift's own limit may be higher."""

_MAGIC = b"hapi-features 1\n"
MAX_HEADER_BYTES = 4096
"""A header has a key, a length and a digest: some 200 bytes."""


def entry_name(container: str, name: str, key: str) -> str:
    """The object name of an entry; it may be too long.

    Args:
        container: container of the source.
        name: object name of the source.
        key: key of the entry, see
            :func:`hapi_protocol.feature_identity.cache_key`.
    """
    return str(get_reserved_name(container, name, key))


@dataclass(frozen=True, repr=False)
class Entry:
    """An entry that a request may read or store.

    Attributes:
        env: WSGI environment of the client's request.
        account: account of the source.
        name: name of the entry.
        key: key of the entry.
    """

    env: Mapping[str, Any]
    account: str
    name: str
    key: str

    def request(
        self,
        method: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Request:
        """A pre-authorised request for the entry."""
        return private_request(
            self.env,
            method,
            self.account,
            self.name,
            headers=headers,
            body=body,
        )


def entry_prefix(container: str, name: str) -> str:
    """The common prefix of the names of all entries of a source.

    Args:
        container: container of the sources; empty for all.
        name: object name of the source; empty for all in the container; a
            prefix of object names if it ends in a slash.
    """
    if not container:
        return ""
    if name.endswith("/"):
        return str(get_reserved_name(container, name))
    parts = (container, name, "") if name else (container, "")
    return str(get_reserved_name(*parts))


def private_request(
    env: Mapping[str, Any],
    method: str,
    account: str,
    name: str | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    query: str = "",
    body: bytes = b"",
) -> Request:
    """A pre-authorised request for an entry or for their container.

    Args:
        env: WSGI environment of the client's request.
        method: HTTP method.
        account: account of the source.
        name: name of the entry; None for the container.
        headers: additional headers.
        query: URL-encoded query.
        body: body of the request.
    """
    path = f"/v1/{quote(account)}/{quote(CONTAINER)}"
    if name is not None:
        path += f"/{quote(name)}"
    request = make_pre_authed_request(
        env,
        method=method,
        path=path,
        headers={"X-Backend-Allow-Reserved-Names": "true", **(headers or {})},
        body=body or None,
        swift_source=SWIFT_SOURCE,
    )
    # make_subrequest() repeats the client's query if the path has none.
    request.environ["QUERY_STRING"] = query
    return request


def pack(key: str, pieces: Sequence[bytes]) -> bytes:
    """The content of an entry.

    Args:
        key: key of the entry.
        pieces: the features, in pieces.
    """
    header = json.dumps(_header_fields(key, pieces)).encode()
    return b"".join((_MAGIC, header, b"\n", *pieces))


class DamagedEntryError(Exception):
    """The content of an entry is not what was stored."""


def unpack(key: str, chunks: Iterable[bytes], max_bytes: int) -> memoryview:
    """The features of an entry, after a check of the whole content.

    Args:
        key: key of the entry.
        chunks: the content, as stored.
        max_bytes: maximum length of the content.

    Raises:
        DamagedEntryError: names the damage.
    """
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > max_bytes:
            raise DamagedEntryError(f"it has more than {max_bytes} bytes")
    end = content.find(b"\n", len(_MAGIC), MAX_HEADER_BYTES)
    if not content.startswith(_MAGIC) or end < 0:
        raise DamagedEntryError("it does not begin with an entry's header")
    try:
        stored = json.loads(content[len(_MAGIC) : end])
    except ValueError as error:
        raise DamagedEntryError(f"its header: {error}") from error
    features = memoryview(content)[end + 1 :]
    actual = _header_fields(key, [features])
    if stored != actual:
        raise DamagedEntryError(
            f"its header is {stored!r:.300}; expected {actual}"
        )
    return features


def _header_fields(
    key: str, pieces: Sequence[bytes | memoryview]
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return {
        "key": key,
        "length_bytes": sum(map(len, pieces)),
        "sha256": digest.hexdigest(),
    }
