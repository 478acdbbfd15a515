"""The index of a data set: key, position, bytes and label of each sample.

One Arrow table, written by ``hapi upload`` and ``hapi index`` as one Swift
object next to the shards.  It gives a client the data set's length and order,
random access and labels without reading a shard, and the *spans*: consecutive
samples of one shard, the unit of work, planning, retry and caching.

pyarrow is imported only when an index is read or written, because it slows
down the start of the command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hapi_protocol.errors import DataIndexError
from hapi_protocol.headers import ByteRange, SampleRange

if TYPE_CHECKING:
    import pyarrow as pa

INDEX_NAME = "hapi-index.arrow"
"""Base name of the index object, after the data set's prefix."""

INDEX_VERSION = 2
"""Version 1 has no column ``crc32``."""
MAX_SPAN_SAMPLES = 64
MAX_SPAN_BYTES = 16 * 1024 * 1024

_METADATA = b"hapi.index"


def _schema(version: int = INDEX_VERSION) -> pa.Schema:
    import pyarrow as pa

    checks = [pa.field("crc32", pa.uint32())] if version > 1 else []
    return pa.schema(
        [
            pa.field("shard", pa.dictionary(pa.int32(), pa.utf8())),
            pa.field("source_etag", pa.dictionary(pa.int32(), pa.utf8())),
            pa.field("sample", pa.int32()),
            pa.field("key", pa.utf8()),
            pa.field("offset", pa.int64()),
            pa.field("length", pa.int64()),
            pa.field("label", pa.int64()),
            *checks,
        ]
    )


