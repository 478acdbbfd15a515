"""Index of a data set: loading, updating and storing it."""

from __future__ import annotations

import hashlib
import io
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from hapi_client.data.label_texts import (
    JsonLabels,
    LabelledRow,
    check_label_source,
    label_text,
    labelled_rows,
    number_labels,
)
from hapi_client.data.listing import SHARD_SUFFIX, folder_of, list_data
from hapi_client.data.loose_objects import group_rows, object_labels
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.retry import is_retryable
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import (
    DEFAULT_LABELS,
    INDEX_NAME,
    DataIndex,
    IndexRow,
)
from hapi_protocol.errors import (
    DataIndexError,
    HapiError,
    RightsError,
    TruncatedStreamError,
    UnsupportedError,
)
from hapi_protocol.headers import Annotation
from hapi_protocol.shards import (
    IMAGE,
    LABEL_EXTENSION,
    META_EXTENSION,
    Sample,
)

if TYPE_CHECKING:
    from hapi_protocol.feature_stream import Row

logger = logging.getLogger(__name__)

CONTENT_TYPE_INDEX = "application/vnd.apache.arrow.stream"
PARTIAL_SUFFIX = ".part"
"""Ending of the name of an index that is being made."""
SAVE_SECONDS = 30.0
"""Longest work of ``hapi index`` that is lost if it is killed."""
MAX_ATTEMPTS = 3
MAX_LISTED = 10_000
"""Maximum number of objects listed to find out why there is no index."""
MAX_NAMED = 5
_MD5 = re.compile("[0-9a-f]{32}")


def load_index(connection: Connection, location: Location) -> DataIndex:
    """Loads the index of a data set.

    Raises:
        DataIndexError: if there is none, or it is empty or of another
            version.
        RightsError: if there is no such container.
    """
    try:
        index = _read_index(connection, location)
    except RightsError as error:
        if error.status != 404:
            raise
        raise DataIndexError(
            "bad_index",
            _missing_index_text(connection, location),
            object_name=location.index_name,
            trans_id=error.trans_id,
        ) from error
    if not len(index):
        raise DataIndexError(
            "bad_index",
            f"the index of {location} has no samples",
            object_name=location.index_name,
        )
    if index.unchecked_shards:
        logger.warning("%s", unchecked_text(location, index))
    return index


def unchecked_text(location: Location, index: DataIndex) -> str:
    """Says what an index of version 1 lacks."""
    return (
        f"the index of {location} has no checksums for "
        f"{index.unchecked_shards} of {len(index.shards)} shards, so that "
        "damage on the store's disks is not noticed; add them with "
        f"'hapi index {location}'"
    )


def _missing_index_text(connection: Connection, location: Location) -> str:
    """Explains, by a short listing, why there is no index.

    Raises:
        HapiError: if there is no such container.
    """
    remedy = (
        f"{location} has no index; repeat 'hapi upload' if it was "
        f"interrupted, or run 'hapi index {location}' for shards, or images, "
        "that were stored in another way"
    )
    try:
        if any(
            name.endswith(SHARD_SUFFIX) or IMAGE.has(name)
            for name in _some_names(connection, location)
        ):
            return remedy
        folders = {
            name.rpartition("/")[0]
            for name in _some_names(connection, Location(location.container))
            if name.endswith((SHARD_SUFFIX, INDEX_NAME))
        }
    except HapiError as error:
        if error.status == 404:
            raise
        # Permission to read objects does not include listing them.
        logger.info("the container cannot be listed: %s", error)
        return remedy
    found = sorted(str(Location(location.container, each)) for each in folders)
    if not found:
        return f"{location} has no object ending in {SHARD_SUFFIX}"
    more = ", ..." if len(found) > MAX_NAMED else ""
    return (
        f"{location} has no object ending in {SHARD_SUFFIX}; among the data "
        f"sets in this container are {', '.join(found[:MAX_NAMED])}{more}"
    )


def find_index(
    connection: Connection, location: Location, suffix: str = ""
) -> DataIndex | None:
    """Loads the index of a data set; returns None if there is none."""
    try:
        return _read_index(connection, location, suffix)
    except RightsError as error:
        if error.status == 404:
            return None
        raise


def _read_index(
    connection: Connection, location: Location, suffix: str = ""
) -> DataIndex:
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        try:
            with connection.open(
                location.container, location.index_name + suffix
            ) as body:
                data = body.read()
                _check_digest(location, data, body.headers)
                return DataIndex.from_bytes(
                    data, name=f"{location}: the index"
                )
        except HapiError as error:
            # The body broke off: until there is one, requests are repeated.
            if not attempts_left or not is_retryable(error):
                raise
    raise AssertionError("unreachable")


