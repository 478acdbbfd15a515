"""Places of the bytes that a user reads, on object servers.

A plain object is stored under its own name.  The bytes of a symlink are those
of its target, and a part of a static large object may lie in one segment.
Target and segment are looked up with the caller's own rights.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from swift.common.utils import drain_and_close

from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.authorization import (
    is_delegated,
    object_request,
    source_request,
)
from hapi_middleware.requests.subrequests import ObjectHead
from hapi_protocol.headers import ByteRange

MAX_MANIFEST_BYTES = 8 * 1024**2
"""Default of Swift's ``max_manifest_size``."""
MAX_KEPT_SEGMENTS = 1000
"""Default of Swift's ``max_manifest_segments``; 1 MB of memory."""
MAX_KEPT = 16
"""At most 16 MB; more objects cost a GET of their manifest for each span."""
_MANIFESTS: OrderedDict[tuple[str, str], list[dict[str, Any]]] = OrderedDict()


@dataclass(frozen=True)
class StoredPart:
    """Bytes of a plain object.

    Attributes:
        name: ``/account/container/object``.
        policy_index: index of its storage policy.
        etag: its ETag.
        part: the bytes; None for all.
    """

    name: str
    policy_index: int
    etag: str
    part: ByteRange | None

    @classmethod
    def of_plain(
        cls, name: str, head: ObjectHead, part: ByteRange | None
    ) -> StoredPart | None:
        """Bytes of an object under its own name; None if it is not plain.

        Args:
            name: ``/account/container/object``.
            head: facts about it.
            part: the bytes; None for all.
        """
        if not head.is_plain or head.policy_index is None or "\x00" in name:
            return None
        return cls(name, head.policy_index, head.etag, part)


def find_elsewhere(
    app: Any, env: Env, name: str, head: ObjectHead, part: ByteRange | None
) -> StoredPart | None:
    """The plain object that has a source's bytes under another name.

    Args:
        app: the rest of the pipeline.
        env: WSGI environment of the client's request.
        name: ``/account/container/object`` of the source.
        head: facts about it.
        part: bytes of the source; None for all.

    Returns:
        None if there is no such object, or the caller may not read it.
    """
    if is_delegated(env):
        # The caller's right may end at the name that it was given for.
        return None
    etag = head.etag
    if head.link_target:
        location = head.link_target, part
    elif head.is_static_manifest and part is not None:
        manifest = _known_manifest(app, env, name, etag)
        segment = find_segment(manifest, etag, part)
        if segment is None:
            return None
        account = name.split("/", 2)[1]
        etag = segment.etag
        location = f"/{account}{segment.path}", segment.part
    else:
        return None
    stored_name, stored_part = location
    path = quote(f"/v1{stored_name}")
    request = object_request(env, path, "HEAD")
    response = request.get_response(app)
    drain_and_close(response)
    if not response.is_success:
        return None
    stored = ObjectHead.from_response(response, request)
    if stored.etag != etag:
        return None
    return StoredPart.of_plain(stored_name, stored, stored_part)


@dataclass(frozen=True)
class ObjectSegment:
    """A part of a static large object that lies in one segment.

    Attributes:
        path: ``/container/object`` of the segment.
        etag: its ETag.
        part: the bytes in it.
    """

    path: str
    etag: str
    part: ByteRange


def find_segment(
    manifest: Sequence[Mapping[str, Any]], etag: str, part: ByteRange
) -> ObjectSegment | None:
    """The segment in which a part of a static large object lies.

    Args:
        manifest: answer to ``?multipart-manifest=get``.
        etag: ETag of the large object.
        part: bytes of the large object.

    Returns:
        None if the part lies in several segments, in one that is itself a
        range or a large object, or the manifest is that of another ETag.
    """
    if any(segment.get("sub_slo") for segment in manifest):
        return None
    if manifest_etag(manifest) != etag:
        return None
    first = 0
    for segment in manifest:
        text, length = _text_and_length(segment)
        is_whole = "data" not in segment and not segment.get("range")
        if is_whole and first <= part.first and part.last < first + length:
            inner = ByteRange(part.first - first, part.last - first)
            return ObjectSegment(str(segment["name"]), text, inner)
        first += length
    return None


def manifest_etag(manifest: Iterable[Mapping[str, Any]]) -> str:
    """ETag of the large object, as Swift makes it of its segments."""
    texts = [_text_and_length(segment)[0] for segment in manifest]
    return _md5("".join(texts).encode())


def _text_and_length(segment: Mapping[str, Any]) -> tuple[str, int]:
    """Part of the ETag's text for a segment, and the segment's length."""
    if "data" in segment:
        data = base64.b64decode(segment["data"])
        return _md5(data), len(data)
    if segment.get("range"):
        start, _, end = str(segment["range"]).partition("-")
        text = f"{segment['hash']}:{segment['range']};"
        return text, int(end) - int(start) + 1
    return str(segment["hash"]), int(segment["bytes"])


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _known_manifest(
    app: Any, env: Env, name: str, etag: str
) -> Sequence[Mapping[str, Any]]:
    """The segments of the client's object, which it may read.

    Each span of an epoch asks for them.  One ETag stands for the same lengths
    and ETags of segments; who may read a segment is asked each time.
    """
    key = name, etag
    manifest = _MANIFESTS.get(key)
    if manifest is None:
        manifest = _read_manifest(app, env)
        is_right = manifest_etag(manifest) == etag
        # Data in a manifest may be megabytes.
        is_small = len(manifest) <= MAX_KEPT_SEGMENTS and not any(
            "data" in segment for segment in manifest
        )
        if is_right and is_small:
            _MANIFESTS[key] = manifest
            while len(_MANIFESTS) > MAX_KEPT:
                _MANIFESTS.popitem(last=False)
    return manifest


def _read_manifest(app: Any, env: Env) -> list[dict[str, Any]]:
    """The segments of the client's object; empty if they cannot be read."""
    request = source_request(env, "GET")
    request.environ["QUERY_STRING"] = "multipart-manifest=get"
    response = request.get_response(app)
    length = response.content_length
    if (
        not response.is_success
        or "X-Static-Large-Object" not in response.headers
        or length is None
        or length > MAX_MANIFEST_BYTES
    ):
        drain_and_close(response)
        return []
    return list(json.loads(response.body))
