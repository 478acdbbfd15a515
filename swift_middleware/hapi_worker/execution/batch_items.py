"""Items of a job's pipeline: queued samples, then batches of rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from hapi_protocol.feature_stream import Row
from hapi_protocol.samples import LABEL_EXTENSION, Sample
from hapi_splitter.encodings import EncodedFeatures
from hapi_splitter.inputs.subprocess_decode import LargeImage

ROW_BYTES = 512
"""Bytes charged for a row in addition to its image and its texts."""


@dataclass(eq=False)
class QueuedSample:
    """A sample between the body and its micro-batch.

    Work that waits in a pool refers to this alone, so that a job that ends
    frees its samples at once.

    Attributes:
        large: the image while it waits for a process of its own.
        image: the input of the model, once it is decoded.
    """

    row: Row
    sample: Sample | None
    charged_bytes: int
    large: LargeImage | None = None
    image: torch.Tensor | None = None
    ready_at: float | None = None
    decode_seconds: float = 0.0
    decode_cpu: float = 0.0


@dataclass(eq=False)
class MicroBatch:
    """A job's rows of one micro-batch, in shard order.

    Attributes:
        images: inputs of the rows without error, until the pass has ended.
        encoded: features ``[rows without error, *shape]`` of the pass.
    """

    rows: list[Row]
    timings: dict[str, float]
    images: list[torch.Tensor] = field(default_factory=list)
    encoded: EncodedFeatures | None = None
    done: bool = False
    submitted: float = field(default_factory=time.monotonic)

    @property
    def features(self) -> npt.NDArray[Any] | None:
        """``[rows without error, *shape]``; None without such rows."""
        return None if self.encoded is None else self.encoded.array


def row_bytes(row: Row) -> int:
    """Upper bound of a row's memory without its image."""
    # Python's widest strings have four bytes per character.
    return ROW_BYTES + 4 * (
        len(row.key)
        + len(row.meta or "")
        + len(row.error or "")
        + len(row.cls or "")
    )


def row_of(sample: Sample, *, is_index: bool = False) -> Row:
    """Makes the row of a sample that is not decoded yet."""
    label, meta = sample.label_and_meta()
    return Row(
        index=sample.index,
        key=sample.key,
        label=label,
        meta=meta,
        error=sample.image_error() if is_index else sample.error,
        offset=sample.offset,
        length=sample.length,
        cls=sample.text(LABEL_EXTENSION) if is_index else None,
        crc32=sample.crc32,
    )