@dataclass(frozen=True)
class IndexRow:
    """One sample of a shard.

    Attributes:
        sample: zero-based position in the shard.
        key: the sample's key.
        offset: first byte of its members in the shard.
        length: number of bytes of its members, with headers and padding.
        label: integer label, if it has one.
        crc32: see :class:`hapi_protocol.shards.Sample`; None in an index of
            version 1.
    """

    sample: int
    key: str
    offset: int
    length: int
    label: int | None
    crc32: int | None = None


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard, in its order.

    Attributes:
        name: object name inside the container.
        etag: bare ETag of the object that the rows describe.
        rows: the samples, by position.
    """

    name: str
    etag: str
    rows: tuple[IndexRow, ...]

    @property
    def has_checksums(self) -> bool:
        return all(row.crc32 is not None for row in self.rows)


@dataclass(frozen=True)
class Span:
    """Consecutive samples of one shard."""

    shard: str
    etag: str
    rows: tuple[IndexRow, ...]

    @property
    def samples(self) -> SampleRange:
        return SampleRange(self.rows[0].sample, self.rows[-1].sample)

    @property
    def byte_range(self) -> ByteRange:
        last = self.rows[-1]
        return ByteRange(self.rows[0].offset, last.offset + last.length - 1)

    @property
    def crc32s(self) -> tuple[int, ...]:
        """CRC-32 of each sample; empty if the index has none."""
        found = [row.crc32 for row in self.rows if row.crc32 is not None]
        return tuple(found) if len(found) == len(self.rows) else ()

    def __str__(self) -> str:
        """The span as text: ``train/0003.tar 0-63``."""
        return f"{self.shard} {self.samples}"

    def part(self, first: int, stop: int) -> Span:
        """The span of the rows ``first`` to ``stop - 1``."""
        if (first, stop) == (0, len(self.rows)):
            return self
        return Span(self.shard, self.etag, self.rows[first:stop])


@dataclass(frozen=True)
class DataIndex:
    """All shards of a data set, in order.

    Attributes:
        shards: all shards, in name order.
        class_names: name of each integer label; empty if unknown.
    """

    shards: tuple[ShardIndex, ...]
    class_names: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return sum(len(shard.rows) for shard in self.shards)

    @property
    def etags(self) -> Mapping[str, str]:
        """ETag of each shard, by name."""
        return {shard.name: shard.etag for shard in self.shards}

    @property
    def unchecked_shards(self) -> int:
        """Number of shards whose samples have no checksums."""
        return sum(not shard.has_checksums for shard in self.shards)

    def spans(
        self,
        max_samples: int = MAX_SPAN_SAMPLES,
        max_bytes: int = MAX_SPAN_BYTES,
    ) -> list[Span]:
        """The fixed partition of the data set into spans.

        A span ends before the sample that would exceed ``max_samples`` or
        ``max_bytes``; a sample larger than ``max_bytes`` is its own span.
        """
        return [
            Span(shard.name, shard.etag, tuple(rows))
            for shard in self.shards
            for rows in _runs(shard.rows, max_samples, max_bytes)
        ]

    def to_bytes(self) -> bytes:
        """The Arrow IPC stream that is stored."""
        import pyarrow as pa

        facts = {
            "version": INDEX_VERSION,
            "class_names": list(self.class_names),
        }
        schema = _schema().with_metadata(
            {_METADATA: json.dumps(facts).encode()}
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for shard in self.shards:
                writer.write_batch(_shard_batch(shard, schema))
        return bytes(sink.getvalue())

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = INDEX_NAME) -> DataIndex:
        """Reads an index.

        Args:
            data: the stored Arrow IPC stream.
            name: name of the index object, for errors.

        Raises:
            DataIndexError: names the index object and what is wrong.
        """
        import pyarrow as pa

        try:
            with pa.ipc.open_stream(data) as reader:
                facts = json.loads((reader.schema.metadata or {})[_METADATA])
                version = facts["version"]
                if version not in range(1, INDEX_VERSION + 1):
                    raise _bad_index(name, f"version {version!r}")
                if reader.schema.names != _schema(version).names:
                    raise _bad_index(name, f"columns {reader.schema.names}")
                rows = (row for batch in reader for row in batch.to_pylist())
                shards = tuple(_group(rows, name))
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            raise _bad_index(name, str(error)) from error
        return cls(shards, tuple(facts.get("class_names", ())))

    def replace(self, new: Iterable[ShardIndex]) -> DataIndex:
        """This index with shards added, or replaced by name."""
        shards = {shard.name: shard for shard in self.shards}
        shards.update((shard.name, shard) for shard in new)
        return DataIndex(
            tuple(shards[name] for name in sorted(shards)), self.class_names
        )


def _bad_index(name: str, reason: str) -> DataIndexError:
    return DataIndexError(
        "bad_index",
        f"{name} is no index of version 1 to {INDEX_VERSION}: {reason}; "
        "rewrite it with 'hapi index'",
        object_name=name,
    )


def _runs(
    rows: Sequence[IndexRow], max_samples: int, max_bytes: int
) -> Iterator[list[IndexRow]]:
    run: list[IndexRow] = []
    for row in rows:
        if run and (
            len(run) >= max_samples
            or row.offset + row.length - run[0].offset > max_bytes
        ):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _shard_batch(shard: ShardIndex, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    count = len(shard.rows)
    zeros = pa.array([0] * count, pa.int32())
    columns = [
        pa.DictionaryArray.from_arrays(zeros, pa.array([shard.name])),
        pa.DictionaryArray.from_arrays(zeros, pa.array([shard.etag])),
        pa.array([row.sample for row in shard.rows], pa.int32()),
        pa.array([row.key for row in shard.rows], pa.utf8()),
        pa.array([row.offset for row in shard.rows], pa.int64()),
        pa.array([row.length for row in shard.rows], pa.int64()),
        pa.array([row.label for row in shard.rows], pa.int64()),
        pa.array([row.crc32 for row in shard.rows], pa.uint32()),
    ]
    return pa.record_batch(columns, schema=schema)


def _group(
    rows: Iterable[Mapping[str, object]], name: str
) -> Iterator[ShardIndex]:
    shards: dict[tuple[str, str], list[IndexRow]] = {}
    for row in rows:
        fields = dict(row)
        shard_key = (str(fields.pop("shard")), str(fields.pop("source_etag")))
        shards.setdefault(shard_key, []).append(IndexRow(**fields))  # type: ignore[arg-type]
    names = [shard for shard, _ in shards]
    if len(set(names)) != len(names):
        raise _bad_index(name, "a shard is listed with two ETags")
    for (shard, etag), shard_rows in shards.items():
        _check_rows(shard, shard_rows, name)
        yield ShardIndex(shard, etag, tuple(shard_rows))


def _check_rows(shard: str, rows: Sequence[IndexRow], name: str) -> None:
    end = 0
    for position, row in enumerate(rows):
        if row.sample != position or row.offset < end or row.length <= 0:
            raise _bad_index(
                name, f"shard {shard}: sample {row.sample} is out of place"
            )
        end = row.offset + row.length
