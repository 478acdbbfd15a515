"""Summary of a data set: samples, classes and kinds of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hapi_client.data.catalog import INDEX_STALE, INDEX_THERE, IndexDifference
from hapi_client.data.index import load_index
from hapi_client.data.listing import Listing, list_data
from hapi_client.data.span_bytes import read_span, span_samples
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import INDEX_VERSION, DataIndex, Span
from hapi_protocol.errors import RightsError

INDEX_UNKNOWN = "unknown"
MAX_READ = 8
"""Number of samples that are read to find their members."""


@dataclass(frozen=True)
class DataSetSummary:
    """Facts about a data set with an index.

    Attributes:
        location: location of the data set.
        index: ``there``; ``stale`` if shards were added, removed or changed
            since it was written; ``unknown`` if they may not be listed.
        index_version: version of the index format.
        stored: time of storage of the index as in Swift's listings (UTC);
            empty if unknown.
        shards: number of shards in the index.
        samples: number of samples in the index.
        spans: number of spans.
        shard_bytes: size of the present shards; None if unknown.
        sample_bytes: size of the samples' tar members with their headers.
        classes: number of samples by class name, or by label if it has none.
        unlabelled: number of samples without a label.
        kinds: number of read samples by the extension of their members
            (``jpg``, ``cls``).
        looked_at: number of read samples.
    """

    location: Location
    index: str
    index_version: int
    stored: str
    shards: int
    samples: int
    spans: int
    shard_bytes: int | None
    sample_bytes: int
    classes: Mapping[str, int]
    unlabelled: int
    kinds: Mapping[str, int]
    looked_at: int

    @property
    def mean_sample_bytes(self) -> float:
        return self.sample_bytes / self.samples


def summarize_data_set(
    connection: Connection, location: Location
) -> DataSetSummary:
    """Reads the index, lists the shards, and reads a few samples.

    Raises:
        DataIndexError: if there is no index.
        HapiError: if a shard cannot be read or differs from the index.
    """
    index = load_index(connection, location)
    listed = _listed(connection, location)
    etags = index.etags if listed is None else listed.etags
    spans = index.spans(container=location.container)
    kinds, num_read = _kinds(connection, _spread(spans), etags)
    rows = [row for shard in index.shards for row in shard.rows]
    return DataSetSummary(
        location=location,
        index=_state(index, listed),
        index_version=1 if index.unchecked_shards else INDEX_VERSION,
        stored=listed.index.stored if listed and listed.index else "",
        shards=len(index.shards),
        samples=len(rows),
        spans=len(spans),
        shard_bytes=None
        if listed is None
        else sum(shard.length_bytes for shard in listed.shards),
        sample_bytes=sum(row.length for row in rows),
        classes=_classes(index),
        unlabelled=sum(row.label is None for row in rows),
        kinds=kinds,
        looked_at=num_read,
    )


def _listed(connection: Connection, location: Location) -> Listing | None:
    """Lists the objects; returns None if that is not permitted."""
    try:
        return list_data(connection, location)
    except RightsError as error:
        if error.status not in (401, 403):
            raise
        return None


def _state(index: DataIndex, listed: Listing | None) -> str:
    if listed is None:
        return INDEX_UNKNOWN
    is_stale = IndexDifference.between(index, listed.etags).is_stale
    return INDEX_STALE if is_stale else INDEX_THERE


def _classes(index: DataIndex) -> dict[str, int]:
    """Counts the samples of each class, in the order of labels."""
    counts = Counter(
        row.label
        for shard in index.shards
        for row in shard.rows
        if row.label is not None
    )
    names = dict(enumerate(index.class_names))
    return {
        names.get(label, str(label)): counts[label]
        for label in sorted(counts.keys() | names.keys())
    }


def _spread(spans: Sequence[Span]) -> list[Span]:
    """Returns the first samples of spans spread over the data set."""
    step = max(1, len(spans) // MAX_READ)
    return [span.part(0, 1) for span in spans[::step][:MAX_READ]]


def _kinds(
    connection: Connection,
    samples: Sequence[Span],
    etags: Mapping[str, str],
) -> tuple[dict[str, int], int]:
    counts: Counter[str] = Counter()
    num_read = 0
    for span in samples:
        if etags.get(span.shard) != span.etag:
            continue  # reported as a stale index
        for sample in span_samples(span, read_span(connection, span)):
            counts.update(list(sample.members))
            num_read += 1
    return dict(sorted(counts.items())), num_read
