"""Splits of a job's data: spans, labels and identity."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
from braceexpand import braceexpand

from hapi_client.data.index import load_index
from hapi_client.data.indexing import read_label_texts
from hapi_client.data.labels import (
    Labels,
    has_labels,
    read_source,
    renumber_labels,
    span_labels,
    uses_index_labels,
)
from hapi_client.data.listing import SHARD_SUFFIX
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location, parse_location
from hapi_protocol.data_index import DataIndex, Span
from hapi_protocol.errors import (
    ClientError,
    DataIndexError,
    LabelError,
    RightsError,
)

TRAIN = "train"
MAX_NAMED = 3

Shards: TypeAlias = str | Sequence[str]
"""``swift://container/prefix`` of a data set, or ``swift://container/
prefix/shard-{000..031}.tar`` for some of its shards, or a list of these."""

Data: TypeAlias = Shards | Mapping[str, Shards] | Mapping[str, "DataSet"]
"""Training data, or a mapping from split to data that includes ``train``; or
what :func:`load_splits` has loaded before."""


@dataclass(frozen=True)
class DataSet:
    """The samples of one split.

    Attributes:
        spans: spans in the order of the shards.
        labels: labels of each span, ``[samples]`` int64.
        class_names: names of the labels, if they are those of the index and
            the first index has names.
        locations: data set of each span.
    """

    spans: Sequence[Span]
    labels: Sequence[npt.NDArray[np.int64]]
    class_names: Sequence[str] = ()
    locations: Sequence[Location] = ()

    @property
    def sizes(self) -> list[int]:
        """Samples of each span."""
        return [len(span.rows) for span in self.spans]

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    @property
    def num_classes(self) -> int:
        """The largest label plus one."""
        return 1 + max(
            (int(labels.max()) for labels in self.labels), default=-1
        )

    @property
    def containers(self) -> Sequence[str]:
        """Containers of its shards, in the order of the shards."""
        return list(dict.fromkeys(span.container for span in self.spans))

    def part(self, first: int, stop: int) -> DataSet:
        """Returns the spans ``first`` to ``stop - 1`` as a data set."""
        return DataSet(
            self.spans[first:stop],
            self.labels[first:stop],
            self.class_names,
            self.locations[first:stop],
        )

    def digest(self) -> str:
        """Returns a digest of the shards, their order and their content."""
        first, *others = self.containers
        digest = hashlib.sha256(first.encode())
        for span in self.spans:
            name = span.path if span.container in others else span.shard
            digest.update(f"\n{name} {span.etag} {span.samples}".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class _Part:
    """Shards of one index; empty ``names`` select all of them."""

    location: Location
    names: tuple[str, ...] = ()


def normalize_splits(
    data: Shards | Mapping[str, Shards],
) -> Mapping[str, Shards]:
    """Returns a user's ``data`` as a mapping from split to shards.

    Raises:
        ClientError: ``bad_configuration`` if there is no training split.
    """
    if not isinstance(data, Mapping):
        return {TRAIN: data}
    if TRAIN not in data:
        raise ClientError(
            "bad_configuration",
            f"data has the splits {', '.join(map(repr, data)) or 'none'}; "
            f"one of them must be {TRAIN!r}",
        )
    return data


def load_splits(
    connection: Connection, data: Data, labels: Labels
) -> dict[str, DataSet]:
    """Loads the indexes of all splits, with the class numbers of ``train``.

    Raises:
        ClientError: ``bad_configuration`` for invalid shards.
        DataIndexError: naming a missing index, or shards it does not have.
        LabelError: if a sample has no label, or a class unknown to ``train``.
    """
    if isinstance(data, Mapping) and data:
        given = {k: v for k, v in data.items() if isinstance(v, DataSet)}
        if given.keys() == data.keys():
            return given
    splits = normalize_splits(cast("Shards | Mapping[str, Shards]", data))
    loaded = {TRAIN: _load(connection, splits[TRAIN], labels)}
    first = loaded[TRAIN]
    for name, shards in splits.items():
        if name not in loaded:
            loaded[name] = _load(connection, shards, labels, first)
    return loaded


def num_classes_of(
    splits: Mapping[str, DataSet], given: int | None = None
) -> int:
    """Returns the number of classes of all splits.

    Args:
        splits: the splits.
        given: a number that a user gives; None for that of the labels, one
            more than the largest.

    Raises:
        LabelError: if labels are missing, or above a given number.
    """
    found = max(data.num_classes for data in splits.values())
    if given is not None and given < found:
        raise LabelError(
            "missing_label",
            f"num_classes (--classes) is {given}, but the data has labels up "
            f"to {found - 1}; give at least {found}",
        )
    return found if given is None else given


def check_indexes(
    connection: Connection, data: Shards | Mapping[str, Shards]
) -> None:
    """Checks by one short request each that all data sets have an index.

    Raises:
        HapiError: as :func:`load_splits`.
    """
    for shards in normalize_splits(data).values():
        for location in dict.fromkeys(p.location for p in _parts(shards)):
            name = location.index_name
            if connection.head(location.container, name) is None:
                load_index(connection, location)  # says what is there


def changed_shards(connection: Connection, data: DataSet) -> set[str]:
    """Returns the ETags of the index that the store no longer has.

    One listing of each container; a shard that differs there, as large
    objects and very recent ones may, is asked for itself.

    Raises:
        HapiError: if the store does not answer.
    """
    changed: set[str] = set()
    for container in data.containers:
        spans = [s for s in data.spans if s.container == container]
        etags: dict[str, tuple[str, str]] = {}
        """ETag of an object, and of its shard, by the object's name."""
        for span in spans:
            if span.is_group:
                for row in span.rows:
                    etags[row.key] = str(row.etag), span.etag
            else:
                etags[span.shard] = span.etag, span.etag
        prefix = os.path.commonprefix(list(etags))  # noqa: RUF071
        listed = {}
        with suppress(RightsError):  # the container cannot be listed
            listed = {
                info.name: info.etag
                for info in connection.list(container, prefix)
            }
        for name, (etag, of_shard) in etags.items():
            if of_shard not in changed and listed.get(name) != etag:
                info = connection.head(container, name)
                if info is None or info.etag != etag:
                    changed.add(of_shard)
    return changed


