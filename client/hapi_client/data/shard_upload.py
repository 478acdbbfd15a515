"""Stores one local shard, and makes its index rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hapi_client.data.indexing import (
    IndexOptions,
    checked_rows,
    cut_off_note,
    sample_row,
)
from hapi_client.data.label_texts import LabelledRow
from hapi_client.data.shard_writer import is_damaged
from hapi_client.progress import Reporter
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.samples import ARCHIVE, ARRAY, IMAGE, Sample
from hapi_protocol.shards import iter_samples
from hapi_splitter.inputs.image_header import DEFAULT_MAX_PIXELS
from hapi_splitter.units import count_text

CONTENT_TYPE_TAR = "application/x-tar"
HASH_BLOCK_BYTES = 1024 * 1024
MAX_NAMED = 8


@dataclass
class StoredShard:
    """A shard in the store, and its rows."""

    info: ObjectInfo
    rows: list[LabelledRow]
    was_stored: bool


def store_shard(
    connection: Connection,
    location: Location,
    path: Path,
    base_name: str,
    options: IndexOptions,
    reporter: Reporter,
) -> StoredShard:
    name = location.object_name(base_name)
    rows = _read_rows(path, base_name, options, reporter)
    with path.open("rb") as file:
        md5 = _md5(file)
        length_bytes = file.tell()
        info = ObjectInfo(name, md5, length_bytes)
        if connection.head(location.container, name) == info:
            reporter.note(f"{base_name}: already stored")
            return StoredShard(info, rows, was_stored=True)
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
    return StoredShard(info, rows, was_stored=False)


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
        if not any(medium.has(k) for medium in media for k in sample.members):
            without.append(sample.key)
        return sample_row(sample, name, options)

    with path.open("rb") as file:
        samples = iter_samples(file, name=name, on_passed=passed.append)
        rows = checked_rows(name, map(row, samples))
    for keys, what in (
        (
            damaged,
            f"cannot be read, or have over {DEFAULT_MAX_PIXELS:,} pixels,",
        ),
        (without, "have neither an image nor an array"),
    ):
        if keys:
            reporter.note(
                f"{name}: at least {count_text(len(keys), 'sample')} {what} "
                "and will stop a run without on_error='skip' "
                "(--skip-bad-samples): "
                f"{some_of(keys)}; repair or remove them and repeat this "
                "command"
            )
    if passed:
        reporter.note(
            f"{name}: {count_text(len(passed), 'member')} left out, because "
            f"they belong to no sample: {some_of(passed)}"
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


def some_of(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    first = ", ".join(names[:MAX_NAMED])
    return f"{first} and {more} more" if more > 0 else first
