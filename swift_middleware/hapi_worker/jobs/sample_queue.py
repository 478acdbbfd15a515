"""Samples of one job, from the body until they are decoded.

The *reader* thread takes samples off the body and hands them to the decoding
threads.  It stops while ``buffer_bytes`` of samples wait, so a slow device or
a slow client also stops the filter from sending.
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

from hapi_protocol.errors import HapiError, InternalError
from hapi_protocol.samples import Sample, SampleError
from hapi_splitter.inputs.subprocess_decode import LargeImage
from hapi_worker.execution.batch_items import QueuedSample, row_bytes, row_of
from hapi_worker.execution.coalescing import Group
from hapi_worker.execution.decode import LargeDecoder
from hapi_worker.monitoring.accounting import JobUsageMeter
from hapi_worker.peer import (
    POLL_SECONDS,
    ClientDisconnectedError,
    PeerConnection,
)
from hapi_worker.scheduling.fair_pool import FairPool

JOIN_SECONDS = 5.0
"""A reader is woken by the closed connection; longer would mean a defect."""

_Decoded = tuple[torch.Tensor | LargeImage, float]
"""A sample's image, and CPU seconds of other processes."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SampleQueue:
    """The samples of one job that are in no micro-batch yet.

    Args:
        samples: the requested samples, read by the job's reader thread.
        connection: connection of the request with the job's body.
        account: account that is charged for the threads' seconds.
        group: streams that share micro-batches; None for an index job.
        decode_pool: decoding threads, shared by all jobs.
        large: decodes large images; None for an index job.
        meter: seconds that pools spend on the job.
        buffer_bytes: limit for the samples.
        describe: turns the error of an unusable sample into a row's error.

    Attributes:
        changed: guards the queue with the group's lock; notifies the writer.
        num_ready: number of decoded samples at the head.
        buffered_bytes: bytes of the samples.
        has_first: the first sample is complete.
        has_ended: no sample follows.
        is_blocked: the reader waits for space.
        failure: why the job has failed; None if it has not.
        last_progress: monotonic seconds at which a sample last moved on.
        read_cpu: CPU seconds of the reader thread, once it has ended.
    """

    samples: Iterator[Sample]
    connection: PeerConnection
    _: KW_ONLY
    account: str
    group: Group | None
    decode_pool: FairPool
    large: LargeDecoder | None
    meter: JobUsageMeter
    buffer_bytes: int
    describe: Callable[[SampleError], str] = str

    def __post_init__(self) -> None:
        lock = threading.Lock() if self.group is None else self.group.lock
        self.changed = threading.Condition(lock)
        self._space_freed = threading.Condition(lock)
        """Notifies the reader."""
        self._queued: deque[QueuedSample] = deque()
        self.num_ready = 0
        self.buffered_bytes = 0
        self.has_first = False
        self.has_ended = False
        self.is_blocked = False
        self._cancelled = False
        self.failure: Exception | None = None
        self.last_progress = time.monotonic()
        self.read_cpu = 0.0
        self._reader = threading.Thread(
            target=self._read, name="job-reader", daemon=True
        )

    def start(self) -> None:
        """Starts the reader."""
        self._reader.start()

    def join(self) -> None:
        """Waits for the reader's end, after :meth:`cancel`."""
        self.connection.stop_reading()
        if self._reader.ident is not None:
            self._reader.join(JOIN_SECONDS)
            if self._reader.is_alive():
                logger.warning("the reader of a job is still busy")

    def fail(self, error: Exception) -> None:
        """Ends the job; called by any thread without the lock."""
        if not isinstance(error, (HapiError, ClientDisconnectedError)):
            logger.error("a defect: a job failed", exc_info=error)
            error = InternalError(
                "internal", f"the worker failed: {type(error).__name__}"
            )
        with self.changed:
            if self.failure is None:
                self.failure = error
            self.changed.notify_all()

    # --- with the lock held ---

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def oldest(self) -> float:
        """Monotonic seconds at which the first ready sample was decoded."""
        return self._queued[0].ready_at or 0.0

    def take(self, size: int) -> list[QueuedSample]:
        """Removes up to ``size`` ready samples."""
        count = min(size, self.num_ready)
        queued = [self._queued.popleft() for _ in range(count)]
        self.num_ready -= count
        self._add_buffered(-sum(sample.charged_bytes for sample in queued))
        return queued

    def cancel(self) -> None:
        """Drops all samples; no other is decoded."""
        self._cancelled = True
        # Work that waits in the pools refers to the queued samples.
        for queued in self._queued:
            queued.sample = queued.large = queued.image = None
        self._queued.clear()
        self.num_ready = 0
        self.changed.notify_all()
        self._space_freed.notify_all()

    def note_progress(self) -> None:
        """Records that a sample has moved on."""
        self.last_progress = time.monotonic()

    def _add_buffered(self, num_bytes: int) -> None:
        self.buffered_bytes += num_bytes
        if num_bytes < 0 and self.is_blocked:
            self._space_freed.notify()

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
        with self.changed:
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
            with self.changed:
                large, queued_sample.large = queued_sample.large, None
            if large is not None:
                self._decode(queued_sample, lambda _: decoder.decode(large))

        with self.changed:
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
            self.num_ready < len(self._queued)
            and self._queued[self.num_ready].ready_at is not None
        ):
            self.num_ready += 1
        self.note_progress()

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
        with self.changed:
            self.has_ended = True
            self.note_progress()
            self._request_passes()
            self.changed.notify_all()

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

        with self.changed:
            self._wait_for_space(queued_sample.charged_bytes)
            if self._cancelled:
                return False
            self.buffered_bytes += queued_sample.charged_bytes
            self._queued.append(queued_sample)
            if decode is None:
                self._mark_ready(queued_sample)
            if not self.has_first or decode is None:
                self.has_first = True
                self.changed.notify_all()
            self.note_progress()
        if decode is not None:
            self.decode_pool.submit(self.account, decode)
        return True

    def _wait_for_space(self, more_bytes: int) -> None:
        while self._is_full(more_bytes):
            self.is_blocked = True
            self._request_passes()
            self.changed.notify_all()
            self._space_freed.wait(POLL_SECONDS)
        self.is_blocked = False

    def _is_full(self, more_bytes: int) -> bool:
        return (
            not self._cancelled
            and self.buffered_bytes > 0
            and self.buffered_bytes + more_bytes > self.buffer_bytes
        )

    def _request_passes(self) -> None:
        if self.group is not None and not self._cancelled:
            self.group.request_passes()


def _seconds_since(moment: float) -> float:
    return time.monotonic() - moment
