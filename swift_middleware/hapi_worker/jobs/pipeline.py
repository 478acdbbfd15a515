"""Pipeline of one job, from body to features: overlapped, bounded stages.

The *reader* thread takes samples off the body and hands them to the decoding
threads.  The coalescing group (:mod:`hapi_worker.execution.coalescing`) runs
micro-batches with samples of the account's streams in shard order.  The
*writer* (the thread that answers the request) takes their results.

The reader stops while ``buffer_bytes`` of samples wait, so a slow device or a
slow client also stops the filter from sending.  A stream has at most
``buffer_bytes`` of features, or two micro-batches, between the device and its
writer; at that bound, passes leave its samples out.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace

import torch

from hapi_protocol.errors import HapiError, InternalError, TooSlowError
from hapi_protocol.samples import Sample, SampleError
from hapi_splitter.inputs.subprocess_decode import LargeImage
from hapi_worker.execution.batch_items import (
    MicroBatch,
    QueuedSample,
    row_bytes,
    row_of,
)
from hapi_worker.execution.coalescing import Group
from hapi_worker.execution.decode import LargeDecoder
from hapi_worker.jobs.chunked_body import ChunkedBody
from hapi_worker.monitoring.accounting import JobUsageMeter
from hapi_worker.peer import (
    POLL_SECONDS,
    ClientDisconnectedError,
    PeerConnection,
)
from hapi_worker.scheduling.batch_size import DEFAULT_LINGER_SECONDS
from hapi_worker.scheduling.fair_pool import FairPool

JOIN_SECONDS = 5.0
"""A reader is woken by the closed connection; longer would mean a defect."""
INDEX_BATCH_ROWS = 1024
"""Rows of an index have no features, so that a thousand are small."""
MIN_BATCHES_IN_FLIGHT = 2
"""Micro-batches that a stream may have in flight whatever their size."""

_Decoded = tuple[torch.Tensor | LargeImage, float]
"""A sample's image, and CPU seconds of other processes."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Pipeline:
    """Runs one job; a ``coalescing.Stream`` of its group.

    Args:
        samples: the requested samples, read by the job's reader thread.
        body: source of the samples, for its waiting time.
        connection: the request's, to notice that the client disconnected.
        account: account that is charged for the threads' seconds.
        encoding: wire encoding of the features.
        group: streams that share micro-batches; None for an index job.
        decode_pool: decoding threads, shared by all jobs.
        large: decodes large images; None for an index job.
        meter: seconds that pools spend on the job.
        buffer_bytes: limit for samples that are not in a micro-batch yet, and
            for features that are not sent yet.
        step_seconds: longest time without progress.
        describe: turns the error of an unusable sample into a row's error.

    Attributes:
        read_cpu: CPU seconds of the reader thread, once it has ended.
    """

    samples: Iterator[Sample]
    body: ChunkedBody
    connection: PeerConnection
    _: KW_ONLY
    account: str
    encoding: str
    group: Group | None
    decode_pool: FairPool
    large: LargeDecoder | None
    meter: JobUsageMeter
    buffer_bytes: int
    step_seconds: float
    describe: Callable[[SampleError], str] = str

    def __post_init__(self) -> None:
        lock = threading.Lock() if self.group is None else self.group.lock
        self._output_changed = threading.Condition(lock)
        """Notifies the writer."""
        self._space_freed = threading.Condition(lock)
        """Notifies the reader."""
        self._queued: deque[QueuedSample] = deque()
        self._num_decoded = 0
        self._in_flight: deque[MicroBatch] = deque()
        self._rows_in_flight = 0
        self._buffered = 0
        self._blocked = False
        self._ended = False
        self._cancelled = False
        self._failure: Exception | None = None
        self._has_first = False
        self._last_progress = time.monotonic()
        self._reported_wait_seconds = 0.0
        self.read_cpu = 0.0
        self._reader = threading.Thread(
            target=self._read, name="job-reader", daemon=True
        )

    def start(self) -> None:
        """Starts to read; returns when the first sample is complete.

        Raises:
            HapiError: the object or the body is unusable.
            ClientDisconnectedError: the connection was closed.
        """
        if self.group is not None:
            self.group.join(self)
        self._reader.start()
        with self._output_changed:
            while not (self._has_first or self._ended):
                self._check()
                self._output_changed.wait(POLL_SECONDS)
            self._check()

    def batches(self) -> Iterator[MicroBatch]:
        """Yields the finished rows in shard order.

        Raises:
            HapiError: the object or the body is unusable.
            ClientDisconnectedError: the connection was closed.
        """
        take = self._take_rows if self.group is None else self._take_batch
        while (batch := take()) is not None:
            yield batch

    def buffered_bytes(self) -> int:
        """Bytes of samples that were read and of features not sent yet."""
        in_flight_bytes = 0
        if self.group is not None:
            in_flight_bytes = (
                self._rows_in_flight * self.group.compute.output_bytes
            )
        return self._buffered + in_flight_bytes

    def abort(self, error: HapiError) -> None:
        """Makes the writer fail, from another thread."""
        self.fail(error)
        self.connection.break_off()

    def cancel(self) -> None:
        """Stops all stages; the micro-batch on the device may finish."""
        with self._output_changed:
            self._cancelled = True
            if self.group is not None:
                self.group.leave(self)
            # Work that waits in the pools refers to the queued samples.
            for queued_sample in self._queued:
                queued_sample.sample = queued_sample.large = None
                queued_sample.image = None
            self._queued.clear()
            self._in_flight.clear()
            self._num_decoded = 0
            self._output_changed.notify_all()
            self._space_freed.notify_all()
        self.connection.stop_reading()
        if self._reader.ident is not None:
            self._reader.join(JOIN_SECONDS)
            if self._reader.is_alive():
                logger.warning("the reader of a job is still busy")

    # --- the writer's thread ---

    def _take_batch(self) -> MicroBatch | None:
        assert self.group is not None, "a job with features has one"
        with self._output_changed:
            # The time that the client took is not the pipeline's.
            self._last_progress = time.monotonic()
            while True:
                self._check()
                if self._in_flight and self._in_flight[0].done:
                    return self._delivered(self._in_flight.popleft())
                if self._ended and not self._queued and not self._in_flight:
                    return None
                lingers = self._num_decoded and not self._in_flight
                self._output_changed.wait(
                    DEFAULT_LINGER_SECONDS if lingers else POLL_SECONDS
                )
                if lingers:
                    self.group.request_passes()

    def _delivered(self, batch: MicroBatch) -> MicroBatch:
        self._rows_in_flight -= len(batch.rows)
        batch.timings["read"] = self._read_seconds()
        assert self.group is not None, "a job with features has one"
        self.group.request_passes()
        return batch

    def _take_rows(self) -> MicroBatch | None:
        with self._output_changed:
            self._last_progress = time.monotonic()
            while True:
                self._check()
                full = len(self._queued) >= INDEX_BATCH_ROWS
                if full or self._blocked or self._ended:
                    queued = self.take(INDEX_BATCH_ROWS)
                    if queued:
                        rows = [queued_sample.row for queued_sample in queued]
                        timings = {"read": self._read_seconds()}
                        return MicroBatch(rows, timings)
                    if self._ended:
                        return None
                self._output_changed.wait(POLL_SECONDS)

    def _read_seconds(self) -> float:
        waited = self.body.waited_seconds
        since, self._reported_wait_seconds = (
            self._reported_wait_seconds,
            waited,
        )
        return waited - since

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.connection.is_disconnected():
            raise ClientDisconnectedError(
                "the other end closed the connection"
            )
        if _seconds_since(self._last_progress) > self.step_seconds:
            raise TooSlowError(
                "too_slow",
                f"no sample moved on for {self.step_seconds:g} s",
            )

    # --- the group, with the lock held ---

    @property
    def num_ready(self) -> int:
        return 0 if self._is_paused() else self._num_decoded

    @property
    def num_pending(self) -> int:
        return (
            0 if self._is_paused() else len(self._queued) - self._num_decoded
        )

    @property
    def is_quiet(self) -> bool:
        return self._ended or self._blocked or self._is_paused()

    @property
    def oldest(self) -> float:
        return self._queued[0].ready_at or 0.0

    def take(self, size: int) -> list[QueuedSample]:
        count = min(size, self._num_decoded)
        queued = [self._queued.popleft() for _ in range(count)]
        self._num_decoded -= count
        self._add_buffered(
            -sum(queued_sample.charged_bytes for queued_sample in queued)
        )
        return queued

    def pass_started(self, batch: MicroBatch) -> None:
        self._in_flight.append(batch)
        self._rows_in_flight += len(batch.rows)
        self.meter.pass_started()

    def charge(self, device_seconds: float, cpu_seconds: float) -> None:
        self.meter.pass_ended(device_seconds, cpu_seconds)

    def pass_finished(self, batch: MicroBatch) -> None:
        batch.done = True
        self._note_progress()
        if self._in_flight and self._in_flight[0] is batch:
            self._output_changed.notify_all()

    def fail(self, error: Exception) -> None:
        if not isinstance(error, (HapiError, ClientDisconnectedError)):
            logger.error("a defect: a job failed", exc_info=error)
            error = InternalError(
                "internal", f"the worker failed: {type(error).__name__}"
            )
        with self._output_changed:
            if self._failure is None:
                self._failure = error
            self._output_changed.notify_all()

    def _is_paused(self) -> bool:
        """True if passes leave its samples out: it failed, or the client is
        slow."""
        if self.group is None:
            return False
        if self._failure is not None:
            return True
        rows = self._rows_in_flight
        in_flight_bytes = rows * self.group.compute.output_bytes
        return (
            rows >= MIN_BATCHES_IN_FLIGHT * self.group.size
            and in_flight_bytes >= self.buffer_bytes
        )

    # --- the decoding threads ---

    def _decode(
        self,
        queued_sample: QueuedSample,
        decode: Callable[[Sample], _Decoded],
    ) -> None:
        sample = queued_sample.sample
        if self._cancelled or sample is None:
            return
        started, cpu = time.monotonic(), time.thread_time()
        try:
            with self.meter.decoding() as add_cpu:
                image, other_cpu = decode(sample)
                add_cpu(other_cpu)
        except SampleError as error:
            image, other_cpu = None, 0.0
            queued_sample.row = replace(
                queued_sample.row, error=self.describe(error)
            )
        except Exception as error:
            self.fail(error)
            return
        queued_sample.decode_seconds += _seconds_since(started)
        queued_sample.decode_cpu += time.thread_time() - cpu + other_cpu
        if isinstance(image, LargeImage):
            self._await_process(queued_sample, image)
            return
        queued_sample.image = image
        with self._output_changed:
            if not self._cancelled:
                self._mark_ready(queued_sample)
                assert self.group is not None, "rows are not decoded"
                self.group.request_passes()

    def _await_process(
        self, queued_sample: QueuedSample, image: LargeImage
    ) -> None:
        decoder = self.large
        assert decoder is not None, "a job with features has one"

        def decode() -> None:
            with self._output_changed:
                large, queued_sample.large = queued_sample.large, None
            if large is not None:
                self._decode(queued_sample, lambda _: decoder.decode(large))

        with self._output_changed:
            if self._cancelled:
                return
            queued_sample.large = image
        with contextlib.suppress(RuntimeError):  # the worker is ending
            decoder.pool.submit(self.account, decode)

    def _mark_ready(self, queued_sample: QueuedSample) -> None:
        num_bytes = row_bytes(queued_sample.row)
        if queued_sample.image is not None:
            num_bytes += queued_sample.image.nbytes
        queued_sample.sample = None
        queued_sample.ready_at = time.monotonic()
        self._add_buffered(num_bytes - queued_sample.charged_bytes)
        queued_sample.charged_bytes = num_bytes
        while (
            self._num_decoded < len(self._queued)
            and self._queued[self._num_decoded].ready_at is not None
        ):
            self._num_decoded += 1
        self._note_progress()

    # --- the reader's thread ---

    def _read(self) -> None:
        try:
            for sample in self.samples:
                if not self._accept(sample):
                    return
            # Nothing more is needed: the filter may stop sending.
            self.connection.stop_reading()
        except Exception as error:
            self.fail(error)
            return
        finally:
            self.read_cpu = time.thread_time()
        with self._output_changed:
            self._ended = True
            self._note_progress()
            self._request_passes()
            self._output_changed.notify_all()

    def _accept(self, sample: Sample) -> bool:
        row = row_of(sample, is_index=self.group is None)
        queued_sample = QueuedSample(row, None, row_bytes(row))
        decode: Callable[[], None] | None = None
        if self.group is not None and row.error is None:
            compute = self.group.compute
            decoder = compute.decoder
            queued_sample.sample = sample
            queued_sample.charged_bytes += compute.input_bytes + sum(
                len(data) for data in sample.members.values()
            )

            def decode() -> None:
                self._decode(queued_sample, lambda data: (decoder(data), 0.0))

        with self._output_changed:
            self._wait_for_space(queued_sample.charged_bytes)
            if self._cancelled:
                return False
            self._buffered += queued_sample.charged_bytes
            self._queued.append(queued_sample)
            if decode is None:
                self._mark_ready(queued_sample)
            if not self._has_first or decode is None:
                self._has_first = True
                self._output_changed.notify_all()
            self._note_progress()
        if decode is not None:
            self.decode_pool.submit(self.account, decode)
        return True

    def _wait_for_space(self, more_bytes: int) -> None:
        while self._is_full(more_bytes):
            self._blocked = True
            self._request_passes()
            self._output_changed.notify_all()
            self._space_freed.wait(POLL_SECONDS)
        self._blocked = False

    def _is_full(self, more_bytes: int) -> bool:
        return (
            not self._cancelled
            and self._buffered > 0
            and self._buffered + more_bytes > self.buffer_bytes
        )

    def _request_passes(self) -> None:
        if self.group is not None and not self._cancelled:
            self.group.request_passes()

    # --- all threads, with the lock held ---

    def _add_buffered(self, num_bytes: int) -> None:
        self._buffered += num_bytes
        if num_bytes < 0 and self._blocked:
            self._space_freed.notify()

    def _note_progress(self) -> None:
        self._last_progress = time.monotonic()


def _seconds_since(moment: float) -> float:
    return time.monotonic() - moment
