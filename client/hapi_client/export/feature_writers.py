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
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hapi_client.data.labels import UNLABELLED
from hapi_protocol.errors import ClientError
from hapi_splitter.units import bytes_text

ROW_GROUP_BYTES = 8 << 20
METADATA = b"hapi"


class SampleSource(NamedTuple):
    """Location of a sample in the store.

    Attributes:
        key: key of the sample.
        object: URL of its shard, or of the file that it is.
        data_set: URL of its data set.
    """

    key: str
    object: str
    data_set: str


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

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of tables, with the description."""
        tensor = pa.fixed_shape_tensor(pa.float32(), self.shape)
        names = [pa.field("class_name", pa.utf8())]
        fields = [
            *(
                pa.field(name, pa.utf8(), nullable=False)
                for name in SampleSource._fields
            ),
            pa.field("label", pa.int64()),
            *(names if self.class_names else ()),
            pa.field("features", tensor, nullable=False),
        ]
        return pa.schema(fields, {METADATA: self.about_text.encode()})

    def batch(
        self,
        sources: Sequence[SampleSource],
        labels: npt.NDArray[np.int64],
        features: npt.NDArray[np.float32],
    ) -> pa.RecordBatch:
        """Makes rows of a table.

        Args:
            sources: where the n samples are stored.
            labels: ``[n]``.
            features: ``[n, *shape]``.
        """
        columns = dict(
            zip(SampleSource._fields, zip(*sources, strict=True), strict=True)
        )
        columns["label"] = pa.array(labels, mask=labels == UNLABELLED)
        if self.class_names:
            names = pa.array(self.class_names, pa.utf8())
            columns["class_name"] = names.take(columns["label"])
        columns["features"] = pa.FixedShapeTensorArray.from_numpy_ndarray(
            np.ascontiguousarray(features)
        )
        return pa.RecordBatch.from_pydict(columns, schema=self.schema)


WriteBatch: TypeAlias = Callable[[pa.RecordBatch], None]
"""Writes samples from :meth:`Contents.batch` to a file."""


@contextmanager
def _row_groups(
    write_table: Callable[[pa.Table], None],
) -> Iterator[WriteBatch]:
    """Joins record batches to tables of a few megabytes, each a row group."""
    waiting: list[pa.RecordBatch] = []
    num_bytes = 0

    def flush() -> None:
        nonlocal num_bytes
        if waiting:
            write_table(pa.Table.from_batches(waiting).combine_chunks())
            waiting.clear()
            num_bytes = 0

    def write(batch: pa.RecordBatch) -> None:
        nonlocal num_bytes
        waiting.append(batch)
        num_bytes += batch.nbytes
        if num_bytes >= ROW_GROUP_BYTES:
            flush()

    yield write
    flush()


@contextmanager
def _parquet(file: IO[bytes], contents: Contents) -> Iterator[WriteBatch]:
    names = {"object", "data_set", "class_name"} & {*contents.schema.names}
    with (
        pq.ParquetWriter(
            file,
            contents.schema,
            compression="zstd",
            use_dictionary=sorted(names),
        ) as writer,
        _row_groups(writer.write_table) as write,
    ):
        yield write


@contextmanager
def _arrow(file: IO[bytes], contents: Contents) -> Iterator[WriteBatch]:
    # Not compressed, so that readers can map it into memory.
    with (
        pa.ipc.new_file(file, contents.schema) as writer,
        _row_groups(writer.write_table) as write,
    ):
        yield write


@contextmanager
def _archive(file: IO[bytes], contents: Contents) -> Iterator[WriteBatch]:
    """Stages features in a temporary file.

    In an archive, the number of samples precedes them, but it is known only
    at the end.
    """
    names = [name for name in contents.schema.names if name != "features"]
    parts: list[pa.RecordBatch] = []
    with tempfile.TemporaryFile(dir=Path(file.name).parent) as staged:

        def write(batch: pa.RecordBatch) -> None:
            staged.write(batch["features"].to_numpy_ndarray().data)
            parts.append(batch.select(names))

        yield write
        staged.flush()
        table = pa.Table.from_batches(parts)
        shape = (len(table), *contents.shape)
        np.savez(
            file,
            features=np.memmap(staged, np.float32, "r", shape=shape),
            labels=table["label"].fill_null(UNLABELLED).to_numpy(),
            class_names=np.array(contents.class_names, np.str_),
            about=np.array(contents.about_text),
            keys=np.array(table["key"].to_pylist()),
            objects=np.array(table["object"].to_pylist()),
            data_sets=np.array(table["data_set"].to_pylist()),
        )


class _Format(NamedTuple):
    """A file format.

    Attributes:
        open: opens a writer into a file.
        disk_ratio: minimum disk space while writing, divided by the size of
            the features.
    """

    open: Callable[[IO[bytes], Contents], AbstractContextManager[WriteBatch]]
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
            f"{', '.join(SUFFIXES)}, or a folder's in /",
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
) -> AbstractContextManager[WriteBatch]:
    """Opens a writer of the format that the suffix of ``path`` names.

    Args:
        path: final path of the file.
        file: open file to write to.
        contents: contents of the file.
    """
    return _FORMATS[path.suffix].open(file, contents)
