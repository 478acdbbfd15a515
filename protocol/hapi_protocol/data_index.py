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
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hapi_protocol.arrow_messages import check_uncompressed
from hapi_protocol.errors import DataIndexError
from hapi_protocol.headers import ByteRange, SampleRange

if TYPE_CHECKING:
    import pyarrow as pa

INDEX_NAME = "hapi-index.arrow"
"""Base name of the index object, after the data set's prefix."""

INDEX_VERSION = 2
"""Version 1 has no column ``crc32``."""
DEFAULT_LABELS = "cls"
"""Default source of labels: ``.cls`` members, or that field of ``.json``."""
MAX_SPAN_SAMPLES = 64
"""Larger spans gain little: with 256, a simulated cluster computed the same
share next to the data (``docs/explanation/scale.rst``, "Proxies")."""
MIN_SPAN_SAMPLES = 8
"""Batch of the smallest forward pass on a CPU; smaller spans would leave parts
of batches empty."""
MIN_SPANS = 8
"""Spans of a small data set, at least: its first batch comes when the first of
them are computed, not the whole epoch."""
MAX_SPAN_BYTES = 16 * 1024 * 1024
"""Bounds what a retry repeats (decision 0004).  Chosen, not measured: 64
photographs of 108 kB, the common case, have less than half."""
_MAX_SHARD_BYTES = 1 << 50
"""Far beyond the largest object of segments that Swift's defaults allow
(1000 of 5 GiB)."""