def _load(
    connection: Connection,
    shards: Shards,
    labels: Labels,
    like: DataSet | None = None,
) -> DataSet:
    source = read_source(labels)
    parts = list(_parts(shards))
    if not parts:
        raise ClientError("bad_configuration", "data names no data set")
    spans: list[Span] = []
    all_labels: list[npt.NDArray[np.int64]] = []
    locations: list[Location] = []
    class_names = (
        like.class_names if like and has_labels(like.labels) else None
    )
    for part in parts:
        index = _chosen(load_index(connection, part.location), part)
        if source is not None and source != index.labels:
            index = read_label_texts(connection, part.location, index, source)
        new = index.spans(container=part.location.container)
        spans += new
        locations += [part.location] * len(new)
        numbers = span_labels(new, labels, index.class_names)
        if uses_index_labels(labels) and has_labels(numbers):
            if class_names is None:
                class_names = index.class_names
            numbers = renumber_labels(
                numbers, index.class_names, class_names, str(part.location)
            )
        all_labels += numbers
    _check_repeated(spans)
    names = class_names if uses_index_labels(labels) else None
    return DataSet(spans, all_labels, names or (), locations)


def _parts(shards: Shards) -> Iterator[_Part]:
    texts = [shards] if isinstance(shards, str) else list(shards)
    names: dict[Location, list[str]] = {}
    for name in (name for text in texts for name in _expanded(text)):
        location = parse_location(name)
        if not location.prefix.endswith(SHARD_SUFFIX):
            yield _Part(location)
            continue
        prefix = location.prefix.rpartition("/")[0]
        folder = Location(location.container, prefix)
        names.setdefault(folder, []).append(location.prefix)
    for folder, shards_of in names.items():
        yield _Part(folder, tuple(shards_of))


def _expanded(text: str) -> list[str]:
    try:
        return list(braceexpand(text))
    except ValueError as error:
        raise ClientError(
            "bad_configuration",
            f"{text!r} has unbalanced braces; write shard-{{000..031}}.tar",
        ) from error


def _chosen(index: DataIndex, part: _Part) -> DataIndex:
    if not part.names:
        return index
    shards = {shard.name: shard for shard in index.shards}
    missing = [name for name in part.names if name not in shards]
    if missing:
        more = ", ..." if len(missing) > MAX_NAMED else ""
        raise DataIndexError(
            "bad_index",
            f"{len(missing)} of {len(part.names)} shards are not in the index "
            f"of {part.location}: {', '.join(missing[:MAX_NAMED])}{more}; "
            f"run 'hapi index {part.location}' if they exist",
            object_name=part.location.index_name,
        )
    return index.part(part.names)


def _check_repeated(spans: Sequence[Span]) -> None:
    starts = set()
    for span in spans:
        start = (span.path, span.rows[0].sample)
        if start in starts:
            raise ClientError(
                "bad_configuration",
                f"shard {span.path} is repeated in data; name it once",
                object_name=span.path,
            )
        starts.add(start)
