"""Requests for the features of a span of a shard, or of a group of objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hapi_client.swift.connection import Connection
from hapi_client.swift.read_errors import source_changed
from hapi_client.swift.response_body import ResponseBody
from hapi_client.swift.retry import RETRYABLE_STATUSES
from hapi_protocol.data_index import Span
from hapi_protocol.errors import TruncatedStreamError, UnavailableError
from hapi_protocol.feature_stream import Row
from hapi_protocol.headers import CACHE_OFF, Annotation, ModelPath
from hapi_protocol.transforms import Training, transform_text


@dataclass(frozen=True)
class FeatureRequestSpec:
    """Features that are requested from the store.

    Attributes:
        model: path of the package.
        cut: number of the cut, from 1 on.
        encoding: encoding of the features on the wire.
        shape: shape of one sample's features at the cut.
        cache: mode of the feature cache: ``off``, ``read`` or ``readwrite``.
    """

    model: ModelPath
    cut: int
    encoding: str
    shape: tuple[int, ...]
    cache: str = CACHE_OFF

    def annotation(
        self, span: Span, training: Training | None = None
    ) -> Annotation:
        computation = Annotation(
            model=self.model,
            cut=self.cut,
            encoding=self.encoding,
            transform=transform_text(training),
            span_samples=span.whole,
        )
        if span.is_group:
            return computation
        return replace(
            computation,
            samples=span.samples,
            byte_range=span.byte_range,
            crc32s=span.crc32s,
            if_source_etag=span.etag,
            cache=self.cache,
        )

    def open(
        self,
        connection: Connection,
        span: Span,
        training: Training | None = None,
        *,
        seconds: float,
    ) -> ResponseBody:
        """Opens the feature stream of a span; it is not retried."""
        annotation = self.annotation(span, training)
        if span.is_group:
            names = [row.key for row in span.rows]
            return connection.open_many(
                span.container, names, annotation, seconds=seconds
            )
        return connection.get_features(
            span.container,
            span.shard,
            annotation,
            retry=False,
            seconds=seconds,
        )


def check_objects(span: Span, rows: Sequence[Row]) -> None:
    """Checks that the objects of a group are those of the index.

    Raises:
        SourceChangedError: an object has another ETag by now, or none.
        UnavailableError: an object could not be read just now.
        TruncatedStreamError: a row has no status.
    """
    for expected, row in zip(span.rows, rows, strict=False):
        status, etag = _object_status(row)
        if status == 404 or etag not in (None, expected.etag):
            raise source_changed(span.container, expected.key, None)
        if status in RETRYABLE_STATUSES:
            raise UnavailableError(
                "worker_unavailable",
                f"{span.container}/{expected.key}: {row.error}",
                object_name=expected.key,
            )


def _object_status(row: Row) -> tuple[int, str | None]:
    """Returns the status and ETag of the GET of one object from its row.

    Raises:
        TruncatedStreamError: the row has none.
    """
    try:
        meta = json.loads(row.meta or "")
        return int(meta["status"]), meta["etag"]
    except (ValueError, KeyError, TypeError) as error:
        raise TruncatedStreamError(
            "truncated", f"row {row.index} has no status: {row.meta!r:.100}"
        ) from error