def _check_digest(
    location: Location, data: bytes, headers: Mapping[str, str]
) -> None:
    """Compares the index with its ETag, which is the MD5 of what was stored.

    Raises:
        TruncatedStreamError: it differs; another replica may be intact.
    """
    expected = headers.get("ETag", "").strip('"')
    is_manifest = "X-Static-Large-Object" in headers
    if is_manifest or not _MD5.fullmatch(expected):
        return
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != expected:
        raise TruncatedStreamError(
            "truncated",
            f"{location}: the index is damaged: its {len(data)} bytes have "
            f"the MD5 {found}, and {expected} was stored; if this stays so, "
            f"rewrite it with 'hapi index {location}'",
            object_name=location.index_name,
        )


def store_index(
    connection: Connection,
    location: Location,
    index: DataIndex,
    suffix: str = "",
) -> None:
    data = index.to_bytes()
    connection.put(
        location.container,
        location.index_name + suffix,
        io.BytesIO(data),
        len(data),
        content_type=CONTENT_TYPE_INDEX,
        md5=hashlib.md5(data, usedforsecurity=False).hexdigest(),
    )


def _some_names(connection: Connection, location: Location) -> Iterator[str]:
    """Yields the first object names of the data set."""
    listed = connection.list(location.container, folder_of(location))
    return (each.name for each in islice(listed, MAX_LISTED))


def checked_rows(shard: str, rows: Iterable[LabelledRow]) -> list[LabelledRow]:
    """Returns the rows of a shard whose keys are unique.

    Raises:
        UnsupportedError: ``damaged_shard``: a key occurs twice, because the
            members of a sample are not together.
    """
    found: dict[str, LabelledRow] = {}
    for each in rows:
        other = found.setdefault(each.row.key, each)
        if other is not each:
            raise UnsupportedError(
                "damaged_shard",
                f"shard {shard}: the members of sample {each.row.key!r} are "
                f"not together (bytes {other.row.offset} and "
                f"{each.row.offset}), or two samples have this key; write "
                "the tar again with its members in order, as 'tar "
                "--sort=name' does",
                object_name=shard,
            )
    return list(found.values())


@dataclass(frozen=True)
class IndexOptions:
    """Options of the rows of a data set.

    Attributes:
        labels: where labels come from: ``cls`` or ``json:FIELD``; None for
            where those of the present index come from.
        image: extension of the member that is the image, if samples have
            several.

    Raises:
        ClientError: ``bad_configuration`` for unknown labels.
    """

    labels: str | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        if self.labels is not None:
            check_label_source(self.labels)


@dataclass(frozen=True)
class IndexReport:
    """Result of :func:`update_index`.

    Attributes:
        indexed: number of shards that were read.
        skipped: number of shards whose ETag was already in the index.
        removed: number of shards of the old index that no longer exist.
        samples: number of samples of the whole index.
        empty: names of shards without samples.
        inner: data sets below it, which have an index of their own.
    """

    indexed: int
    skipped: int
    removed: int
    samples: int
    empty: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()


def update_index(
    connection: Connection,
    location: Location,
    on_shard: Callable[[str], None] = lambda name: None,
    options: IndexOptions | None = None,
) -> IndexReport:
    """Updates the index of a data set; the store reads the shards.

    Loose objects are listed only.  Shards whose ETag and checksums are in the
    index are skipped.  The index is stored at the end; until then an object
    next to it has what was read, from which the next call continues.

    Args:
        connection: connection to the account.
        location: location of the data set.
        on_shard: called with the name of each shard before it is read.
        options: what the rows state.

    Raises:
        DataIndexError: if there is no shard.
        HapiError: naming the shard that cannot be read.
    """
    options = options or IndexOptions()
    listing = list_data(connection, location)
    if not listing.shards:
        raise DataIndexError(
            "bad_index",
            f"{location} has no object ending in {SHARD_SUFFIX}, and no "
            "image or array",
        )
    if not listing.groups:
        connection.require_hapi()
    old = find_index(connection, location) or DataIndex(())
    source = options.labels or old.labels
    partial = _partial_index(connection, location)
    known: dict[str, list[LabelledRow]] = {}
    etags: dict[str, str] = {}
    for index in (old, partial):
        if index.labels == source:
            known |= labelled_rows(index)
            etags |= {s.name: s.etag for s in index.shards if s.has_checksums}
    now = {shard.name: shard for shard in listing.shards}
    unchanged = {n for n in now if etags.get(n) == now[n].etag}
    rows = {name: known[name] for name in unchanged}

    def numbered(old: DataIndex) -> DataIndex:
        found = {name: now[name].etag for name in rows}
        return number_labels(rows, found, old=old, source=source)

    def save() -> None:
        index = numbered(DataIndex(()))  # with the labels' own texts
        try:
            store_index(connection, location, index, PARTIAL_SUFFIX)
        except HapiError as error:
            logger.warning("the rows so far were not saved: %s", error)

    text_of = (
        object_labels(connection, location, source)
        if listing.groups
        else lambda name: None
    )
    saved = time.monotonic()
    has_partial = bool(partial.shards)
    try:
        for name in sorted(now.keys() - unchanged):
            on_shard(name)
            rows[name] = (
                group_rows(listing.groups[name], text_of)
                if listing.groups
                else _read_rows(
                    connection, location, now[name], source, options.image
                )
            )
            if time.monotonic() - saved > SAVE_SECONDS:
                save()
                has_partial = True
                saved = time.monotonic()
    except BaseException:
        if len(rows) > len(unchanged):
            save()
        raise
    index = numbered(old if old.labels == source else DataIndex(()))
    store_index(connection, location, index)
    if has_partial:
        connection.delete(
            location.container, location.index_name + PARTIAL_SUFFIX
        )
    return IndexReport(
        indexed=len(now) - len(unchanged),
        skipped=len(unchanged),
        removed=len(old.etags.keys() - now.keys()),
        samples=len(index),
        empty=tuple(name for name in sorted(rows) if not rows[name]),
        inner=tuple(map(str, listing.inner)),
    )


