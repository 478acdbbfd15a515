"""Parts of a job that loaders of an epoch use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hapi_client.caching.feature_cache import FeatureCache
from hapi_client.loading.skipped_samples import SkippedSamples
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.sampling.partition import SpanSlice
from hapi_protocol.data_index import Span

LabelledBatch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Features and labels of one batch."""


def skip_remedy(span: Span, row: int) -> str:
    """Returns advice on a sample that cannot be decoded."""
    return (
        "repair it, or leave such samples out with on_error='skip' "
        "(--skip-bad-samples)"
    )


@dataclass(frozen=True)
class LoaderPlan:
    """Parts of a job that a loader uses.

    Attributes:
        spans: spans of the data set.
        labels: labels of each span, ``[samples]`` int64.
        run_suffix: computes features at the freeze point from a cut and
            features ``[n, *shape at cut]``, under ``inference_mode``.
        on_error: ``raise``, or ``skip`` with a count.
        recorder: records this epoch.
        span_arrived: called after each span, in the training loop's thread.
        needs_every_step: True if no step may be left out, because other
            ranks take the same steps or the loop counts them.
        remedy: returns advice on a sample that cannot be decoded, from its
            span and row.
        cache: cached features of the data set; None for none.
        skipped: samples that the job leaves out.
    """

    spans: Sequence[Span]
    labels: Sequence[npt.NDArray[np.int64]]
    run_suffix: Callable[[int, torch.Tensor], torch.Tensor]
    on_error: str
    recorder: EpochRecorder
    span_arrived: Callable[[], None] = lambda: None
    needs_every_step: bool = False
    remedy: Callable[[Span, int], str] = skip_remedy
    cache: FeatureCache | None = None
    skipped: SkippedSamples = field(default_factory=SkippedSamples)

    def span_of(self, piece: SpanSlice) -> Span:
        """Returns the part of a span that a slice covers."""
        return self.spans[piece.span].part(piece.first, piece.stop)

    def labels_of(self, piece: SpanSlice) -> npt.NDArray[np.int64]:
        """Returns the labels of a slice's samples, ``[samples]``."""
        return self.labels[piece.span][piece.first : piece.stop]
