"""Entries of the feature cache: their names, their content, requests for them.

An entry is an object in the reserved namespace of the source's account, where
no client sees it (as object versioning keeps old versions).  This is the only
module that makes pre-authorised requests, and they name nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from swift.common.request_helpers import get_reserved_name
from swift.common.swob import Request
from swift.common.wsgi import make_pre_authed_request

from hapi_middleware.requests.authorization import SWIFT_SOURCE

CONTAINER = get_reserved_name("hapi", "features")
"""Of every account that has entries."""
CONTENT_TYPE = "application/vnd.hapi.features"
MAX_NAME_BYTES = 1024
"""Of an object; an operator may allow Swift's users more."""

_MAGIC = b"hapi-features 1\n"
MAX_HEADER_BYTES = 4096


def entry_name(container: str, name: str, key: str) -> str:
    """The object's name of an entry; it may be too long.

    Args:
        container: of the source.
        name: of the source.
        key: of the entry, see :func:`hapi_protocol.headers.cache_key`.
    """
    return str(get_reserved_name(container, name, key))


def entry_prefix(container: str, name: str) -> str:
    """What the names of all entries of a source begin with.

    Args:
        container: of the sources; empty for all.
        name: of the source; empty for all of the container, and for all
            whose names begin with it where it ends in a slash.
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
    """A pre-authorised request for the container of entries, or for one.

    Args:
        name: of the entry; None for the container.
        query: URL-encoded.
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
    # make_subrequest() repeats the client's query where there is none.
    request.environ["QUERY_STRING"] = query
    return request


def pack(key: str, pieces: Sequence[bytes]) -> bytes:
    """An entry's content.

    Args:
        pieces: the features, joined.
    """
    header = json.dumps(_facts(key, pieces)).encode()
    return b"".join((_MAGIC, header, b"\n", *pieces))


class DamagedEntryError(Exception):
    """An entry is not what was stored."""


def unpack(key: str, chunks: Iterable[bytes], max_bytes: int) -> memoryview:
    """The features that :func:`pack` was given, all of them checked.

    Args:
        chunks: of the content.
        max_bytes: no content is longer.

    Raises:
        DamagedEntryError: saying what is wrong.
    """
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > max_bytes:
            raise DamagedEntryError(f"it has more than {max_bytes} bytes")
    end = content.find(b"\n", len(_MAGIC), MAX_HEADER_BYTES)
    if not content.startswith(_MAGIC) or end < 0:
        raise DamagedEntryError("it does not begin as an entry does")
    try:
        told = json.loads(content[len(_MAGIC) : end])
    except ValueError as error:
        raise DamagedEntryError(f"its header: {error}") from error
    features = memoryview(content)[end + 1 :]
    found = _facts(key, [features])
    if told != found:
        raise DamagedEntryError(f"it says {told!r:.300}, and has {found}")
    return features


def _facts(key: str, pieces: Sequence[bytes | memoryview]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return {
        "key": key,
        "length_bytes": sum(map(len, pieces)),
        "sha256": digest.hexdigest(),
    }
