"""Features of many objects, by one request."""

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from hapi_client import Connection
from hapi_protocol.feature_reader import read_features
from hapi_protocol.headers import Annotation
from hapi_splitter.encodings import decode


def get_many(
    connection: Connection,
    container: str,
    names: Sequence[str],
    annotation: Annotation,
) -> Iterator[SimpleNamespace]:
    """Yields name, status, etag, features, error and its code of each row."""
    with connection.open_many(container, names, annotation) as body:
        for batch in read_features(body):
            features = iter(())
            if batch.features is not None:
                features = iter(
                    decode(
                        batch.features,
                        annotation.encoding,
                        batch.scale,
                        batch.zero,
                    )
                )
            for row in batch.rows:
                good = row.error is None
                yield SimpleNamespace(
                    name=row.key,
                    error=row.error,
                    code=None if good else row.error.partition(":")[0],
                    features=next(features) if good else None,
                    **json.loads(row.meta),
                )
