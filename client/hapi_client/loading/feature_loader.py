"""Delivers the batches of an epoch: features and labels."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import (
    Callable,
    Generator,
    Iterator,
    Sequence,
    Set,
)
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch

from hapi_client.loading.batch_assembly import BatchAssembler
from hapi_client.loading.loader_plan import LabelledBatch, LoaderPlan
from hapi_client.loading.span_source import LoadedSpan
from hapi_client.metrics.events import (
    PLANNING,
    TRAINING,
    WAITING,
    BatchEvent,
)
from hapi_client.sampling.sampler import ReaderBatch, ReadPlan
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import ClientError

# About as often as a progress bar is drawn (REDRAW_SECONDS).
_FLUSH_SECONDS = 0.25
"""Time between two records of batches, which take as long as a step of a small
tail."""


class LoadedSpans(Protocol):
    """Iterable of loaded spans, as :class:`.prefetcher.Prefetcher`."""

    def __iter__(self) -> Iterator[tuple[int, LoadedSpan]]: ...

    def close(self) -> None: ...


class FeatureLoader:
    """Batches of one epoch; iterate over it once.

    Frameworks may make several iterators before the first batch; the first
    that is used delivers the epoch.

    Yields ``(features, labels)``: features ``[n, *shape]`` at the freeze
    point, ordinary tensors that autograd may save; labels ``[n]``
    int64; both on the job's device.  ``n`` is the batch size, or less in the
    last batch and if samples were skipped.  A batch without samples is not
    delivered, unless ``plan.empty_steps`` says so; it is an error if the
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
        return [row.key for row in self.rows]

    @property
    def rows(self) -> Sequence[IndexRow]:
        """Rows of the index, of the samples of the last batch, in order."""
        return self._delivery.rows()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of the last batch by rank, or virtual node, of the reader.

        One after another, in the order of :attr:`.Reader.ranks`.
        """
        return self._delivery.sizes

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
    """Delivers batches from the cache or from loaded spans."""

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
        self._last: ReaderBatch | Sequence[IndexRow] = ()
        self.sizes: tuple[int, ...] = ()
        self._prefetcher: LoadedSpans | None = None
        self._is_closed = False
        self._thread: int | None = None

    def rows(self) -> Sequence[IndexRow]:
        """Returns the rows of the last batch."""
        last = self._last
        return self._rows_of(last) if isinstance(last, ReaderBatch) else last

    def check_unused(self) -> None:
        """Checks that no batch was requested yet.

        Raises:
            RuntimeError: if one was.
        """
        if self._thread is not None:
            raise RuntimeError(
                "a loader serves one epoch; iterate over job.train_loader and "
                "job.val_loader, which serve all of them"
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
        self._enter()
        with self._plan.recorder.running(self.reading):
            cache, select = self._plan.cache, None
            if cache is not None:
                select = cache.selector(self.reading.pieces)
            if select is not None:
                yield from self._deliver_cached(select)
            else:
                yield from self._deliver_loaded()

    def _deliver_cached(
        self, select: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[LabelledBatch]:
        """Yields an epoch from the cache alone, without any thread."""
        pieces = self.reading.pieces
        starts = np.cumsum([0, *map(len, pieces)])
        batches = self.reading.batches
        # Once for the epoch: a step of a small tail takes little longer.
        chosen = torch.from_numpy(
            starts[np.concatenate([batch.positions for batch in batches])]
            + np.concatenate([batch.rows for batch in batches])
        )
        labels = torch.from_numpy(
            np.concatenate([*map(self._plan.labels_of, pieces)])
        )[chosen].to(self._device)
        sizes = [len(batch) for batch in batches]
        num_batches = num_samples = 0
        seconds = flushed = 0.0

        def flush() -> None:
            self._plan.recorder.record_batch(
                BatchEvent(num_samples, num_samples, seconds, num_batches)
            )

        try:
            for batch, numbers, some_labels in zip(
                batches,
                torch.split(chosen, sizes),
                torch.split(labels, sizes),
                strict=True,
            ):
                features = select(numbers).to(self._device)
                self._last, self.sizes = batch, batch.sizes
                self._delivered(batch.step)
                num_batches += 1
                num_samples += len(numbers)
                started = time.monotonic()
                if started - flushed > _FLUSH_SECONDS:
                    flush()
                    num_batches = num_samples = 0
                    seconds, flushed = 0.0, started
                try:
                    yield features, some_labels
                finally:
                    seconds += time.monotonic() - started
                self._enter()
        finally:
            flush()

    def _rows_of(self, batch: ReaderBatch) -> list[IndexRow]:
        pieces = [self.reading.pieces[number] for number in batch.positions]
        return [
            self._plan.spans[piece.span].rows[piece.first + row]
            for piece, row in zip(pieces, batch.rows.tolist(), strict=True)
        ]

    def _deliver_loaded(self) -> Iterator[LabelledBatch]:
        """Yields an epoch of which some samples have to be loaded."""
        cache, pieces = self._plan.cache, self.reading.pieces
        cached = {
            position
            for position, piece in enumerate(pieces)
            if cache is not None and cache.holds(piece)
        }
        to_load = [
            number for number in range(len(pieces)) if number not in cached
        ]
        prefetcher = self._prefetcher = self._open_spans(
            [self._plan.span_of(pieces[position]) for position in to_load]
        )
        assembler = BatchAssembler(self._plan, self.reading, self._device)
        try:
            self._enter()
            with self._plan.recorder.job.loading():
                loaded = ((to_load[index], span) for index, span in prefetcher)
                yield from self._deliver(assembler, loaded, cached)
        finally:
            assembler.tell_skipped()
            prefetcher.close()
            # Frees the spans that were read ahead.
            self._prefetcher = None

    def _deliver(
        self,
        assembler: BatchAssembler,
        loaded: Iterator[tuple[int, LoadedSpan]],
        cached: Set[int],
    ) -> Iterator[LabelledBatch]:
        recorder = self._plan.recorder
        next_position = 0
        any_delivered = False
        for batch in self.reading.batches:
            while next_position <= batch.last_position:
                if next_position in cached and not assembler.add_cached(
                    next_position
                ):
                    self._load_damaged(assembler, next_position)
                while next_position not in assembler:
                    with recorder.stage(WAITING):
                        position, span = next(loaded)
                    assembler.add_loaded(position, span)
                    with recorder.stage(PLANNING):
                        self._plan.span_arrived()
                assembler.check(next_position)
                next_position += 1
            labelled = assembler.gather(batch)
            self._last, self.sizes = assembler.last_rows, assembler.last_sizes
            self._delivered(batch.step)
            count = 0 if labelled is None else len(labelled[1])
            recorder.record_batch(BatchEvent(count))
            if labelled is not None:
                any_delivered = any_delivered or count > 0
                with recorder.stage(TRAINING, count):
                    yield labelled
                self._enter()
        if not any_delivered:
            assembler.check_empty_epoch()

    def _load_damaged(self, assembler: BatchAssembler, position: int) -> None:
        """Loads a slice whose cached features turned out to be damaged."""
        span = self._plan.span_of(self.reading.pieces[position])
        prefetcher = self._open_spans([span])
        try:
            ((_, loaded),) = prefetcher
        finally:
            prefetcher.close()
        assembler.add_loaded(position, loaded)

    def _enter(self) -> None:
        """Notes the thread that requests a batch; it may change."""
        self._thread = threading.get_ident()
        if self._is_closed:
            raise ClientError("not_connected", "the loader was closed")
