"""Upload of data sets into Swift, with their index."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hapi_client.data.index import IndexState, find_index, replace_index
from hapi_client.data.indexing import IndexOptions
from hapi_client.data.label_texts import (
    LabelledRow,
    check_member_labels,
    labelled_rows,
    number_labels,
    unlabelled_note,
)
from hapi_client.data.listing import SHARD_SUFFIX
from hapi_client.data.shard_upload import (
    StoredShard,
    some_of,
    store_shard,
)
from hapi_client.data.shard_writer import (
    DEFAULT_SHARD_BYTES,
    DEFAULT_SHARD_SAMPLES,
    PACKED_NAME,
    SampleFolder,
    split_shards,
    write_shard,
)
from hapi_client.data.upload_sources import packed_samples, tar_paths
from hapi_client.option_checks import check_integers
from hapi_client.progress import Reporter
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DEFAULT_LABELS, DataIndex
from hapi_protocol.errors import ClientError, DataIndexError
from hapi_splitter.units import count_text

_SPLITS = frozenset(
    {"train", "training", "val", "valid", "validation", "test", "testing"}
)


@dataclass(frozen=True)
class PackOptions:
    """Limits of packed shards, and what is packed.

    Attributes:
        shard_samples: maximum number of samples.
        shard_bytes: maximum size of the samples' files.
        has_classes: False to pack class folders without their classes.

    Raises:
        ClientError: ``bad_configuration`` for a value below 1.
    """

    shard_samples: int = DEFAULT_SHARD_SAMPLES
    shard_bytes: int = DEFAULT_SHARD_BYTES
    has_classes: bool = True

    def __post_init__(self) -> None:
        check_integers(self, 1, "shard_samples", "shard_bytes")


@dataclass(frozen=True)
class UploadReport:
    """Result of an upload.

    Attributes:
        uploaded: number of shards that were sent.
        skipped: number of shards that were already stored with the same MD5.
        bytes: size of the shards that were sent.
        samples: number of samples of the whole index.
        classes: names of the labels, if known.
    """

    uploaded: int
    skipped: int
    bytes: int
    samples: int
    classes: tuple[str, ...]


def upload(
    connection: Connection,
    location: Location,
    sources: Sequence[Path],
    reporter: Reporter,
    pack: PackOptions | None = None,
    options: IndexOptions | None = None,
) -> UploadReport:
    """Stores shards, then their index.

    Args:
        connection: connection to the account.
        location: destination; the container is created if necessary.
        sources: tar files, folders of tar files, one folder of class
            folders, or files and folders of samples without classes, which
            are packed.
        reporter: receives the progress.
        pack: limits of packed shards.
        options: what the rows of tar files state.

    Raises:
        ClientError: ``bad_configuration`` naming an invalid source.
        ConflictError: another upload wrote the index meanwhile.
        HapiError: naming the shard that is damaged or cannot be stored.
    """
    pack = pack or PackOptions()
    samples = packed_samples(sources, has_classes=pack.has_classes)
    connection.put_container(location.container)
    before = IndexState.of(connection, location)
    old = find_index(connection, location) or DataIndex(())
    rows = labelled_rows(old)
    options = _options_like(location, old, options or IndexOptions())
    if samples is None:
        check_member_labels(options.labels or DEFAULT_LABELS)
        shards = [
            store_shard(
                connection, location, path, path.name, options, reporter
            )
            for path in tar_paths(sources)
        ]
    else:
        _check_classes(location, old, samples, options)
        old = replace(old, class_names=samples.class_names)
        shards = list(
            _store_packed(connection, location, samples, pack, reporter)
        )
        # Earlier packed shards of the folder have the same samples.
        packed = {n: r for n, r in rows.items() if _is_packed(location, n)}
        rows = {n: r for n, r in rows.items() if n not in packed}
        _note_replaced(packed, shards, reporter)
    new = {shard.info.name: shard.rows for shard in shards}
    rows |= new
    etags = dict(old.etags) | {
        shard.info.name: shard.info.etag for shard in shards
    }
    source = options.labels or DEFAULT_LABELS
    index = number_labels(rows, etags, old=old, source=source)
    replace_index(connection, location, index, before)
    note = unlabelled_note(new, source)
    # Those that are packed without classes were told.
    if note and (samples is None or samples.class_names):
        reporter.note(note)
    for name in sorted(old.etags.keys() - rows.keys()):
        reporter.note(
            f"{location.container}/{name} is from an earlier upload and no "
            "longer in the index; delete it, or 'hapi index' will count "
            "its samples again"
        )
    return _report(shards, index)


def _note_replaced(
    packed: Mapping[str, Sequence[LabelledRow]],
    shards: Sequence[StoredShard],
    reporter: Reporter,
) -> None:
    """Says which samples of an earlier upload are no longer in the index."""
    kept = {each.row.key for shard in shards for each in shard.rows}
    lost = [
        each.row.key
        for rows in packed.values()
        for each in rows
        if each.row.key not in kept
    ]
    if lost:
        reporter.note(
            f"{count_text(len(lost), 'sample')} of an earlier upload are "
            f"replaced, such as {lost[0]!r}; upload folders to prefixes of "
            "their own to keep both"
        )


def _report(shards: Sequence[StoredShard], index: DataIndex) -> UploadReport:
    sent = [shard for shard in shards if not shard.was_stored]
    return UploadReport(
        uploaded=len(sent),
        skipped=len(shards) - len(sent),
        bytes=sum(shard.info.length_bytes for shard in sent),
        samples=len(index),
        classes=index.class_names,
    )


def _is_packed(location: Location, shard: str) -> bool:
    base = shard.rpartition("/")[2]
    return shard == location.object_name(base) and bool(
        PACKED_NAME.fullmatch(base)
    )


def _options_like(
    location: Location, old: DataIndex, options: IndexOptions
) -> IndexOptions:
    """Returns options with the index's labels, unless they are given."""
    labels = options.labels or old.labels
    if len(old) and labels != old.labels:
        raise DataIndexError(
            "bad_index",
            f"labels is {labels!r}, but the labels of the index of {location} "
            f"come from {old.labels!r}; choose another prefix, or first run "
            f"'hapi index {location} --labels {labels}'",
            object_name=location.index_name,
        )
    return replace(options, labels=labels)


