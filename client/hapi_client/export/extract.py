"""Features of a data set into a file, for other tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hapi_client.atomic_file import check_writable, file_lock, write_atomically
from hapi_client.data.splits import TRAIN
from hapi_client.export.feature_writers import (
    Contents,
    FeatureWriter,
    Rows,
    check_room,
    check_suffix,
    open_writer,
)
from hapi_client.job.transfer_job import TransferJob
from hapi_protocol.errors import ClientError


@dataclass(frozen=True)
class Extraction:
    """What :func:`extract` did.

    Attributes:
        path: of the file.
        samples: in it.
        skipped: left out, since they could not be decoded.
        shape: of one sample's features.
        length_bytes: of the file.
        about: what the features are, as it stands in the file.
    """

    path: Path
    samples: int
    skipped: int
    shape: tuple[int, ...]
    length_bytes: int
    about: Mapping[str, Any]


def check_place(path: Path, *, overwrite: bool = False) -> None:
    """Whether features may be written there, before any work.

    Raises:
        ClientError: ``bad_configuration`` saying why not.
    """
    check_suffix(path)
    if path.is_dir():
        raise ClientError("bad_configuration", f"{path} is a folder")
    if path.exists() and not overwrite:
        raise ClientError(
            "bad_configuration",
            f"{path} is there already; give another name, or overwrite it "
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

    Images are not augmented.  The file is whole and on the disk at the end,
    or not there; a run that was broken off begins anew.  A few megabytes are
    held in memory beside what the job fetches ahead, and for ``.npz`` all keys
    and labels.

    Args:
        job: its ``on_error`` says whether samples that cannot be decoded are
            left out; ``labels="optional"`` takes data without labels.
        path: ends in ``.parquet``, ``.arrow`` or ``.npz``.
        split: of the job's data.
        overwrite: a file that is there already.
        about: more that the file shall say of the features, fit for JSON.
        on_samples: told how many samples were had, and of how many.

    Raises:
        ClientError: ``bad_configuration`` where it cannot be written,
            ``bad_sample`` naming a sample that cannot be decoded.
        HapiError: of the first sample that cannot be had.
    """
    path = Path(path)
    check_place(path, overwrite=overwrite)
    data = job.data_set(split)
    contents = Contents(
        job.feature_shape,
        data.num_samples,
        data.class_names,
        {**_facts(job), "data_digest": data.digest(), **(about or {})},
    )
    check_room(path, contents)
    with (
        file_lock(path),
        write_atomically(path) as file,
        open_writer(path, file, contents) as writer,
    ):
        samples = _write(job, split, writer, on_samples)
    return Extraction(
        path,
        samples,
        data.num_samples - samples,
        contents.shape,
        path.stat().st_size,
        contents.about,
    )


def _facts(job: TransferJob) -> dict[str, Any]:
    found = job.features_facts()
    return {
        "hapi": version("swift-hapi"),
        **{name: found[name] for name in ("freeze", "weights", "transform")},
        "cut": job.cut,
        "encodings": list(job.encodings),
        "shape": list(job.feature_shape),
    }


def _write(
    job: TransferJob,
    split: str,
    writer: FeatureWriter,
    on_samples: Callable[[int, int], None],
) -> int:
    """How many samples there were."""
    total = job.data_set(split).num_samples
    done = 0
    with closing(job.loader(split=split, shared=False)) as loader:
        for features, labels in loader:
            keys = loader.keys
            writer.write(
                Rows(keys, labels.cpu().numpy(), features.cpu().numpy())
            )
            done += len(keys)
            on_samples(done, total)
    return done
