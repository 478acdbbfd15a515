"""Extraction of a data set's features into a file, for other tools."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyarrow import RecordBatch

from hapi_client.atomic_file import check_writable, file_lock, write_atomically
from hapi_client.data.splits import TRAIN, DataSet
from hapi_client.export.feature_writers import (
    Contents,
    SampleSource,
    check_free_space,
    check_suffix,
    open_writer,
)
from hapi_client.job.transfer_job import TransferJob
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import IndexRow
from hapi_protocol.errors import ClientError


@dataclass(frozen=True)
class Extraction:
    """Result of :func:`extract`.

    Attributes:
        path: path of the file.
        samples: number of samples in it.
        skipped: number of samples left out because they cannot be decoded.
        shape: shape of one sample's features.
        length_bytes: size of the file.
        about: description of the features, as stored in the file.
    """

    path: Path
    samples: int
    skipped: int
    shape: tuple[int, ...]
    length_bytes: int
    about: Mapping[str, Any]


def check_target(path: Path, *, overwrite: bool = False) -> None:
    """Checks, before any work, that features can be written to ``path``.

    Raises:
        ClientError: ``bad_configuration`` naming the reason if not.
    """
    check_suffix(path)
    if path.is_dir():
        raise ClientError("bad_configuration", f"{path} is a folder")
    if path.exists() and not overwrite:
        raise ClientError(
            "bad_configuration",
            f"{path} already exists; choose another name, or overwrite it "
            "(--force)",
        )
    check_writable(path)


def extract(
    job: TransferJob,
    path: Path | str,
    *,
    split: str = TRAIN,
    overwrite: bool = False,
    about: Mapping[str, Any] | None = None,
    on_samples: Callable[[int, int], None] = lambda done, total: None,
) -> Extraction:
    """Writes the features of a split, in the order of its index.

    Images are not augmented.  The file is written atomically; an interrupted
    run has to start again.  Memory is limited to a few megabytes in addition
    to the job's prefetching, and to all keys and labels for ``.npz``.

    Args:
        job: its ``on_error`` decides about samples that cannot be decoded;
            ``labels="optional"`` accepts data without labels.
        path: file ending in ``.parquet``, ``.arrow`` or ``.npz``.
        split: split of the job's data.
        overwrite: replace an existing file.
        about: additional description of the features, as JSON.
        on_samples: called with the number of finished samples and of all.

    Raises:
        ClientError: ``bad_configuration`` if the file cannot be written,
            ``bad_sample`` naming a sample that cannot be decoded.
        HapiError: if a sample cannot be read.
    """
    path = Path(path)
    check_target(path, overwrite=overwrite)
    data = job.pipeline.data.split(split)
    contents = Contents(
        job.feature_shape,
        data.num_samples,
        data.class_names,
        {**_description(job), "data_digest": data.digest(), **(about or {})},
    )
    check_free_space(path, contents)
    with (
        file_lock(path),
        write_atomically(path) as file,
        open_writer(path, file, contents) as write,
        closing(_batches(job, split, contents)) as batches,
    ):
        samples = 0
        for batch in batches:
            write(batch)
            samples += len(batch)
            on_samples(samples, data.num_samples)
    return Extraction(
        path,
        samples,
        data.num_samples - samples,
        contents.shape,
        path.stat().st_size,
        contents.about,
    )


def _description(job: TransferJob) -> dict[str, Any]:
    facts = job.features_facts()
    return {
        "hapi": version("swift-hapi"),
        **{name: facts[name] for name in ("freeze", "weights", "transform")},
        "cut": job.cut,
        "encodings": list(job.pipeline.plan.encodings),
        "shape": list(job.feature_shape),
    }


def _batches(
    job: TransferJob, split: str, contents: Contents
) -> Generator[RecordBatch, None, None]:
    sources = _sources(job.pipeline.data.split(split))
    with closing(job.pipeline.loader(split=split, shared=False)) as loader:
        for features, labels in loader:
            yield contents.batch(
                [
                    # The loader has their order, and leaves some out.
                    next(source for source, row in sources if row is loaded)
                    for loaded in loader.rows
                ],
                labels.cpu().numpy(),
                features.float().cpu().numpy(),
            )


def _sources(data: DataSet) -> Iterator[tuple[SampleSource, IndexRow]]:
    """Yields all samples in the order of the index."""
    for span, location in zip(data.spans, data.locations, strict=True):
        for row in span.rows:
            name = row.key if span.is_group else span.shard
            path = str(Location(span.container, name))
            yield SampleSource(row.key, path, str(location)), row