_METADATA = b"hapi.index"
_DAMAGE = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RecursionError),
    *(TypeError, ValueError, struct.error),
)
"""Exceptions of a damaged index, besides those of pyarrow."""
_OPTIONAL_COLUMNS = ("label", "crc32")


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
        crc32: see :class:`hapi_protocol.samples.Sample`; None in an index of
            version 1.
        etag: bare ETag of the object that the sample is, if its shard is a
            group of objects; ``key`` is then the object's name, and offsets
            count the bytes of the group.
    """

    sample: int
    key: str
    offset: int
    length: int
    label: int | None
    crc32: int | None = None
    etag: str | None = None


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
        """True if each sample has a CRC-32, or an ETag of its own."""
        return all(
            row.crc32 is not None or row.etag is not None for row in self.rows
        )


@dataclass(frozen=True)
class Span:
    """Consecutive samples of one shard.

    Attributes:
        shard: object name of the shard.
        etag: bare ETag of the shard.
        rows: the samples, in order.
        container: the shard's container.
        whole: samples of the span that this is a part of; 0 if it is whole.
    """

    shard: str
    etag: str
    rows: tuple[IndexRow, ...]
    container: str = ""
    whole: int = 0

    @property
    def span_samples(self) -> int:
        """Samples of the whole span, by which batches are sized."""
        return self.whole or len(self.rows)

    @property
    def samples(self) -> SampleRange:
        return SampleRange(self.rows[0].sample, self.rows[-1].sample)

    @property
    def byte_range(self) -> ByteRange:
        last = self.rows[-1]
        return ByteRange(self.rows[0].offset, last.offset + last.length - 1)

    @property
    def is_group(self) -> bool:
        """True if the samples are objects of their own."""
        return self.rows[0].etag is not None

    @property
    def path(self) -> str:
        """``container/shard``."""
        return f"{self.container}/{self.shard}"

    @property
    def crc32s(self) -> tuple[int, ...]:
        """CRC-32 of each sample; empty if the index has none."""
        known = [row.crc32 for row in self.rows if row.crc32 is not None]
        return tuple(known) if len(known) == len(self.rows) else ()

    def __str__(self) -> str:
        """The span as text: ``train/0003.tar 0-63``."""
        return f"{self.shard} {self.samples}"

    def part(self, first: int, stop: int) -> Span:
        """The span of the rows ``first`` to ``stop - 1``."""
        if (first, stop) == (0, len(self.rows)):
            return self
        rows = self.rows[first:stop]
        return replace(self, rows=rows, whole=self.span_samples)


@dataclass(frozen=True)
class DataIndex:
    """All shards of a data set, in order.

    Attributes:
        shards: all shards, in name order; some may be empty.
        class_names: name of each integer label; empty if unknown.
        labels: where the labels come from: ``cls`` or ``json:FIELD``.
        labels_are_names: True if samples state names of classes, False if
            they state integers.
    """

    shards: tuple[ShardIndex, ...]
    class_names: tuple[str, ...] = ()
    labels: str = DEFAULT_LABELS
    labels_are_names: bool = False

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
        max_samples: int | None = None,
        max_bytes: int = MAX_SPAN_BYTES,
        *,
        container: str = "",
    ) -> list[Span]:
        """The fixed partition of the data set into spans.

        A span ends before the sample that would exceed ``max_samples`` or
        ``max_bytes``; a sample larger than ``max_bytes`` is its own span.
        The default of ``max_samples`` is :func:`suited_span_samples`.
        """
        if max_samples is None:
            max_samples = suited_span_samples(len(self))
        return [
            Span(shard.name, shard.etag, tuple(rows), container)
            for shard in self.shards
            for rows in _runs(shard.rows, max_samples, max_bytes)
        ]

    def to_bytes(self) -> bytes:
        """The Arrow IPC stream that is stored."""
        import pyarrow as pa

        facts = {
            "version": INDEX_VERSION,
            "class_names": list(self.class_names),
            "labels": self.labels,
            "labels_are_names": self.labels_are_names,
            "num_samples": len(self),
            "empty": {s.name: s.etag for s in self.shards if not s.rows},
            "objects": {
                shard.name: [row.etag for row in shard.rows]
                for shard in self.shards
                if shard.rows and shard.rows[0].etag is not None
            },
        }
        schema = _schema().with_metadata(
            {_METADATA: json.dumps(facts).encode()}
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for shard in self.shards:
                if shard.rows:
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
            check_uncompressed(data)
            with pa.ipc.open_stream(data) as reader:
                facts = json.loads((reader.schema.metadata or {})[_METADATA])
                version = facts["version"]
                if version not in range(1, INDEX_VERSION + 1):
                    raise _bad_index(name, f"version {version!r}")
                if not reader.schema.equals(_schema(version)):
                    raise _bad_index(name, _columns_text(reader.schema))
                rows = (row for batch in reader for row in _rows(batch))
                objects = facts.get("objects", {})
                shards = [
                    _with_etags(shard, objects[shard.name])
                    if shard.name in objects
                    else shard
                    for shard in _group(rows, name)
                ]
                for shard, etag in facts.get("empty", {}).items():
                    _check_name(str(shard), name)
                    shards.append(ShardIndex(str(shard), str(etag), ()))
                class_names = tuple(map(str, facts.get("class_names", ())))
        except (pa.ArrowException, *_DAMAGE) as error:
            raise _bad_index(name, str(error)) from error
        # An Arrow stream that was cut off after a batch can be read.
        num_samples = sum(len(shard.rows) for shard in shards)
        expected = facts.get("num_samples", num_samples)
        if num_samples != expected:
            raise _bad_index(
                name, f"{num_samples} of {expected} samples are there"
            )
        return cls(
            tuple(sorted(shards, key=lambda shard: shard.name)),
            class_names,
            str(facts.get("labels", DEFAULT_LABELS)),
            facts.get("labels_are_names") is True,
        )

    def part(self, names: Iterable[str]) -> DataIndex:
        """The index of some of its shards, in the given order."""
        shards = {shard.name: shard for shard in self.shards}
        return replace(self, shards=tuple(shards[name] for name in names))


def suited_span_samples(num_samples: int) -> int:
    """Maximum number of samples of a span of a data set of so many."""
    size = MAX_SPAN_SAMPLES
    while size > MIN_SPAN_SAMPLES and MIN_SPANS * size > num_samples:
        size //= 2
    return size


def _bad_index(name: str, reason: str) -> DataIndexError:
    return DataIndexError(
        "bad_index",
        f"{name} is no index of version 1 to {INDEX_VERSION}: {reason}; "
        "rewrite it with 'hapi index'",
        object_name=name,
    )


def _with_etags(shard: ShardIndex, etags: Sequence[object]) -> ShardIndex:
    rows = zip(shard.rows, etags, strict=True)
    return replace(
        shard, rows=tuple(replace(row, etag=str(etag)) for row, etag in rows)
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

    zeros = pa.array([0] * len(shard.rows), pa.int32())
    columns = [
        pa.DictionaryArray.from_arrays(zeros, pa.array([shard.name])),
        pa.DictionaryArray.from_arrays(zeros, pa.array([shard.etag])),
        *(
            pa.array([getattr(r, field.name) for r in shard.rows], field.type)
            for field in [*schema][2:]
        ),
    ]
    return pa.record_batch(columns, schema=schema)


def _columns_text(schema: pa.Schema) -> str:
    columns = (f"{field.name} ({field.type})" for field in schema)
    return f"columns {', '.join(columns):.500}"


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, object]]:
    """Yields the rows of a batch whose schema was checked.

    Without the validation, changed bytes crash the process.
    """
    batch.validate(full=True)
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count and name not in _OPTIONAL_COLUMNS:
            raise ValueError(f"the column {name} has empty rows")
        if hasattr(column, "dictionary"):
            # One text for all its rows, however long it is.
            texts = column.dictionary.to_pylist()
            columns.append(
                [texts[index] for index in column.indices.to_pylist()]
            )
        else:
            columns.append(column.to_pylist())
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


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
        _check_name(shard, name)
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
        if end > _MAX_SHARD_BYTES:
            raise _bad_index(
                name, f"shard {shard}: sample {row.sample} ends at byte {end}"
            )


def _check_name(shard: str, name: str) -> None:
    """Refuses object names that a URL would change."""
    parts = shard.split("/")
    if not shard or "\0" in shard or "." in parts or ".." in parts:
        raise _bad_index(name, f"a shard has the name {shard!r:.200}")