def _check_classes(
    location: Location,
    old: DataIndex,
    samples: SampleFolder,
    options: IndexOptions,
) -> None:
    if options.labels != DEFAULT_LABELS:
        raise ClientError(
            "bad_configuration",
            f"labels is {options.labels!r}, but folders name the classes; "
            "leave it out",
        )
    if old.labels_are_names or (
        old.class_names and old.class_names != samples.class_names
    ):
        raise DataIndexError(
            "bad_index",
            f"{location} has a data set with other classes "
            f"({some_of(old.class_names)}); choose another prefix",
            object_name=location.index_name,
        )


def _store_packed(
    connection: Connection,
    location: Location,
    samples: SampleFolder,
    pack: PackOptions,
    reporter: Reporter,
) -> Iterator[StoredShard]:
    medium = samples.medium.name
    classes = (
        f"of {count_text(len(samples.class_names), 'class', 'classes')}: "
        f"{some_of(samples.class_names)}"
        if samples.class_names
        else "without classes: hapi extract needs none, training does"
    )
    reporter.note(f"{count_text(len(samples.files), medium)} {classes}")
    lowered = {name.lower() for name in samples.class_names}
    if lowered and lowered <= _SPLITS:
        reporter.note(
            "these classes have the names of splits; if they are splits, "
            "upload each folder separately"
        )
    if samples.ignored:
        names = some_of([path.name for path in samples.ignored])
        reporter.note(
            f"{count_text(len(samples.ignored), 'file')} left out (no "
            f"{medium}, or in no class folder): {names}"
        )
    if samples.dangling:
        reporter.note(
            f"{count_text(len(samples.dangling), 'link')} left out, because "
            "they lead nowhere or to a folder above: "
            f"{some_of([str(path) for path in samples.dangling])}"
        )
    groups = split_shards(samples.files, pack.shard_samples, pack.shard_bytes)
    for number, files in enumerate(groups):
        with tempfile.TemporaryDirectory(prefix="hapi-shard-") as folder:
            path = Path(folder) / "shard"
            with path.open("wb") as target:
                write_shard(files, target)
            yield store_shard(
                connection,
                location,
                path,
                f"shard-{number:06d}{SHARD_SUFFIX}",
                IndexOptions(),
                reporter,
            )