def _partial_index(connection: Connection, location: Location) -> DataIndex:
    """The rows that an interrupted call has read, if any."""
    try:
        found = find_index(connection, location, PARTIAL_SUFFIX)
    except DataIndexError as error:
        logger.info("an interrupted index is not continued: %s", error)
        found = None
    return found or DataIndex(())


def read_label_texts(
    connection: Connection,
    location: Location,
    index: DataIndex,
    source: str | JsonLabels,
) -> DataIndex:
    """Returns an index with labels of another source, read from the shards.

    Raises:
        HapiError: naming the shard that cannot be read, or the sample whose
            label is neither an integer nor a text.
    """
    connection.require_hapi()
    rows = {
        shard.name: _read_rows(
            connection,
            location,
            ObjectInfo(shard.name, shard.etag, 0),
            source,
            None,
        )
        for shard in index.shards
    }
    return number_labels(rows, index.etags, old=DataIndex(()))


def _read_rows(
    connection: Connection,
    location: Location,
    shard: ObjectInfo,
    source: str | JsonLabels,
    image: str | None,
) -> list[LabelledRow]:
    # Imported here to keep pyarrow out of the command line's start-up.
    from hapi_protocol.feature_reader import read_features

    annotation = Annotation(
        model=None, cut=0, index=True, if_source_etag=shard.etag
    )
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        try:
            with connection.get_features(
                location.container, shard.name, annotation
            ) as body:
                return checked_rows(
                    shard.name,
                    (
                        _labelled_row(row, shard.name, source, image)
                        for batch in read_features(body)
                        for row in batch.rows
                    ),
                )
        except HapiError as error:
            if error.code == "empty_shard":
                return []
            if not attempts_left or not is_retryable(error):
                raise
            logger.info("retrying the index of %s: %s", shard.name, error)
    raise AssertionError("unreachable")


def _labelled_row(
    row: Row, shard: str, source: str | JsonLabels, image: str | None
) -> LabelledRow:
    if row.error is not None and image is None:
        raise _unclear(shard, row.key, row.error)
    return LabelledRow(
        IndexRow(row.index, row.key, row.offset, row.length, None, row.crc32),
        label_text(source, row.cls, row.meta, f"{row.key!r} of {shard}"),
    )


def sample_row(
    sample: Sample, shard: str, options: IndexOptions
) -> LabelledRow:
    """Makes the index row of a local sample.

    Raises:
        UnsupportedError: ``unsupported_object``: the sample has several
            images, or not the one that the options name.
        LabelError: its label is neither an integer nor a text.
    """
    error = sample.image_error(options.image)
    if error is not None:
        raise _unclear(shard, sample.key, error)
    return LabelledRow(
        IndexRow(
            sample.index,
            sample.key,
            sample.offset,
            sample.length,
            None,
            sample.crc32,
        ),
        label_text(
            options.labels or DEFAULT_LABELS,
            sample.text(LABEL_EXTENSION),
            sample.text(META_EXTENSION),
            f"{sample.key!r} of {shard}",
        ),
    )


def _unclear(shard: str, key: str, error: str) -> UnsupportedError:
    return UnsupportedError(
        "unsupported_object",
        f"shard {shard}: sample {key!r} {error}",
        object_name=shard,
    )
