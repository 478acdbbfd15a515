"""Makes batches of features and labels from loaded spans."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hapi_client.loading.memory_cache import CachedSlice, MemoryCache
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

_FLUSH_SECONDS = 0.25
"""Time between two updates of the counters."""

LabelledBatch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Features and labels of one batch."""


class LoadedSpans(Protocol):
    """Iterable of loaded spans, as :class:`.prefetcher.Prefetcher`."""

    def __iter__(self) -> Iterator[tuple[int, LoadedSpan]]: ...

    def close(self) -> None: ...


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
        counters: counters of the job.
        metrics: collects the time of the training loop.
        span_arrived: called after each span, in the training loop's thread.
        needs_every_step: True if no step may be left out, because other
            ranks take the same steps or the loop counts them.
        remedy: returns advice on a sample that cannot be decoded, from its
            span and row.
        recorder: records this epoch.
        memory: features of the data set in memory; None for none.
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
    memory: MemoryCache | None = None


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


class FeatureLoader:
    """Batches of one epoch; iterate over it once.

    Frameworks may make several iterators before the first batch; the first
    that is used delivers the epoch.

    Yields ``(features, labels)``: features ``[n, *shape]`` at the freeze
    point, ordinary tensors that autograd may save; labels ``[n]``
    int64; both on the job's device.  ``n`` is the batch size, or less in the
    last batch and if samples were skipped.  A batch without samples is not
    delivered; it is an error if ``plan.needs_every_step`` is set, and if the
    epoch has no other batch.

    Leaving the loop in any way, or :meth:`close`, ends all requests and
    threads, even if a reference to this loader remains.  An iterator made by
    ``iter`` ends with its last reference.

    Args:
        plan: parts of the job.
        reading: spans to read, and the batches to make of them.
        open_spans: returns loaded spans, in the order of the given spans.
        device: device of the batches.
        delivered: called with the number of each step before its batch.
        num_steps: steps of the whole epoch; None for those of ``reading``.
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
        """Number of batches of the whole epoch, also after a resume."""
        return self._num_steps

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the samples of the last batch, in order."""
        return self._delivery.keys()

    def __iter__(self) -> Iterator[LabelledBatch]:
        self._delivery.check_unused()
        # Only the loop may refer to the generator, so that it ends with the
        # loop: no reference from here, and none to here, as a cycle would
        # last until Python's garbage collector runs, in any thread.
        batches = self._delivery.run()
        self._batches = weakref.ref(batches)
        return batches

    def close(self) -> None:
        """Ends the epoch.

        A loop in another thread, or one that begins later, gets an error.
        """
        if self._delivery.close_from_outside():
            return
        batches = self._batches() if self._batches else None
        with suppress(ValueError):  # another thread has just resumed it
            if batches is not None:
                batches.close()
        self._delivery.close_prefetcher()


