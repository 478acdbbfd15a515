"""What a data set is: its samples, classes and images."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hapi_client.data.catalog import INDEX_STALE, INDEX_THERE, IndexDifference
from hapi_client.data.index import SHARD_SUFFIX, load_index
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import INDEX_VERSION, DataIndex, Span
from hapi_protocol.errors import RightsError
from hapi_protocol.shards import iter_samples

INDEX_UNKNOWN = "unknown"
MAX_READ = 8
"""Samples that are read to see what kind they are."""


@dataclass(frozen=True)
class DataDescription:
    """A data set with an index.

    Attributes:
        location: of it.
        index: ``there``, ``stale`` where shards have come, gone or changed
            since it was written, or ``unknown`` where they may be read and
            not listed.
        index_version: of its form.
        stored: when the index was, as in Swift's listings (UTC); empty
            where it is not known.
        shards: that the index has.
        samples: likewise.
        spans: units of work.
        shard_bytes: of the shards that are there; None where that is not
            known.
        sample_bytes: of the samples' tar members, their headers included.
        classes: samples of each label, by its name where there is one.
        unlabelled: samples without a label.
        kinds: how many of the samples that were looked at have a member of
            such a name (``jpg``, ``cls``).
        looked_at: how many these are.
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


def describe_data(
    connection: Connection, location: Location
) -> DataDescription:
    """Reads the index, lists the shards, and looks at a few samples.

    Raises:
        DataIndexError: there is no index, saying what there is.
        HapiError: a shard cannot be read, or is not that of the index.
    """
    index = load_index(connection, location)
    listed = _listed(connection, location)
    etags = _etags(listed) if listed is not None else index.etags
    spans = index.spans()
    kinds, looked_at = _kinds(connection, location, _spread(spans), etags)
    rows = [row for shard in index.shards for row in shard.rows]
    return DataDescription(
        location=location,
        index=_state(index, listed),
        index_version=INDEX_VERSION,
        stored=next(
            (e.stored for e in listed or () if e.name == location.index_name),
            "",
        ),
        shards=len(index.shards),
        samples=len(rows),
        spans=len(spans),
        shard_bytes=None
        if listed is None
        else sum(e.length_bytes for e in listed if e.name in etags),
        sample_bytes=sum(row.length for row in rows),
        classes=_classes(index),
        unlabelled=sum(row.label is None for row in rows),
        kinds=kinds,
        looked_at=looked_at,
    )


def _listed(
    connection: Connection, location: Location
) -> list[ObjectInfo] | None:
    """None where the objects may not be listed."""
    prefix = f"{location.prefix}/" if location.prefix else ""
    try:
        return list(connection.list(location.container, prefix))
    except RightsError as error:
        if error.status not in (401, 403):
            raise
        return None


def _state(index: DataIndex, listed: Sequence[ObjectInfo] | None) -> str:
    if listed is None:
        return INDEX_UNKNOWN
    is_stale = IndexDifference.between(index, _etags(listed)).is_stale
    return INDEX_STALE if is_stale else INDEX_THERE


def _etags(listed: Sequence[ObjectInfo]) -> dict[str, str]:
    """Of the shards among some objects, by name."""
    return {e.name: e.etag for e in listed if e.name.endswith(SHARD_SUFFIX)}


def _classes(index: DataIndex) -> dict[str, int]:
    """In the order of their integers."""
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
    """The first samples of some spans, from all over the data set."""
    step = max(1, len(spans) // MAX_READ)
    return [span.part(0, 1) for span in spans[::step][:MAX_READ]]


def _kinds(
    connection: Connection,
    location: Location,
    samples: Sequence[Span],
    etags: Mapping[str, str],
) -> tuple[dict[str, int], int]:
    counts: Counter[str] = Counter()
    looked_at = 0
    for span in samples:
        if etags.get(span.shard) != span.etag:
            continue  # the index is stale, which is told
        data = connection.get_range(
            location.container, span.shard, span.byte_range, if_match=span.etag
        )
        for sample in iter_samples(io.BytesIO(data), name=span.shard):
            counts.update(list(sample.members))
            looked_at += 1
    return dict(sorted(counts.items())), looked_at
