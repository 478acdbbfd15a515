"""What flows through a job's pipeline: samples, then micro-batches."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt
import torch

from hapi_protocol.features import Row
from hapi_protocol.shards import Sample
from hapi_worker.decode import Decoder
from hapi_worker.forward import Computed


class Compute(Protocol):
    """What a job does with its samples; None of it for an index."""

    @property
    def decoder(self) -> Decoder:
        """Sample → one input of the model."""

    @property
    def input_bytes(self) -> int:
        """Of one input."""

    def batch_limit(self) -> int:
        """Most samples of a micro-batch, for now."""

    def run(self, images: torch.Tensor) -> Computed:
        """Called on the device's thread."""


ROW_BYTES = 512
"""Charged for a row beside its image and its texts."""


@dataclass
class Slot:
    """A sample between the body and its micro-batch."""

    row: Row
    sample: Sample | None
    charged_bytes: int
    image: torch.Tensor | None = None
    ready_at: float | None = None
    decode_seconds: float = 0.0
    decode_cpu: float = 0.0


@dataclass
class Batch:
    """A micro-batch, in shard order; ``computed`` when it is done."""

    rows: list[Row]
    timings: dict[str, float]
    images: torch.Tensor | None = None
    computed: Computed | None = None
    done: bool = False
    submitted: float = field(default_factory=time.monotonic)

    @property
    def features(self) -> npt.NDArray[Any] | None:
        """``[rows without error, *shape]``; None without such rows."""
        return None if self.computed is None else self.computed.features


def row_bytes(row: Row) -> int:
    """Memory that a row takes, its image apart; an upper bound."""
    # Four bytes a character: Python's widest strings.
    return ROW_BYTES + 4 * (
        len(row.key) + len(row.meta or "") + len(row.error or "")
    )


def row_of(sample: Sample) -> Row:
    """The sample's row, as long as nothing is wrong with it."""
    label, meta = sample.label_and_meta()
    return Row(
        index=sample.index,
        key=sample.key,
        label=label,
        meta=meta,
        offset=sample.offset,
        length=sample.length,
    )
