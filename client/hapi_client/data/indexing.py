"""Making of an index: from stored shards, local samples or loose objects."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hapi_client.data.index import (
    IndexState,
    find_index,
    replace_index,
    store_index,
)
from hapi_client.data.label_texts import (
    JsonLabels,
    LabelledRow,
    check_label_source,
    check_member_labels,
    label_text,
    labelled_rows,
    number_labels,
    unlabelled_note,
)
from hapi_client.data.listing import SHARD_SUFFIX, list_data
from hapi_client.data.loose_objects import group_rows, object_labels
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.retry import read_again
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DEFAULT_LABELS, DataIndex, IndexRow
from hapi_protocol.errors import (
    DataIndexError,
    HapiError,
    UnsupportedError,
)
from hapi_protocol.headers import Annotation
from hapi_protocol.samples import LABEL_EXTENSION, META_EXTENSION, Sample

if TYPE_CHECKING:
    from hapi_protocol.feature_stream import Row

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".part"
"""Ending of the name of an index that is being made."""
SAVE_SECONDS = 30.0
"""Longest work of ``hapi index`` that is lost if it is killed."""


def checked_rows(shard: str, rows: Iterable[LabelledRow]) -> list[LabelledRow]:
    """Returns the rows of a shard whose keys are unique.

    Raises:
        UnsupportedError: ``damaged_shard``: a key occurs twice, because the
            members of a sample are not together.
    """
    by_key: dict[str, LabelledRow] = {}
    for labelled in rows:
        other = by_key.setdefault(labelled.row.key, labelled)
        if other is not labelled:
            raise UnsupportedError(
                "damaged_shard",
                f"shard {shard}: the members of sample "
                f"{labelled.row.key!r} are not together (bytes "
                f"{other.row.offset} and {labelled.row.offset}), or two "
                "samples have this key; write the tar again with its members "
                "in order, as 'tar --sort=name' does",
                object_name=shard,
            )
    return list(by_key.values())


@dataclass(frozen=True)
class IndexOptions:
    """Options of the rows of a data set.

    Attributes:
        labels: where labels come from: ``cls``, ``json:FIELD``, or a table
            of loose objects; None for where those of the present index do.
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
        notes: what the user should know of labels and damage.
    """

    indexed: int
    skipped: int
    removed: int
    samples: int
    empty: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


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
        ConflictError: an upload wrote the index meanwhile.
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
    before = IndexState.of(connection, location)
    old = find_index(connection, location) or DataIndex(())
    source = options.labels or old.labels
    if not listing.groups:
        connection.require_hapi()
        check_member_labels(source)
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
    notes: list[str | None] = []
    if listing.groups:
        # No object is read, and the table of labels may have changed.
        names = [
            info.name for group in listing.groups.values() for info in group
        ]
        text_of, note = object_labels(connection, location, source, names)
        notes.append(note)
        rows = {
            name: group_rows(objects, text_of)
            for name, objects in listing.groups.items()
        }

    def numbered(old: DataIndex) -> DataIndex:
        etags = {name: now[name].etag for name in rows}
        return number_labels(rows, etags, old=old, source=source)

    def save() -> None:
        index = numbered(DataIndex(()))  # with the labels' own texts
        try:
            store_index(connection, location, index, PARTIAL_SUFFIX)
        except HapiError as error:
            logger.warning("the rows so far were not saved: %s", error)

    saved = time.monotonic()
    has_partial = bool(partial.shards)
    try:
        for name in sorted(now.keys() - rows.keys()):
            on_shard(name)
            rows[name] = _read_rows(
                connection,
                location,
                now[name],
                source,
                check_images=options.image is None,
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
    replace_index(connection, location, index, before)
    if has_partial:
        connection.delete(
            location.container, location.index_name + PARTIAL_SUFFIX
        )
    notes += [
        cut_off_note(name, rows[name], now[name].length_bytes)
        for name in sorted(now)
        if not listing.groups
    ]
    notes.append(unlabelled_note(rows, source))
    return IndexReport(
        indexed=len(now) - len(unchanged),
        skipped=len(unchanged),
        removed=len(old.etags.keys() - now.keys()),
        samples=len(index),
        empty=tuple(name for name in sorted(rows) if not rows[name]),
        inner=tuple(map(str, listing.inner)),
        notes=tuple(note for note in notes if note),
    )


def cut_off_note(
    shard: str, rows: Sequence[LabelledRow], length_bytes: int
) -> str | None:
    """Tells of a tar that ends with its last sample, as if cut off there."""
    if not rows:
        return None
    last = rows[-1].row
    if last.offset + last.length < length_bytes:
        return None
    return (
        f"{shard} has no end: it may have been cut off after its sample "
        f"{last.key!r}, number {len(rows)}; compare it with the original"
    )


def _partial_index(connection: Connection, location: Location) -> DataIndex:
    """The rows that an interrupted call has read, if any."""
    try:
        index = find_index(connection, location, PARTIAL_SUFFIX)
    except DataIndexError as error:
        logger.info("an interrupted index is not continued: %s", error)
        index = None
    return index or DataIndex(())


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
    if any(row.etag for shard in index.shards for row in shard.rows):
        names = [row.key for shard in index.shards for row in shard.rows]
        text_of, note = object_labels(connection, location, source, names)
        if note:
            logger.info("%s", note)
        rows = {
            shard.name: [
                LabelledRow(row, text_of(row.key)) for row in shard.rows
            ]
            for shard in index.shards
        }
    else:
        connection.require_hapi()
        check_member_labels(source)
        rows = {
            shard.name: _read_rows(
                connection,
                location,
                ObjectInfo(shard.name, shard.etag, 0),
                source,
                check_images=False,
            )
            for shard in index.shards
        }
    return number_labels(rows, index.etags, old=DataIndex(()))


def _read_rows(
    connection: Connection,
    location: Location,
    shard: ObjectInfo,
    source: str | JsonLabels,
    *,
    check_images: bool,
) -> list[LabelledRow]:
    # Imported here to keep pyarrow out of the command line's start-up.
    from hapi_protocol.feature_reader import read_features

    annotation = Annotation(
        model=None, cut=0, index=True, if_source_etag=shard.etag
    )

    def read() -> list[LabelledRow]:
        with connection.get_features(
            location.container, shard.name, annotation
        ) as body:
            return checked_rows(
                shard.name,
                (
                    _labelled_row(row, shard.name, source, check_images)
                    for batch in read_features(body)
                    for row in batch.rows
                ),
            )

    try:
        return read_again(read)
    except HapiError as error:
        if error.code == "empty_shard":
            return []
        raise


def _labelled_row(
    row: Row, shard: str, source: str | JsonLabels, check_images: bool
) -> LabelledRow:
    if check_images and row.error is not None:
        raise _unclear(shard, row.key, row.error)
    return LabelledRow(
        IndexRow(row.index, row.key, row.offset, row.length, None, row.crc32),
        *label_text(source, row.cls, row.meta, f"{row.key!r} of {shard}"),
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
        *label_text(
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
