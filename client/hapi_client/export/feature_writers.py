"""Writers of feature files for other tools: Parquet, Arrow, NumPy.

Tables have the columns ``key``, ``object`` (URL of the shard, or of the file
that is a sample by itself), ``data_set``, ``label``, ``class_name`` if the
data set has class names, and ``features``, a fixed-shape tensor that other
readers see as a list of fixed size.  Keys are unique in their object only.
  Archives have arrays with these names in the plural.
The description of the features is JSON in the schema's metadata under
``hapi``, or in the array ``about``.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hapi_client.data.labels import UNLABELLED
from hapi_protocol.errors import ClientError
from hapi_splitter.units import bytes_text

ROW_GROUP_BYTES = 8 << 20
MAX_GROUP_ROWS = 16_384
METADATA = b"hapi"


@dataclass(frozen=True)
class Contents:
    """Contents of a file.

    Attributes:
        shape: shape of one sample's features.
        num_samples: maximum number of samples.
        class_names: names of the labels, if known.
        about: description of the features, as JSON.
    """

    shape: tuple[int, ...]
    num_samples: int
    class_names: Sequence[str]
    about: Mapping[str, Any]

    @property
    def feature_bytes(self) -> int:
        """Size of all features in memory."""
        return 4 * math.prod(self.shape) * self.num_samples

    @property
    def about_text(self) -> str:
        return json.dumps(dict(self.about))


class SampleSource(NamedTuple):
    """The place of a sample in the store.

    Attributes:
        key: key of the sample.
        object: URL of its shard, or of the file that it is.
        data_set: URL of its data set.
    """

    key: str
    object: str
    data_set: str


@dataclass(frozen=True)
class SampleRows:
    """Some samples.

    Attributes:
        sources: where the samples are stored.
        labels: ``[n]`` int64.
        features: ``[n, *shape]`` float32.
    """

    sources: Sequence[SampleSource]
    labels: npt.NDArray[np.int64]
    features: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.sources)

    @classmethod
    def joined(cls, parts: Sequence[SampleRows]) -> SampleRows:
        """Joins rows in the given order."""
        return cls(
            [each for part in parts for each in part.sources],
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.features for part in parts]),
        )


class FeatureWriter(Protocol):
    """Writes rows to a file."""

    def write(self, rows: SampleRows) -> None: ...


WriterContext: TypeAlias = AbstractContextManager[FeatureWriter]


class _TableWriter:
    """Writes record batches of a few megabytes, each a row group.

    Args:
        contents: contents of the file.
        schema: schema of the table.
        write_batch: writes a record batch to the file.
    """

    def __init__(
        self,
        contents: Contents,
        schema: pa.Schema,
        write_batch: Callable[[pa.RecordBatch], None],
    ) -> None:
        self._names = contents.class_names
        self._schema = schema
        self._write_batch = write_batch
        row_bytes = 4 * math.prod(contents.shape)
        self._group_rows = min(
            max(1, ROW_GROUP_BYTES // max(1, row_bytes)), MAX_GROUP_ROWS
        )
        self._waiting: list[SampleRows] = []

    def write(self, rows: SampleRows) -> None:
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= self._group_rows:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        rows = SampleRows.joined(self._waiting)
        self._waiting = []
        columns = [
            *(
                pa.array(column, pa.utf8())
                for column in zip(*rows.sources, strict=True)
            ),
            pa.array(rows.labels, mask=rows.labels == UNLABELLED),
            pa.FixedShapeTensorArray.from_numpy_ndarray(rows.features),
        ]
        if self._names:
            names = [
                None if label == UNLABELLED else self._names[label]
                for label in rows.labels
            ]
            columns.insert(-1, pa.array(names, pa.utf8()))
        self._write_batch(pa.record_batch(columns, schema=self._schema))


def _schema(contents: Contents) -> pa.Schema:
    features = pa.fixed_shape_tensor(pa.float32(), contents.shape)
    names = [pa.field("class_name", pa.utf8())] if contents.class_names else []
    return pa.schema(
        [
            *(
                pa.field(name, pa.utf8(), nullable=False)
                for name in SampleSource._fields
            ),
            pa.field("label", pa.int64()),
            *names,
            pa.field("features", features, nullable=False),
        ],
        {METADATA: contents.about_text.encode()},
    )


@contextmanager
def _parquet(file: IO[bytes], contents: Contents) -> Iterator[FeatureWriter]:
    schema = _schema(contents)
    names = ["object", "data_set"]
    if contents.class_names:
        names.append("class_name")
    with pq.ParquetWriter(
        file, schema, compression="zstd", use_dictionary=names
    ) as writer:
        table = _TableWriter(contents, schema, writer.write_batch)
        yield table
        table.flush()


@contextmanager
def _arrow(file: IO[bytes], contents: Contents) -> Iterator[FeatureWriter]:
    schema = _schema(contents)
    # Not compressed, so that readers can map it into memory.
    with pa.ipc.new_file(file, schema) as writer:
        table = _TableWriter(contents, schema, writer.write_batch)
        yield table
        table.flush()


class _ArchiveWriter:
    """Stages features in a temporary file.

    In an archive, the number of samples precedes them, but it is known only
    at the end.
    """

    def __init__(self, contents: Contents, staged: IO[bytes]) -> None:
        self._contents = contents
        self._staged = staged
        self._sources: list[SampleSource] = []
        self._labels: list[npt.NDArray[np.int64]] = []

    def write(self, rows: SampleRows) -> None:
        self._staged.write(np.ascontiguousarray(rows.features).data)
        self._sources += rows.sources
        self._labels.append(rows.labels)

    def save(self, file: IO[bytes]) -> None:
        self._staged.flush()
        shape = (len(self._sources), *self._contents.shape)
        features = np.memmap(self._staged, np.float32, "r", shape=shape)
        np.savez(
            file,
            features=features,
            labels=np.concatenate(self._labels),
            keys=np.array([each.key for each in self._sources]),
            objects=np.array([each.object for each in self._sources]),
            data_sets=np.array([each.data_set for each in self._sources]),
            class_names=np.array(self._contents.class_names, np.str_),
            about=np.array(self._contents.about_text),
        )


@contextmanager
def _archive(file: IO[bytes], contents: Contents) -> Iterator[FeatureWriter]:
    folder = Path(file.name).parent
    with tempfile.TemporaryFile(dir=folder) as staged:
        writer = _ArchiveWriter(contents, staged)
        yield writer
        writer.save(file)


@dataclass(frozen=True)
class _Format:
    """A file format.

    Attributes:
        open: opens a writer into a file.
        disk_ratio: minimum disk space while writing, divided by the size of
            the features.
    """

    open: Callable[[IO[bytes], Contents], WriterContext]
    disk_ratio: int


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        # Compressed, by an unknown ratio.
        ".parquet": _Format(_parquet, 0),
        ".arrow": _Format(_arrow, 1),
        ".npz": _Format(_archive, 2),
    }
)
SUFFIXES = tuple(_FORMATS)


def check_suffix(path: Path) -> None:
    """Checks that the suffix of a file names a format.

    Raises:
        ClientError: ``bad_configuration`` naming the allowed suffixes.
    """
    if path.suffix not in _FORMATS:
        raise ClientError(
            "bad_configuration",
            f"{path} has no known suffix; end its name in one of "
            f"{', '.join(SUFFIXES)}",
        )


def check_free_space(path: Path, contents: Contents) -> None:
    """Checks that the disk has space for the file.

    Raises:
        ClientError: ``bad_configuration`` if it has too little.
    """
    needed = _FORMATS[path.suffix].disk_ratio * contents.feature_bytes
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise ClientError(
            "bad_configuration",
            f"{path} needs {bytes_text(needed)} while it is written, but "
            f"{path.parent} has {bytes_text(free)} free; make room, choose "
            "another folder, or freeze a later layer",
        )


def open_writer(
    path: Path, file: IO[bytes], contents: Contents
) -> WriterContext:
    """Opens a writer of the format that the suffix of ``path`` names.

    Args:
        path: final path of the file.
        file: open file to write to.
        contents: contents of the file.
    """
    return _FORMATS[path.suffix].open(file, contents)
