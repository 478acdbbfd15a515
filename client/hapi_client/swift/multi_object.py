"""Features of many objects of a container, asked for at once."""

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
    """One object of a request for many.

    Attributes:
        index: its place in the request.
        name: as asked for.
        status: of Swift's answer to its GET; 413 where it is too large to
            be read with others, 503 where it broke off.
        etag: None where it could not be read.
        features: float32, of one sample; None where there is an error.
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
        """The error's, as ``not_found``."""
        return None if self.error is None else self.error.partition(":")[0]

    @property
    def is_retryable(self) -> bool:
        """Whether it failed, and may succeed when it is asked for again."""
        return self.error is not None and self.status in RETRYABLE_STATUSES


def read_objects(
    body: ResponseBody, names: Sequence[str], encoding: str
) -> Iterator[ObjectFeatures]:
    """The rows of an answer, in order; ``body`` is closed behind them.

    Raises:
        TruncatedStreamError: it broke off, or is no answer to these names.
    """
    with body:
        num_rows = 0
        for batch in read_features(body):
            for found in _objects(batch, encoding):
                if num_rows == len(names) or (found.index, found.name) != (
                    num_rows,
                    names[num_rows],
                ):
                    raise _truncated(
                        body, f"row {num_rows} is {found.name!r:.100}"
                    )
                num_rows += 1
                yield found
        if num_rows < len(names):
            raise _truncated(body, f"it had {num_rows} rows")
        body.drain()


def _objects(batch: FeatureBatch, encoding: str) -> Iterator[ObjectFeatures]:
    good = iter(())
    if batch.features is not None:
        good = iter(decode(batch.features, encoding, batch.scale, batch.zero))
    for row in batch.rows:
        status, etag = _status(row)
        features = next(good) if row.error is None else None
        yield ObjectFeatures(
            row.index, row.key, status, etag, features, row.error
        )


def _status(row: Row) -> tuple[int, str | None]:
    try:
        meta = json.loads(row.meta or "")
        return int(meta["status"]), meta["etag"]
    except (ValueError, KeyError, TypeError) as error:
        raise TruncatedStreamError(
            "truncated", f"row {row.index} has no status: {row.meta!r:.100}"
        ) from error


def _truncated(body: ResponseBody, what: str) -> TruncatedStreamError:
    return TruncatedStreamError(
        "truncated",
        f"the answer is not that to the names asked for: {what}",
        trans_id=body.trans_id,
    )
