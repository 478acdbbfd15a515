"""Parts of a job that loaders of an epoch use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

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
EmptySteps: TypeAlias = Literal["skip", "raise", "deliver"]
"""``skip`` leaves the step out.  ``raise`` refuses it, because other ranks
take the same steps or the loop counts them.  ``deliver`` yields a batch of 0
samples."""


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
        run_suffix: computes features at the freeze point from a cut,
            features ``[n, *shape at cut]`` and the size of a batch, under
            ``inference_mode``.
        batch_samples: returns that size from the samples of a whole span.
        on_error: ``raise``, or ``skip`` with a count.
        recorder: records this epoch.
        span_arrived: called after each span, in the training loop's thread.
        empty_steps: what becomes of a step whose samples are all bad.
        remedy: returns advice on a sample that cannot be decoded, from its
            span and row.
        cache: cached features of the data set; None for none.
        skipped: samples that the job leaves out.
    """

    spans: Sequence[Span]
    labels: Sequence[npt.NDArray[np.int64]]
    run_suffix: Callable[[int, torch.Tensor, int], torch.Tensor]
    batch_samples: Callable[[int], int]
    on_error: str
    recorder: EpochRecorder
    span_arrived: Callable[[], None] = lambda: None
    empty_steps: EmptySteps = "skip"
    remedy: Callable[[Span, int], str] = skip_remedy
    cache: FeatureCache | None = None
    skipped: SkippedSamples = field(default_factory=SkippedSamples)

    def span_of(self, piece: SpanSlice) -> Span:
        """Returns the part of a span that a slice covers."""
        return self.spans[piece.span].part(piece.first, piece.stop)

    def labels_of(self, piece: SpanSlice) -> npt.NDArray[np.int64]:
        """Returns the labels of a slice's samples, ``[samples]``."""
        return self.labels[piece.span][piece.first : piece.stop]
