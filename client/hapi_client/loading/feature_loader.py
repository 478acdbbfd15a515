"""Batches of features at the freeze point, and their labels."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hapi_client.loading.span_source import LoadedSpan
from hapi_client.metrics.counters import JobCounters
from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.reports.epoch_report import (
    LAYERS,
    PLANNING,
    TRAINING,
    WAITING,
)
from hapi_client.sampling.partition import SpanSlice
from hapi_client.sampling.sampler import Batch, ReadPlan
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import ClientError, HapiError

logger = logging.getLogger(__name__)

LabelledBatch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Features and labels of one batch."""


class LoadedSpans(Protocol):
    """What a loader takes spans from; see :class:`fetch.Prefetcher`."""

    def __iter__(self) -> Iterator[tuple[int, LoadedSpan]]: ...

    def close(self) -> None: ...


def skip_remedy(span: Span, row: int) -> str:
    """What to do about a sample that cannot be decoded."""
    return (
        "repair it, or leave such samples out with on_error='skip' "
        "(--skip-bad-samples)"
    )


@dataclass(frozen=True)
class LoaderPlan:
    """What a loader works with.

    Attributes:
        spans: of the data set.
        labels: of each span, ``[samples]`` int64.
        to_freeze_point: from (cut, ``[n, *shape at cut]``) to features
            at the freeze point, under ``inference_mode``.
        on_error: ``raise``, or ``skip`` with a count.
        counters: of the job.
        meter: measures the training loop's part of the time.
        span_came: called after each span, in the training loop's thread.
        needs_every_step: none may be left out, since others take the same
            steps, or the loop counts them.
        remedy: for a sample that cannot be decoded, of a span and its row.
        tally: of this pass.
    """

    spans: Sequence[Span]
    labels: Sequence[npt.NDArray[np.int64]]
    run_suffix: Callable[[int, torch.Tensor], torch.Tensor]
    on_error: str
    counters: JobCounters
    metrics: MetricsCollector
    span_arrived: Callable[[], None] = lambda: None
    needs_every_step: bool = False
    remedy: Callable[[Span, int], str] = skip_remedy
    recorder: EpochRecorder = field(default_factory=EpochRecorder)


@dataclass(frozen=True)
class _Failure:
    """A sample that cannot be had."""

    span: Span
    row: int
    message: str

    def __str__(self) -> str:
        # The worker's text begins with the key, which stands here already.
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
class _Ready:
    """A span's samples at the freeze point that wait for their batch."""

    span: Span
    features: dict[int, torch.Tensor]
    failures: Mapping[int, str]
    labels: npt.NDArray[np.int64]
    num_left: int

    def failure(self, row: int) -> _Failure:
        return _Failure(self.span, row, self.failures[row])


