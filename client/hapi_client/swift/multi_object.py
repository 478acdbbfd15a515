"""Responses to requests for the features of many objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hapi_client.swift.response_body import ResponseBody
from hapi_client.swift.retry import RETRYABLE_STATUSES
from hapi_protocol.errors import TruncatedStreamError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import FeatureBatch, Row
from hapi_splitter.encodings import decode


@dataclass(frozen=True)
class ObjectFeatures:
    """The features, or the error, of one object of a request for many.

    Attributes:
        index: position in the request.
        name: requested name.
        status: status of Swift's GET; 413 if the object is too large to be
            read with others, 503 if the read broke off.
        etag: ETag; None if the object could not be read.
        features: float32, one sample; None if there is an error.
        error: ``<code>: <message>``, or None.
    """

    index: int
    name: str
    status: int
    etag: str | None
    features: torch.Tensor | None
    error: str | None

    @property
    def code(self) -> str | None:
        """Code of the error, such as ``not_found``."""
        return None if self.error is None else self.error.partition(":")[0]

    @property
    def is_retryable(self) -> bool:
        """True if the object failed and a new request may succeed."""
        return self.error is not None and self.status in RETRYABLE_STATUSES


def read_objects(
    body: ResponseBody, names: Sequence[str], encoding: str
) -> Iterator[ObjectFeatures]:
    """Yields the rows of a response in order, then closes ``body``.

    Raises:
        TruncatedStreamError: if it breaks off or has other names.
    """
    with body:
        num_rows = 0
        for batch in read_features(body):
            for row in _objects(batch, encoding):
                if num_rows == len(names) or (row.index, row.name) != (
                    num_rows,
                    names[num_rows],
                ):
                    raise _truncated(
                        body, f"row {num_rows} is {row.name!r:.100}"
                    )
                num_rows += 1
                yield row
        if num_rows < len(names):
            raise _truncated(body, f"it had {num_rows} rows")
        body.drain()


def _objects(batch: FeatureBatch, encoding: str) -> Iterator[ObjectFeatures]:
    decoded = iter(())
    if batch.features is not None:
        decoded = iter(
            decode(batch.features, encoding, batch.scale, batch.zero)
        )
    for row in batch.rows:
        found = object_status(row)
        features = next(decoded) if row.error is None else None
        yield ObjectFeatures(
            row.index, row.key, found.status, found.etag, features, row.error
        )


@dataclass(frozen=True)
class ObjectStatus:
    """Status and ETag of the GET of one object."""

    status: int
    etag: str | None


def object_status(row: Row) -> ObjectStatus:
    """Reads the status of an object from its row.

    Raises:
        TruncatedStreamError: the row has none.
    """
    try:
        meta = json.loads(row.meta or "")
        return ObjectStatus(int(meta["status"]), meta["etag"])
    except (ValueError, KeyError, TypeError) as error:
        raise TruncatedStreamError(
            "truncated", f"row {row.index} has no status: {row.meta!r:.100}"
        ) from error


def _truncated(body: ResponseBody, problem: str) -> TruncatedStreamError:
    return TruncatedStreamError(
        "truncated",
        f"the response does not match the requested names: {problem}",
        trans_id=body.trans_id,
    )
