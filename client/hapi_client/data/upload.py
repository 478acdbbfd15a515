"""Upload of data sets into Swift, with their index."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from hapi_client.data.index import IndexState, find_index, replace_index
from hapi_client.data.indexing import (
    IndexOptions,
    checked_rows,
    cut_off_note,
    sample_row,
)
from hapi_client.data.label_texts import (
    LabelledRow,
    check_member_labels,
    labelled_rows,
    number_labels,
    unlabelled_note,
)
from hapi_client.data.listing import SHARD_SUFFIX
from hapi_client.data.shard_writer import (
    DEFAULT_SHARD_BYTES,
    DEFAULT_SHARD_SAMPLES,
    PACKED_NAME,
    SampleFolder,
    find_class_names,
    find_sample,
    is_damaged,
    read_folder,
    split_shards,
    write_shard,
)
from hapi_client.progress import Reporter
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DEFAULT_LABELS, DataIndex
from hapi_protocol.errors import ClientError, DataIndexError
from hapi_protocol.samples import (
    ARCHIVE,
    ARRAY,
    IMAGE,
    SNIFF_BYTES,
    Sample,
    compression_message,
    is_hidden,
)
from hapi_protocol.shards import iter_samples
from hapi_splitter.units import count_text

logger = logging.getLogger(__name__)

CONTENT_TYPE_TAR = "application/x-tar"
HASH_BLOCK_BYTES = 1024 * 1024
MAX_NAMED = 8
_SPLITS = frozenset(
    {"train", "training", "val", "valid", "validation", "test", "testing"}
)


@dataclass(frozen=True)
class PackOptions:
    """Limits of a shard made from class folders.

    Attributes:
        shard_samples: maximum number of samples.
        shard_bytes: maximum size of the samples' files.

    Raises:
        ClientError: ``bad_configuration`` for a value below 1.
    """

    shard_samples: int = DEFAULT_SHARD_SAMPLES
    shard_bytes: int = DEFAULT_SHARD_BYTES

    def __post_init__(self) -> None:
        for name in ("shard_samples", "shard_bytes"):
            if getattr(self, name) < 1:
                raise ClientError(
                    "bad_configuration",
                    f"{name} is {getattr(self, name)}; at least 1",
                )


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


@dataclass
class _Shard:
    """A shard in the store, and its rows."""

    info: ObjectInfo
    rows: list[LabelledRow]
    was_stored: bool


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
        sources: tar files, folders of tar files, or one folder of class
            folders, which is packed.
        reporter: receives the progress.
        pack: limits of packed shards.
        options: what the rows of tar files state.

    Raises:
        ClientError: ``bad_configuration`` naming an invalid source.
        ConflictError: another upload wrote the index meanwhile.
        HapiError: naming the shard that is damaged or cannot be stored.
    """
    folder = _class_folder(sources)
    connection.put_container(location.container)
    before = IndexState.of(connection, location)
    old = find_index(connection, location) or DataIndex(())
    rows = labelled_rows(old)
    options = _options_like(location, old, options or IndexOptions())
    if folder is None:
        check_member_labels(options.labels or DEFAULT_LABELS)
        shards = list(
            _store_tars(connection, location, sources, options, reporter)
        )
    else:
        samples = read_folder(folder)
        _check_classes(location, old, samples, options)
        old = replace(old, class_names=samples.class_names)
        shards = list(
            _store_packed(
                connection, location, samples, pack or PackOptions(), reporter
            )
        )
        # Earlier packed shards of the folder have the same samples.
        rows = {n: r for n, r in rows.items() if not _is_packed(location, n)}
    rows |= {shard.info.name: shard.rows for shard in shards}
    etags = dict(old.etags) | {
        shard.info.name: shard.info.etag for shard in shards
    }
    source = options.labels or DEFAULT_LABELS
    index = number_labels(rows, etags, old=old, source=source)
    replace_index(connection, location, index, before)
    new = {shard.info.name: shard.rows for shard in shards}
    note = unlabelled_note(new, source)
    if note:
        reporter.note(note)
    for name in sorted(old.etags.keys() - rows.keys()):
        reporter.note(
            f"{location.container}/{name} is from an earlier upload and no "
            "longer in the index; delete it, or 'hapi index' will count "
            "its samples again"
        )
    return _report(shards, index)


def _report(shards: Sequence[_Shard], index: DataIndex) -> UploadReport:
    sent = [shard for shard in shards if not shard.was_stored]
    return UploadReport(
        uploaded=len(sent),
        skipped=len(shards) - len(sent),
        bytes=sum(shard.info.length_bytes for shard in sent),
        samples=len(index),
        classes=index.class_names,
    )


def _store_tars(
    connection: Connection,
    location: Location,
    sources: Sequence[Path],
    options: IndexOptions,
    reporter: Reporter,
) -> Iterator[_Shard]:
    for path in _tar_paths(sources):
        yield _store_shard(
            connection, location, path, path.name, options, reporter
        )


def _is_packed(location: Location, shard: str) -> bool:
    base = shard.rpartition("/")[2]
    return shard == location.object_name(base) and bool(
        PACKED_NAME.fullmatch(base)
    )


def _class_folder(sources: Sequence[Path]) -> Path | None:
    for source in sources:
        if not source.exists():
            raise ClientError("bad_configuration", f"{source} does not exist")
    folders = [
        source
        for source in sources
        if source.is_dir() and find_class_names(source)
    ]
    for source in list(folders):
        if tars := _tars_in(source):
            folders.remove(source)
            if sample := find_sample(source):
                raise ClientError(
                    "bad_configuration",
                    f"{source} has shards ({tars[0].name}) and class folders "
                    f"({sample.relative_to(source)}); upload the shards as "
                    f"'{source}/*{SHARD_SUFFIX}', and the class folders from "
                    "a folder of their own",
                )
    if folders and len(sources) > 1:
        raise ClientError(
            "bad_configuration",
            f"{folders[0]} is a folder of class folders; upload it alone, "
            "because its classes are numbered together",
        )
    return folders[0] if folders else None