class FeatureLoader:
    """One epoch; iterate over it once.  Frameworks may ask for an iterator
    several times before the first batch; the first that is used serves it.

    Yields ``(features, labels)``: features ``[n, *shape]`` float32 at the
    freeze point, ordinary tensors that autograd may save; labels ``[n]``
    int64; both on the job's device.  ``n`` is the batch size but in the
    last batch, and smaller where samples were skipped; a batch that lost
    all its samples is not delivered, which is an error where others take
    that step or count it, and when an epoch has no batch left.

    Leaving the loop, by whatever way, or :meth:`close` ends the requests
    under way and the threads, also while somebody refers to this loader; an
    iterator made by hand lasts for as long as it is referred to.

    Args:
        plan: of the job.
        reading: what is delivered.
        open_spans: loads spans, in that order.
        device: of what is delivered.
        delivered: told the number of each step before its batch is given.
        num_steps: of the whole epoch; None for the batches of ``reading``.
    """

    def __init__(
        self,
        plan: LoaderPlan,
        reading: ReadPlan,
        open_spans: Callable[[Sequence[Span]], LoadedSpans],
        device: torch.device,
        delivered: Callable[[int], None] = lambda step: None,
        num_steps: int | None = None,
    ) -> None:
        self._num_steps = (
            len(reading.batches) if num_steps is None else num_steps
        )
        self._delivery = _Delivery(
            plan, reading, open_spans, device, delivered
        )
        self._batches: (
            weakref.ref[Generator[LabelledBatch, None, None]] | None
        ) = None

    def __len__(self) -> int:
        """Batches of the whole epoch, as of torch's stateful loader: where
        it goes on behind some, these count as well."""
        return self._num_steps

    @property
    def keys(self) -> Sequence[str]:
        """Of the samples of the batch that was delivered last, in order."""
        return self._delivery.keys()

    def __iter__(self) -> Iterator[LabelledBatch]:
        self._delivery.check_unused()
        # The generator belongs to the loop alone, so that it ends, with its
        # threads, when the loop is left: this loader must not keep it, and
        # it must not know this loader, or a cycle of the two would wait for
        # Python's collector to come by, in whatever thread.
        batches = self._delivery.run()
        self._batches = weakref.ref(batches)
        return batches

    def close(self) -> None:
        """Ends the epoch; a loop in another thread, or one that begins
        later, gets an error then."""
        if self._delivery.break_off():
            return
        batches = self._batches() if self._batches else None
        with suppress(ValueError):  # another thread has just taken it up
            if batches is not None:
                batches.close()
        self._delivery.close_prefetcher()


