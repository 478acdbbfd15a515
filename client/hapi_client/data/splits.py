"""A data set as a job uses it: its spans, labels and identity."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from braceexpand import braceexpand

from hapi_client.data.index import SHARD_SUFFIX, load_index
from hapi_client.data.labels import (
    Labels,
    has_labels,
    is_of_index,
    renumbered,
    span_labels,
)
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location, parse_location
from hapi_protocol.data_index import DataIndex, Span
from hapi_protocol.errors import ClientError, DataIndexError

TRAIN = "train"
MAX_NAMED = 3

Shards: TypeAlias = str | Sequence[str]
"""``swift://container/prefix`` of a data set, or ``swift://container/
prefix/shard-{000..031}.tar`` for some of its shards, or a list of these."""

Data: TypeAlias = Shards | Mapping[str, Shards]
"""Of all training data, or split by split, ``train`` among them."""


@dataclass(frozen=True)
class DataSet:
    """The samples of one split.

    Attributes:
        container: of its shards.
        spans: in the order of the shards.
        labels: of each span, ``[samples]`` int64.
        class_names: of the integers, where the first index knows them and
            the labels are its.
    """

    container: str
    spans: Sequence[Span]
    labels: Sequence[npt.NDArray[np.int64]]
    class_names: Sequence[str] = ()

    @property
    def sizes(self) -> list[int]:
        """Samples of each span."""
        return [len(span.rows) for span in self.spans]

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return 1 + max((int(each.max()) for each in self.labels), default=-1)

    def digest(self) -> str:
        """Another one for other shards, another order, or other content."""
        found = hashlib.sha256(self.container.encode())
        for span in self.spans:
            found.update(f"\n{span.shard} {span.etag} {span.samples}".encode())
        return found.hexdigest()


@dataclass(frozen=True)
class _Part:
    """Shards of one index; ``names`` is empty for all of them."""

    location: Location
    names: tuple[str, ...] = ()


def splits_of(data: Data) -> Mapping[str, Shards]:
    """What a user's ``data`` means.

    Raises:
        ClientError: ``bad_configuration`` naming what is missing.
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
    """Loads the indexes of all splits; all number classes as ``train`` does.

    Raises:
        ClientError: ``bad_configuration`` for what names no shards, or
            shards of several containers.
        DataIndexError: naming what has no index, or is not in it.
        LabelError: a sample has no label, or none of the training's.
    """
    splits = splits_of(data)
    found = {TRAIN: _load(connection, splits[TRAIN], labels)}
    first = found[TRAIN]
    for name, shards in splits.items():
        if name not in found:
            found[name] = _load(connection, shards, labels, first)
    return found


def _load(
    connection: Connection,
    shards: Shards,
    labels: Labels,
    like: DataSet | None = None,
) -> DataSet:
    parts = list(_parts(shards))
    containers = {part.location.container for part in parts}
    containers |= {like.container} if like else set()
    if len(containers) != 1 or not parts:
        raise ClientError(
            "bad_configuration",
            "a job's data must lie in one container, not in "
            f"{', '.join(sorted(containers)) or 'none'}",
        )
    spans: list[Span] = []
    found: list[npt.NDArray[np.int64]] = []
    class_names = (
        like.class_names if like and has_labels(like.labels) else None
    )
    for part in parts:
        index = _chosen(load_index(connection, part.location), part)
        new = index.spans()
        spans += new
        numbers = span_labels(new, labels, index.class_names)
        if is_of_index(labels) and has_labels(numbers):
            if class_names is None:
                class_names = index.class_names
            numbers = renumbered(
                numbers, index.class_names, class_names, str(part.location)
            )
        found += numbers
    _check_repeated(spans)
    names = class_names if is_of_index(labels) else None
    return DataSet(containers.pop(), spans, found, names or ())


def _parts(shards: Shards) -> Iterator[_Part]:
    texts = [shards] if isinstance(shards, str) else list(shards)
    names: dict[Location, list[str]] = {}
    for each in (name for text in texts for name in _expanded(text)):
        place = parse_location(each)
        if not place.prefix.endswith(SHARD_SUFFIX):
            yield _Part(place)
            continue
        folder = Location(place.container, place.prefix.rpartition("/")[0])
        names.setdefault(folder, []).append(place.prefix)
    for folder, found in names.items():
        yield _Part(folder, tuple(found))


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
            f"run 'hapi index {part.location}' if they are there",
            object_name=part.location.index_name,
        )
    return DataIndex(
        tuple(shards[name] for name in part.names), index.class_names
    )


def _check_repeated(spans: Sequence[Span]) -> None:
    seen = set()
    for span in spans:
        place = (span.shard, span.rows[0].sample)
        if place in seen:
            raise ClientError(
                "bad_configuration",
                f"shard {span.shard} stands twice in data",
                object_name=span.shard,
            )
        seen.add(place)
