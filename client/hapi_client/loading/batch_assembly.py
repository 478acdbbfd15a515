"""Assembles batches from the samples of spans at the freeze point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hapi_client.caching.feature_cache import CachedSlice
from hapi_client.loading.loader_plan import LabelledBatch, LoaderPlan
from hapi_client.loading.span_source import LoadedSpan
from hapi_client.metrics.events import LAYERS
from hapi_client.sampling.sampler import ReaderBatch, ReadPlan
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import ClientError, HapiError


@dataclass(frozen=True)
class _Failure:
    """A sample that cannot be decoded."""

    span: Span
    row: int
    message: str

    def __str__(self) -> str:
        # The worker's message begins with the key too.
        why = self.message.removeprefix(f"sample {self._key!r}").lstrip(": ")
        return f"sample {self._key!r} of shard {self.span.shard}: {why}"

    @property
    def _key(self) -> str:
        return self.span.rows[self.row].key

    def error(self, message: str) -> HapiError:
        return ClientError(
            "bad_sample",
            message,
            object_name=self.span.shard,
            details={"key": self._key},
        )


@dataclass
class _ReadySpan:
    """Samples of a span at the freeze point that wait for their batch."""

    span: Span
    features: dict[int, torch.Tensor]
    failures: Mapping[int, str]
    labels: npt.NDArray[np.int64]
    num_left: int

    def failure(self, row: int) -> _Failure:
        return _Failure(self.span, row, self.failures[row])


class BatchAssembler:
    """Holds spans until all their samples are in batches.

    Args:
        plan: parts of the job.
        reading: slices of spans, and the batches to make of them.
        device: device of the batches.

    Attributes:
        last_rows: samples of the last batch, in order.
        last_sizes: their number by rank, as :attr:`.ReaderBatch.sizes`.
    """

    def __init__(
        self, plan: LoaderPlan, reading: ReadPlan, device: torch.device
    ) -> None:
        self.last_rows: list[IndexRow] = []
        self.last_sizes: tuple[int, ...] = ()
        self._plan = plan
        self._reading = reading
        self._device = device
        self._window: dict[int, _ReadySpan] = {}
        # Loaded slices that wait until they fill a batch of the layers.
        self._pending: dict[int, LoadedSpan] = {}
        self._pending_batch = (0, 0)
        self._num_failures = 0
        self._first_failure: _Failure | None = None

    def __contains__(self, position: int) -> bool:
        """Returns True if the slice at a position was added."""
        return position in self._window

    def add_loaded(self, position: int, loaded: LoadedSpan) -> None:
        """Adds a loaded slice.

        Its features at the freeze point are computed when there are enough
        samples for a batch, or :meth:`gather` needs them: short slices share
        a batch.
        """
        self._add(position, CachedSlice({}, loaded.failures))
        size = self._plan.batch_samples(loaded.span.span_samples)
        if self._pending_batch != (loaded.cut, size):
            self._compute()
            self._pending_batch = loaded.cut, size
        self._pending[position] = loaded
        if sum(len(span.features) for span in self._pending.values()) >= size:
            self._compute()

    def _compute(self) -> None:
        """Computes the features of the pending slices at the freeze point."""
        pending, self._pending = self._pending, {}
        if not pending:
            return
        (cut, size), plan = self._pending_batch, self._plan
        samples = [loaded.features for loaded in pending.values()]
        together = samples[0] if len(samples) == 1 else torch.cat(samples)
        num_failures = sum(len(loaded.failures) for loaded in pending.values())
        with (
            plan.recorder.stage(
                LAYERS, len(together), cut=cut, failures=num_failures
            ),
            torch.inference_mode(),
        ):
            computed = plan.run_suffix(cut, together, size)
            if self._device.type == "cpu":
                computed = computed.cpu()
        for (position, loaded), features in zip(
            pending.items(),
            torch.split(computed, [*map(len, samples)]),
            strict=True,
        ):
            if plan.cache is not None:
                piece = self._reading.pieces[position]
                plan.cache.put(piece, features, loaded.failures)
            num_rows = len(loaded.span.rows)
            good = [r for r in range(num_rows) if r not in loaded.failures]
            # Clones: a view would keep the whole span in memory until its
            # last sample is used, and autograd may save these.
            self._window[position].features.update(
                (row, sample.clone())
                for row, sample in zip(good, features, strict=True)
            )

    def add_cached(self, position: int) -> bool:
        """Adds a cached slice; returns False if it is damaged."""
        assert self._plan.cache is not None, "it holds the slice"
        cached = self._plan.cache.get(self._reading.pieces[position])
        if cached is None:
            return False
        self._plan.recorder.count(local_hits=len(cached.features))
        self._plan.recorder.prepared(
            len(cached.features) + len(cached.failures)
        )
        self._add(position, cached)
        return True

    def _add(self, position: int, samples: CachedSlice) -> None:
        piece = self._reading.pieces[position]
        self._window[position] = _ReadySpan(
            self._plan.span_of(piece),
            dict(samples.features),
            samples.failures,
            self._plan.labels_of(piece),
            len(piece),
        )

    def check(self, position: int) -> None:
        """Raises or counts a slice's bad samples; called in their order."""
        ready = self._window[position]
        if not ready.failures:
            return
        failure = ready.failure(min(ready.failures))
        if self._plan.on_error == "raise":
            remedy = self._plan.remedy(failure.span, failure.row)
            raise failure.error(f"{failure}; {remedy}")
        self._plan.recorder.count(skipped=len(ready.failures))
        self._num_failures += len(ready.failures)
        self._first_failure = self._first_failure or failure
        for row in ready.failures:
            self._plan.skipped.add(ready.span, row)

    def tell_skipped(self) -> None:
        """Says, once in a job, how many samples were left out."""
        if self._first_failure is not None and self.last_rows:
            total = sum(map(len, self._reading.pieces))
            self._plan.skipped.tell(
                f"left out {self._num_failures} of {total} samples, which "
                f"cannot be decoded; the first is {self._first_failure}; "
                "later epochs only count them (job.stats.skipped)"
            )

    def gather(self, batch: ReaderBatch) -> LabelledBatch | None:
        """Returns a batch; None if none of its samples can be decoded.

        Raises:
            ClientError: ``bad_sample`` for such a batch, if steps must not
                be left out.
        """
        self._compute()
        features: list[torch.Tensor] = []
        is_kept = []
        labels = []
        rows = []
        lost: _Failure | None = None
        for position, row in zip(
            batch.positions.tolist(), batch.rows.tolist(), strict=True
        ):
            ready = self._window[position]
            is_kept.append(row in ready.features)
            if is_kept[-1]:
                features.append(ready.features.pop(row))
                labels.append(int(ready.labels[row]))
                rows.append(ready.span.rows[row])
            else:
                lost = lost or ready.failure(row)
            ready.num_left -= 1
            if not ready.num_left:
                del self._window[position]
        if lost and not features and self._plan.empty_steps == "raise":
            raise _lost_step(batch, lost)
        if not features and self._plan.empty_steps == "skip":
            return None
        if self._device.type != "cpu":
            features = [rows.to(self._device) for rows in features]
        self.last_rows = rows
        by_rank = np.split(np.array(is_kept), np.cumsum(batch.sizes)[:-1])
        self.last_sizes = tuple(int(part.sum()) for part in by_rank)
        return (
            torch.stack(features) if features else torch.empty(0),
            torch.tensor(labels, dtype=torch.int64, device=self._device),
        )

    def check_empty_epoch(self) -> None:
        """Raises if an epoch without a batch has lost samples."""
        if self._plan.empty_steps == "deliver" and not self._reading.is_whole:
            # Other workers may have had samples.
            return
        first = self._first_failure
        # A resumed epoch may have had batches before.
        if first and not self._reading.batches[0].step:
            raise _lost_epoch(self._num_failures, first)


def _lost_step(batch: ReaderBatch, first: _Failure) -> HapiError:
    return first.error(
        f"none of this rank's {len(batch)} samples of step {batch.step} can "
        "be decoded, and the step cannot be skipped, because other ranks take "
        f"it or the loop counts it; the first is {first}; repair them, or use "
        "larger batches"
    )


def _lost_epoch(num_samples: int, first: _Failure) -> HapiError:
    return first.error(
        f"none of the {num_samples} samples of this epoch can be decoded; "
        f"the first is {first}; repair them, or use other data"
    )
