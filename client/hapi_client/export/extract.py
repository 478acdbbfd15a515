"""Extraction of a data set's features into files, for other tools."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyarrow import RecordBatch

from hapi_client.atomic_file import check_writable, file_lock, write_atomically
from hapi_client.data.splits import TRAIN, DataSet
from hapi_client.export.feature_folder import (
    FeatureFolder,
    Part,
    check_folder,
    default_part_samples,
    parts_of,
)
from hapi_client.export.feature_writers import (
    Contents,
    SampleSource,
    check_free_space,
    check_suffix,
    open_writer,
)
from hapi_client.job.job_view import JobView
from hapi_client.job.transfer_job import TransferJob
from hapi_client.loading.feature_loader import FeatureLoader
from hapi_client.option_checks import check_integer
from hapi_client.sampling.distributed import this_rank
from hapi_client.sampling.partition import Reader
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import IndexRow
from hapi_protocol.errors import ClientError


@dataclass(frozen=True)
class Extraction:
    """Result of :func:`extract`.

    Attributes:
        path: path of the file or folder.
        samples: number of samples in it.
        skipped: number of samples left out because they cannot be decoded.
        shape: shape of one sample's features.
        length_bytes: size of the files.
        about: description of the features, as stored in the files.
        computed: number of samples that this call has written.
    """

    path: Path
    samples: int
    skipped: int
    shape: tuple[int, ...]
    length_bytes: int
    about: Mapping[str, Any]
    computed: int


def is_folder(path: Path | str) -> bool:
    """Returns True if a path ends in ``/``, or is a folder."""
    return str(path).endswith("/") or Path(path).is_dir()


def check_target(
    path: Path | str,
    *,
    overwrite: bool = False,
    part_samples: int | None = None,
) -> None:
    """Checks, before any work, that features can be written to ``path``.

    Raises:
        ClientError: ``bad_configuration`` naming the reason if not.
    """
    if part_samples is not None:
        check_integer("part_samples", part_samples, 1)
    if is_folder(path):
        if overwrite:
            raise _bad(
                f"{path} is a folder, which is not overwritten (--force); "
                "delete it, or give another"
            )
        check_folder(Path(path))
        return
    if part_samples is not None:
        raise _bad(
            f"part_samples (--part-samples) is for folders, but {path} is a "
            "file; end the name of a folder in /"
        )
    path = Path(path)
    check_suffix(path)
    if path.exists() and not overwrite:
        raise _bad(
            f"{path} already exists; choose another name, or overwrite it "
            "(--force)"
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
    part_samples: int | None = None,
) -> Extraction:
    """Writes the features of a split, in the order of its index.

    Images are not augmented.  Memory is limited to a few megabytes in
    addition to the job's prefetching, and to all keys and labels of a file
    for ``.npz``.

    A file is written atomically; an interrupted run has to start again.  A
    folder has files of some spans each, and a manifest.  A run continues what
    an interrupted one has left, and computes files again that are damaged.
    Ranks of torchrun, and any other processes with the same folder, share
    its files; each returns when all are complete.

    Args:
        job: its ``on_error`` decides about samples that cannot be decoded;
            ``labels="optional"`` accepts data without labels.
        path: file ending in ``.parquet``, ``.arrow`` or ``.npz``; or folder
            for Parquet files, ending in ``/`` unless it exists.
        split: split of the job's data.
        overwrite: replace an existing file.
        about: additional description of the features, as JSON.
        on_samples: called with the number of finished samples and of all.
        part_samples: maximum number of samples of a file of a folder, of
            which one has a span at least; None for 10,000, or fewer if the
            folder would have fewer than 16 files.

    Raises:
        ClientError: ``bad_configuration`` if the file cannot be written, or
            the folder has features of another run; ``bad_sample`` naming a
            sample that cannot be decoded.
        TooSlowError: if another process does not complete its file.
        HapiError: if a sample cannot be read.
    """
    check_target(path, overwrite=overwrite, part_samples=part_samples)
    work = _Extraction(job, split, about or {}, on_samples)
    if is_folder(path):
        return work.to_folder(Path(path), part_samples)
    return work.to_file(Path(path))


class _Extraction:
    """Writes features of a job's split."""

    def __init__(
        self,
        job: TransferJob,
        split: str,
        about: Mapping[str, Any],
        on_samples: Callable[[int, int], None],
    ) -> None:
        self._job, self._split, self._on_samples = job, split, on_samples
        self._data = job.pipeline.data.split(split)
        self._contents = contents_of(job, self._data, about)
        self._computed = 0

    def to_file(self, path: Path) -> Extraction:
        data = self._data
        part = Part(path.name, 0, len(data.spans), data.num_samples)
        with file_lock(path):
            facts = self._write(part, path)
        return self._result(path, [{**facts, "bytes": path.stat().st_size}])

    def to_folder(self, path: Path, part_samples: int | None) -> Extraction:
        data, rank = self._data, this_rank(os.environ)
        part_samples = part_samples or default_part_samples(data.num_samples)
        labels = hashlib.sha256(repr(data.class_names).encode())
        for numbers in data.labels:
            labels.update(numbers.tobytes())
        folder = FeatureFolder(
            path,
            {
                **self._contents.about,
                "labels": labels.hexdigest(),
                "part_samples": part_samples,
            },
            parts_of(data.sizes, part_samples),
        )
        folder.fill(self._write, rank)
        return self._result(path, [*folder.files.values()])

    def _write(self, part: Part, path: Path) -> dict[str, int]:
        """Writes a file; returns its numbers of samples."""
        contents = replace(self._contents, num_samples=part.num_samples)
        check_free_space(path, contents)
        samples = 0
        with (
            write_atomically(path) as file,
            open_writer(path, file, contents) as write,
            closing(self._loader(part)) as loader,
        ):
            data = self._data.part(part.first, part.stop)
            for batch in record_batches(loader, data, contents):
                write(batch)
                samples += len(batch)
                self._computed += len(batch)
                self._on_samples(self._computed, self._data.num_samples)
        return {"samples": samples, "skipped": part.num_samples - samples}

    def _loader(self, part: Part) -> FeatureLoader:
        pipeline, sizes = self._job.pipeline, self._data.sizes
        # Spans have the numbers of the whole split.
        share = pipeline.data.epochs.evaluation(
            [0] * part.first + sizes[part.first : part.stop],
            Reader(),
            drop_last=False,
        )
        is_whole = part.stop - part.first == len(sizes)
        reading = replace(share.read_plan, is_whole=is_whole)
        return pipeline.loader_of_share(
            replace(share, read_plan=reading),
            None,
            split=self._split,
            num_ranks=1,
            empty_steps="deliver",
        )

    def _result(
        self, path: Path, files: Sequence[Mapping[str, Any]]
    ) -> Extraction:
        samples, skipped, length_bytes = (
            sum(facts[name] for facts in files)
            for name in ("samples", "skipped", "bytes")
        )
        return Extraction(
            path,
            samples,
            skipped,
            self._contents.shape,
            length_bytes,
            self._contents.about,
            self._computed,
        )


def contents_of(
    job: JobView, data: DataSet, about: Mapping[str, Any]
) -> Contents:
    """Describes the features of a data set; ``about`` is added, as JSON."""
    facts = job.features_facts()
    return Contents(
        job.feature_shape,
        data.num_samples,
        data.class_names,
        {
            "hapi": version("swift-hapi"),
            **{
                name: facts[name]
                for name in ("freeze", "weights", "transform")
            },
            "cut": job.cut,
            "encodings": list(job.pipeline.plan.encodings),
            "shape": list(job.feature_shape),
            "data_digest": data.digest(),
            **about,
        },
    )


def record_batches(
    loader: FeatureLoader, data: DataSet, contents: Contents
) -> Generator[RecordBatch, None, None]:
    """Yields rows of a table for each batch of a loader.

    It loads the samples of ``data`` in their order, and may leave some out.
    """
    sources = _sources(data)
    for features, labels in loader:
        if not len(labels):
            continue
        yield contents.batch(
            [
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


def _bad(message: str) -> ClientError:
    return ClientError("bad_configuration", message)