class _Delivery:
    """Makes batches of loaded spans."""

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
        self._last: Callable[[], list[IndexRow]] = list
        self._prefetcher: LoadedSpans | None = None
        self._is_closed = False
        self._thread: int | None = None

    def keys(self) -> list[str]:
        """Returns the keys of the last batch."""
        return [row.key for row in self._last()]

    def check_unused(self) -> None:
        """Checks that no batch was requested yet.

        Raises:
            RuntimeError: if one was.
        """
        if self._thread is not None:
            raise RuntimeError(
                "a loader serves one epoch; call job.loader(epoch) again"
            )

    def close_from_outside(self) -> bool:
        """Closes; returns False if the loop runs in this thread."""
        self._is_closed = True
        if self._thread == threading.get_ident():
            return False
        self.close_prefetcher()
        return True

    def close_prefetcher(self) -> None:
        """Closes the prefetcher; a waiting loop gets an error."""
        prefetcher = self._prefetcher
        if prefetcher is not None:
            prefetcher.close()

    def run(self) -> Generator[LabelledBatch, None, None]:
        """Yields all batches; closing it ends requests and threads."""
        self.check_unused()
        started = time.monotonic()
        self._enter()
        with self._plan.recorder.running(self.reading):
            try:
                yield from self._cached_batches() or self._read_batches()
            finally:
                self._plan.counters.add(seconds=time.monotonic() - started)

    def _cached_batches(self) -> Iterator[LabelledBatch] | None:
        """Returns the batches if all are in memory, without any thread."""
        memory, pieces = self._plan.memory, self.reading.pieces
        if memory is None or memory.has_failures or not pieces:
            return None
        if not all(map(memory.holds, pieces)):
            return None
        return self._deliver_cached(memory)

    def _deliver_cached(self, memory: MemoryCache) -> Iterator[LabelledBatch]:
        pieces = self.reading.pieces
        starts = np.cumsum([0, *map(len, pieces)])
        slots = np.concatenate([*map(memory.slots_of, pieces)])
        labels = torch.from_numpy(
            np.concatenate([self._labels(piece) for piece in pieces])
        ).to(self._device)
        recorder, counters = self._plan.recorder, self._plan.counters
        total, count, flushed = 0, 0, time.monotonic()
        training_seconds = 0.0
        try:
            for batch in self.reading.batches:
                rows = starts[batch.positions] + batch.rows
                features = memory.batch(slots[rows]).to(self._device)
                labelled = features, labels[torch.from_numpy(rows)]
                self._last = partial(self._rows, batch)
                self._delivered(batch.step)
                recorder.delivered(len(rows))
                count += len(rows)
                total += len(rows)
                began = time.monotonic()
                yield labelled
                now = time.monotonic()
                training_seconds += now - began
                if now - flushed > _FLUSH_SECONDS:
                    counters.add(samples=count, memory_hits=count)
                    count, flushed = 0, now
                self._enter()
        finally:
            counters.add(samples=count, memory_hits=count)
            recorder.add_from_memory(total, training_seconds)

    def _labels(self, piece: SpanSlice) -> npt.NDArray[np.int64]:
        return self._plan.labels[piece.span][piece.first : piece.stop]

    def _rows(self, batch: Batch) -> list[IndexRow]:
        pieces = [self.reading.pieces[each] for each in batch.positions]
        return [
            self._plan.spans[piece.span].rows[piece.first + row]
            for piece, row in zip(pieces, batch.rows.tolist(), strict=True)
        ]

    def _read_batches(self) -> Iterator[LabelledBatch]:
        memory = self._plan.memory
        cached = {
            position
            for position, piece in enumerate(self.reading.pieces)
            if memory is not None and memory.holds(piece)
        }
        to_read = [
            position
            for position in range(len(self.reading.pieces))
            if position not in cached
        ]
        prefetcher = self._prefetcher = self._open_spans(
            [self._span(self.reading.pieces[each]) for each in to_read]
        )
        try:
            self._enter()
            with self._plan.metrics.loading():
                loaded = ((to_read[index], span) for index, span in prefetcher)
                yield from self._deliver(loaded, cached)
        finally:
            prefetcher.close()
            # Frees the spans that were read ahead.
            self._prefetcher = None

    def _span(self, piece: SpanSlice) -> Span:
        return self._plan.spans[piece.span].part(piece.first, piece.stop)

    def _deliver(
        self, loaded: Iterator[tuple[int, LoadedSpan]], cached: set[int]
    ) -> Iterator[LabelledBatch]:
        window: dict[int, _ReadySpan] = {}
        metrics, recorder = self._plan.metrics, self._plan.recorder
        next_position = 0
        any_delivered = False
        for batch in self.reading.batches:
            while next_position <= batch.last_position:
                if next_position in cached:
                    piece = self.reading.pieces[next_position]
                    window[next_position] = self._from_memory(piece)
                    cached.discard(next_position)
                if next_position in window:
                    self._check_failures(window[next_position])
                    next_position += 1
                    continue
                with metrics.waiting(), recorder.stage(WAITING):
                    position, span = next(loaded)
                piece = self.reading.pieces[position]
                window[position] = self._ready(piece, span)
                with recorder.stage(PLANNING):
                    self._plan.span_arrived()
            labelled = self._gather(batch, window)
            self._delivered(batch.step)
            count = 0 if labelled is None else len(labelled[1])
            recorder.delivered(count)
            if labelled is not None:
                any_delivered = True
                with metrics.training(count), recorder.stage(TRAINING):
                    yield labelled
                self._enter()
        if not any_delivered:
            self._check_empty_epoch()

    def _enter(self) -> None:
        """Notes the thread that requests a batch; it may change."""
        self._thread = threading.get_ident()
        if self._is_closed:
            raise ClientError("not_connected", "the loader was closed")

    def _check_empty_epoch(self) -> None:
        first = self._first_failure
        # A resumed epoch may have had batches before.
        if first and not self.reading.batches[0].step:
            raise _lost_epoch(self._num_failures, first)

    def _ready(self, piece: SpanSlice, loaded: LoadedSpan) -> _ReadySpan:
        count = len(loaded.features)
        self._plan.counters.span_arrived(loaded.cut, count)
        self._plan.recorder.record_arrival(
            loaded.cut, count, len(loaded.failures)
        )
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
        memory = self._plan.memory
        if memory is not None:
            memory.put(piece, features, loaded.failures)
            if memory.holds(piece):
                return self._ready_span(piece, memory.get(piece))
        # Clones: a view would keep the whole span in memory until its last
        # sample is used, and autograd may save these.
        clones = {
            row: each.clone() for row, each in zip(good, features, strict=True)
        }
        return self._ready_span(piece, CachedSlice(clones, loaded.failures))

    def _from_memory(self, piece: SpanSlice) -> _ReadySpan:
        """Returns a slice from memory."""
        assert self._plan.memory is not None, "it holds the slice"
        cached = self._plan.memory.get(piece)
        self._plan.counters.add(memory_hits=len(cached.features))
        self._plan.recorder.add_from_memory(len(cached.features))
        return self._ready_span(piece, cached)

    def _ready_span(
        self, piece: SpanSlice, samples: CachedSlice
    ) -> _ReadySpan:
        return _ReadySpan(
            self._span(piece),
            dict(samples.features),
            samples.failures,
            self._labels(piece),
            len(piece),
        )

    def _check_failures(self, ready: _ReadySpan) -> None:
        """Raises or counts a span's bad samples, in the order of spans."""
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
                "skipped %s; further samples of this epoch are only counted "
                "(job.stats.skipped)",
                failure,
            )

    def _gather(
        self, batch: Batch, window: dict[int, _ReadySpan]
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
        if self._device.type != "cpu":
            features = [each.to(self._device) for each in features]
        self._last = lambda: rows
        return (
            torch.stack(features),
            torch.tensor(labels, device=self._device),
        )


def _lost_step(batch: Batch, first: _Failure) -> HapiError:
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