def _tars_in(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix == SHARD_SUFFIX
        and path.is_file()
        and not is_hidden(path.name)
    )


def _tar_paths(sources: Sequence[Path]) -> list[Path]:
    paths: list[Path] = []
    for source in sources:
        found = _tars_in(source) if source.is_dir() else [source]
        if not found or found[0].suffix != SHARD_SUFFIX:
            compression = None
            if source.is_file():
                with source.open("rb") as file:
                    compression = compression_message(file.read(SNIFF_BYTES))
            raise ClientError(
                "bad_configuration",
                f"{source}: {compression}"
                if compression
                else f"{source} is neither a {SHARD_SUFFIX} file nor a folder "
                "of such files or of class folders",
            )
        paths += found
    by_name: dict[str, Path] = {}
    for path in paths:
        if path.name in by_name:
            raise ClientError(
                "bad_configuration",
                f"{by_name[path.name]} and {path} would become the same "
                "object; rename one of them",
            )
        by_name[path.name] = path
    return paths


def _options_like(
    location: Location, old: DataIndex, options: IndexOptions
) -> IndexOptions:
    """The options, with the labels of the index unless they are given."""
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
            f"({', '.join(old.class_names[:5])}, …); choose another prefix",
            object_name=location.index_name,
        )


def _some_of(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    first = ", ".join(names[:MAX_NAMED])
    return f"{first} and {more} more" if more > 0 else first


def _store_packed(
    connection: Connection,
    location: Location,
    samples: SampleFolder,
    pack: PackOptions,
    reporter: Reporter,
) -> Iterator[_Shard]:
    medium = samples.medium.name
    reporter.note(
        f"{count_text(len(samples.files), medium)} of "
        f"{count_text(len(samples.class_names), 'class', 'classes')}: "
        f"{_some_of(samples.class_names)}"
    )
    if _SPLITS.issuperset(name.lower() for name in samples.class_names):
        reporter.note(
            "these classes have the names of splits; if they are splits, "
            "upload each folder separately"
        )
    if samples.ignored:
        names = _some_of([path.name for path in samples.ignored])
        reporter.note(
            f"{count_text(len(samples.ignored), 'file')} left out (no "
            f"{medium} in a class folder): {names}"
        )
    if samples.dangling:
        reporter.note(
            f"{count_text(len(samples.dangling), 'link')} left out, because "
            "they lead nowhere or to a folder above: "
            f"{_some_of([str(path) for path in samples.dangling])}"
        )
    groups = split_shards(samples.files, pack.shard_samples, pack.shard_bytes)
    for number, files in enumerate(groups):
        with _temporary_file() as path:
            with path.open("wb") as target:
                write_shard(files, target)
            yield _store_shard(
                connection,
                location,
                path,
                f"shard-{number:06d}{SHARD_SUFFIX}",
                IndexOptions(),
                reporter,
            )


@contextmanager
def _temporary_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hapi-shard-") as folder:
        yield Path(folder) / "shard"


def _store_shard(
    connection: Connection,
    location: Location,
    path: Path,
    base_name: str,
    options: IndexOptions,
    reporter: Reporter,
) -> _Shard:
    name = location.object_name(base_name)
    rows = _read_rows(path, base_name, options, reporter)
    with path.open("rb") as file:
        md5 = _md5(file)
        length_bytes = file.tell()
        info = ObjectInfo(name, md5, length_bytes)
        if connection.head(location.container, name) == info:
            reporter.note(f"{base_name}: already stored")
            return _Shard(info, rows, was_stored=True)
        file.seek(0)
        source = reporter.reading(file, base_name, length_bytes)
        connection.put(
            location.container,
            name,
            source,
            length_bytes,
            md5=md5,
            content_type=CONTENT_TYPE_TAR,
        )
    reporter.note(f"{base_name}: {count_text(len(rows), 'sample')} stored")
    return _Shard(info, rows, was_stored=False)


def _read_rows(
    path: Path, name: str, options: IndexOptions, reporter: Reporter
) -> list[LabelledRow]:
    passed: list[str] = []
    damaged: list[str] = []
    without: list[str] = []

    def row(sample: Sample) -> LabelledRow:
        images = [v for k, v in sample.members.items() if IMAGE.has(k)]
        if any(map(is_damaged, images)):
            damaged.append(sample.key)
        media = (IMAGE, ARRAY, ARCHIVE)
        if not any(each.has(k) for each in media for k in sample.members):
            without.append(sample.key)
        return sample_row(sample, name, options)

    with path.open("rb") as file:
        samples = iter_samples(file, name=name, on_passed=passed.append)
        rows = checked_rows(name, map(row, samples))
    for keys, what in (
        (damaged, "cannot be read"),
        (without, "have neither an image nor an array"),
    ):
        if keys:
            reporter.note(
                f"{name}: at least {count_text(len(keys), 'sample')} {what} "
                "and will stop a run without on_error='skip': "
                f"{_some_of(keys)}; repair or remove them and repeat this "
                "command"
            )
    if passed:
        reporter.note(
            f"{name}: {count_text(len(passed), 'member')} left out, because "
            f"they belong to no sample: {_some_of(passed)}"
        )
    if not rows:
        reporter.note(f"{name}: no sample")
    note = cut_off_note(name, rows, path.stat().st_size)
    if note:
        reporter.note(note)
    return rows


def _md5(file: BinaryIO) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # Swift's ETag
    while block := file.read(HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()
