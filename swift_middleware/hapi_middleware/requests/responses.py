"""Headers and bodies of the filter's answers."""

from __future__ import annotations

import http.client
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from swift.common.swob import Response

from hapi_protocol.errors import HapiError
from hapi_protocol.feature_identity import feature_etag
from hapi_protocol.headers import (
    CACHE_OFF,
    CONTENT_TYPE_STREAM,
    HEADER_CACHE,
    HEADER_SOURCE_ETAG,
    REQUEST_HEADERS,
    Annotation,
)

INDEX_NUMERICS = "index"

_S3_STATUS: Mapping[int, int] = MappingProxyType(
    {413: 400, 422: 400, 504: 503}
)
"""Statuses for S3 callers: s3api turns the original ones into an
InternalError, which S3 clients retry."""


def stream_etag(
    annotation: Annotation, source_etag: str, digest: str, numerics_tag: str
) -> str:
    """The weak ETag of a feature stream or an index.

    Args:
        annotation: annotation of the request.
        source_etag: ETag of the source, bare.
        digest: sha256 of the package; not used for an index.
        numerics_tag: numerics of the worker; not used for an index.
    """
    return feature_etag(
        source_etag=source_etag,
        model_digest="" if annotation.index else digest,
        cut=annotation.cut,
        transform=annotation.transform,
        encoding=annotation.encoding,
        samples=annotation.samples,
        numerics_tag=INDEX_NUMERICS if annotation.index else numerics_tag,
        span_samples=annotation.span_samples,
    )


def profile_etag(package_etag: str, digest: str, numerics_tag: str) -> str:
    """The weak ETag of a profile, equal for all hosts of one kind."""
    return feature_etag(
        source_etag=package_etag,
        model_digest=digest,
        cut=0,
        transform="profile",
        encoding="",
        samples=None,
        numerics_tag=numerics_tag,
    )


def profile_headers(package_etag: str, etag: str | None) -> dict[str, str]:
    """Headers of a profile; of the package's headers only the ETag."""
    headers = stream_headers(package_etag, etag)
    return headers | {"Content-Type": "application/json; charset=UTF-8"}


def stream_headers(
    source_etag: str, etag: str | None, cache: str = CACHE_OFF
) -> dict[str, str]:
    """Headers of a feature stream; of the source's headers only the ETag.

    Args:
        source_etag: ETag of the source, bare.
        etag: ETag of the features, if it is known.
        cache: one of :data:`hapi_protocol.headers.CACHE_STATES`.
    """
    headers = {
        "Content-Type": CONTENT_TYPE_STREAM,
        "Cache-Control": "private, no-store",
        "Vary": ", ".join(REQUEST_HEADERS),
        HEADER_SOURCE_ETAG: source_etag,
        HEADER_CACHE: cache,
    }
    return headers | ({"ETag": etag} if etag else {})


def multi_headers() -> dict[str, str]:
    """Headers of a stream of many objects, which has no ETag."""
    headers = stream_headers("", None)
    del headers[HEADER_SOURCE_ETAG]
    return headers


def is_match(if_none_match: str, etag: str) -> bool:
    """Compares a list of ETags with one, weakly (RFC 9110, 13.1.2)."""
    if if_none_match.strip() == "*":
        return True
    return _opaque(etag) in map(_opaque, if_none_match.split(","))


def _opaque(tag: str) -> str:
    # s3api gives its clients "W/..." instead of W/"...".
    return tag.replace('"', "").strip().removeprefix("W/")


@dataclass(frozen=True)
class HeadersOnly:
    """An answer without body and without a Content-Length.

    The length of a stream is unknown; swob would send 0.
    """

    status: str
    headers: Mapping[str, str]

    def __call__(
        self, env: Mapping[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        start_response(self.status, list(self.headers.items()))
        return iter((b"",))


def error_response(error: HapiError, is_s3: bool) -> Response:
    """The JSON answer for an error."""
    status = error.status
    if is_s3:
        status = _S3_STATUS.get(status, status)
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    return Response(
        # swob has no reason phrase for some (429).
        status=f"{status} {http.client.responses.get(status, 'Error')}",
        headers=headers,
        body=error.to_body(),
    )