class _Delivery:
    """Makes batches of spans."""

    def __init__(
        self,
        plan: LoaderPlan,
        reading: ReadPlan,
        open_spans: Callable[[Sequence[Span]], LoadedSpans],
        device: torch.device,
        delivered: Callable[[int], None],
    ) -> None:
        self.reading = reading
        self._plan = plan
        self._open_spans = open_spans
        self._device = device
        self._delivered = delivered
        self._num_failures = 0
        self._first_failure: _Failure | None = None
        self._last: list[IndexRow] = []
        self._prefetcher: LoadedSpans | None = None
        self._is_closed = False
        self._thread: int | None = None

    def keys(self) -> list[str]:
        """Of the batch that was delivered last."""
        return [row.key for row in self._last]

    def check_unused(self) -> None:
        """
        Raises:
            RuntimeError: when somebody has asked for a batch already.
        """
        if self._thread is not None:
            raise RuntimeError(
                "a loader serves one epoch; call job.loader(epoch) again"
            )

    def break_off(self) -> bool:
        """Whether the loop gets an error, as it does but in this thread."""
        self._is_closed = True
        if self._thread == threading.get_ident():
            return False
        self.close_prefetcher()
        return True

    def close_prefetcher(self) -> None:
        """What waits for it gets an error."""
        prefetcher = self._prefetcher
        if prefetcher is not None:
            prefetcher.close()

    def run(self) -> Generator[LabelledBatch, None, None]:
        """All batches; closing it ends what is under way."""
        self.check_unused()
        started = time.monotonic()
        spans = [
            self._plan.spans[piece.span].part(piece.first, piece.stop)
            for piece in self.reading.pieces
        ]
        self._take_up()
        with self._plan.recorder.running(self.reading):
            prefetcher = self._prefetcher = self._open_spans(spans)
            try:
                self._take_up()
                with self._plan.metrics.loading():
                    yield from self._deliver(iter(prefetcher))
            finally:
                prefetcher.close()
                # What it has fetched ahead goes with it.
                self._prefetcher = None
                self._plan.counters.add(seconds=time.monotonic() - started)

    def _deliver(
        self, loaded: Iterator[tuple[int, LoadedSpan]]
    ) -> Iterator[LabelledBatch]:
        window: dict[int, _Ready] = {}
        metrics, recorder = self._plan.metrics, self._plan.recorder
        next_position = 0
        any_came = False
        for batch in self.reading.batches:
            while next_position <= batch.last_position:
                if next_position in window:
                    self._judge(window[next_position])
                    next_position += 1
                    continue
                with metrics.waiting(), recorder.stage(WAITING):
                    position, span = next(loaded)
                piece = self.reading.pieces[position]
                window[position] = self._ready(piece, span)
                with recorder.stage(PLANNING):
                    self._plan.span_arrived()
            found = self._gather(batch, window)
            self._delivered(batch.step)
            count = 0 if found is None else len(found[1])
            recorder.delivered(count)
            if found is not None:
                any_came = True
                with metrics.training(count), recorder.stage(TRAINING):
                    yield found
                self._take_up()
        if not any_came:
            self._judge_nothing()

    def _take_up(self) -> None:
        """In the thread that asks for the next batch, perhaps another one."""
        self._thread = threading.get_ident()
        if self._is_closed:
            raise ClientError("not_connected", "the loader was closed")

    def _judge_nothing(self) -> None:
        first = self._first_failure
        # Of an epoch that was gone on with, batches may have come before.
        if first and not self.reading.batches[0].step:
            raise _lost_epoch(self._num_failures, first)

    def _ready(self, piece: SpanSlice, loaded: LoadedSpan) -> _Ready:
        count = len(loaded.features)
        self._plan.counters.span_arrived(loaded.cut, count)
        self._plan.recorder.came(loaded.cut, count, len(loaded.failures))
        with (
            self._plan.metrics.running_suffix(
                loaded.cut, count, len(loaded.failures)
            ),
            self._plan.recorder.stage(LAYERS),
            torch.inference_mode(),
        ):
            features = self._plan.run_suffix(loaded.cut, loaded.features)
        num_rows = len(loaded.span.rows)
        good = [r for r in range(num_rows) if r not in loaded.failures]
        return _Ready(
            loaded.span,
            # Cloned one by one: a view would keep the whole span in memory
            # until the last of its samples has left the shuffle buffer,
            # and a clone made here is one that autograd may save.
            {
                row: each.clone()
                for row, each in zip(good, features, strict=True)
            },
            loaded.failures,
            self._plan.labels[piece.span][piece.first : piece.stop],
            num_rows,
        )

    def _judge(self, ready: _Ready) -> None:
        """When its turn has come."""
        if not ready.failures:
            return
        failure = ready.failure(min(ready.failures))
        if self._plan.on_error == "raise":
            remedy = self._plan.remedy(failure.span, failure.row)
            raise failure.error(f"{failure}; {remedy}")
        self._plan.counters.add(skipped=len(ready.failures))
        self._num_failures += len(ready.failures)
        if self._first_failure is None:
            self._first_failure = failure
            logger.warning(
                "left out %s; further ones of this pass are counted only "
                "(job.stats.skipped)",
                failure,
            )

    def _gather(
        self, batch: Batch, window: dict[int, _Ready]
    ) -> LabelledBatch | None:
        features: list[torch.Tensor] = []
        labels = []
        rows = []
        lost: _Failure | None = None
        for position, row in zip(
            batch.positions.tolist(), batch.rows.tolist(), strict=True
        ):
            ready = window[position]
            if row in ready.features:
                features.append(ready.features.pop(row))
                labels.append(int(ready.labels[row]))
                rows.append(ready.span.rows[row])
            else:
                lost = lost or ready.failure(row)
            ready.num_left -= 1
            if not ready.num_left:
                del window[position]
        if lost and not features and self._plan.needs_every_step:
            raise _lost_step(batch, lost)
        if not features:
            return None
        self._plan.counters.add(samples=len(features))
        self._last = rows
        return (
            torch.stack(features),
            torch.tensor(labels, device=self._device),
        )


def _lost_step(batch: Batch, first: _Failure) -> HapiError:
    return first.error(
        f"none of the {len(batch)} samples of step {batch.step}, or of this "
        "rank's part of it, can be decoded, and it cannot be left out: other "
        f"ranks take it, or the loop counts it; the first is {first}; repair "
        "them, or use larger batches"
    )


def _lost_epoch(num_samples: int, first: _Failure) -> HapiError:
    return first.error(
        f"none of the {num_samples} samples of this epoch can be decoded; "
        f"the first is {first}; repair them, or give other data"
    )
