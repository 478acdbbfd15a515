"""One job's way from body to features, all stages overlapped and bounded.

The job's *reader* takes samples off the body and hands them to the decoding
threads; its group (:mod:`hapi_worker.execution.coalescing`) runs micro-batches
with samples of the account's streams in shard order; the *writer* (the thread
that answers the request) takes their results.

The reader stops while ``buffer_bytes`` of samples wait, so a slow device, or
a reader at the far end that takes nothing, stops the sender as well.  A stream
has at most ``buffer_bytes`` of features, or two micro-batches, on their way
from the device to its writer; while it has, its samples are left out of
passes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hapi_protocol.errors import HapiError, InternalError, TooSlowError
from hapi_protocol.shards import Sample
from hapi_splitter.inputs.image_decode import SampleError
from hapi_worker.execution.batch_items import (
    Batch,
    QueuedSample,
    row_bytes,
    row_of,
)
from hapi_worker.execution.coalescing import Group
from hapi_worker.execution.decode import Decoder
from hapi_worker.jobs.chunked_body import ChunkedBody
from hapi_worker.monitoring.accounting import Meter
from hapi_worker.peer import POLL_SECONDS, Connection, SenderGoneError
from hapi_worker.scheduling.batch_size import DEFAULT_LINGER_SECONDS
from hapi_worker.scheduling.fair_pool import FairPool

JOIN_SECONDS = 5.0
INDEX_BATCH_ROWS = 1024
DEPTH = 2
"""Micro-batches that a stream may always have under way."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """Of one job.

    Args:
        buffer_bytes: samples read and not yet in a micro-batch; features
            not yet taken.
        step_seconds: longest time without any step forward.
    """

    buffer_bytes: int
    step_seconds: float


class Pipeline:
    """Runs one job; a ``coalescing.Stream`` of its group.

    Args:
        samples: the wanted samples, read by the job's reader thread.
        body: their source, for its waiting time.
        connection: of the request, to notice when the other end is gone.
        account: that pays for the threads' seconds.
        encoding: of the features.
        group: of the streams it shares batches with; None for a job that
            wants rows only.
        decode_pool: shared by all jobs.
        meter: of the seconds that others spend on it.
        bounds: of memory and time.
        describe: what a row says of a sample that cannot be used.

    Attributes:
        read_cpu: CPU seconds of the reader, once it has ended.
    """

    def __init__(
        self,
        samples: Iterator[Sample],
        body: ChunkedBody,
        connection: Connection,
        *,
        account: str,
        encoding: str,
        group: Group | None,
        decode_pool: FairPool,
        meter: Meter,
        bounds: Bounds,
        describe: Callable[[SampleError], str] = str,
    ) -> None:
        self.encoding = encoding
        self._samples = samples
        self._body = body
        self._connection = connection
        self._account = account
        self._group = group
        self._decode_pool = decode_pool
        self._meter = meter
        self._bounds = bounds
        self._describe = describe
        lock = threading.Lock() if group is None else group.lock
        self._moved = threading.Condition(lock)
        """For the writer."""
        self._room = threading.Condition(lock)
        """For the reader."""
        self._slots: deque[QueuedSample] = deque()
        self._num_decoded = 0
        self._flying: deque[Batch] = deque()
        self._flying_rows = 0
        self._buffered = 0
        self._blocked = False
        self._ended = False
        self._cancelled = False
        self._failure: Exception | None = None
        self._begun = False
        self._last_step = time.monotonic()
        self._waited_before = 0.0
        self.read_cpu = 0.0
        self._reader = threading.Thread(
            target=self._read, name="job-reader", daemon=True
        )

    def start(self) -> None:
        """Begins to read; returns when the first sample is complete.

        Raises:
            HapiError: what makes the object or the body unfit.
            SenderGoneError: the connection was closed.
        """
        if self._group is not None:
            self._group.join(self)
        self._reader.start()
        with self._moved:
            while not (self._begun or self._ended):
                self._check()
                self._moved.wait(POLL_SECONDS)
            self._check()

    def batches(self) -> Iterator[Batch]:
        """The finished rows in shard order.

        Raises:
            HapiError, SenderGoneError: as :meth:`start`.
        """
        take = self._take_rows if self._group is None else self._take_batch
        while (batch := take()) is not None:
            yield batch

    def buffered_bytes(self) -> int:
        """Of samples read and of features not yet taken."""
        flying = 0
        if self._group is not None:
            flying = self._flying_rows * self._group.compute.output_bytes
        return self._buffered + flying

    def abort(self, error: HapiError) -> None:
        """Makes the writer fail, from another thread."""
        self.fail(error)
        self._connection.break_off()

    def cancel(self) -> None:
        """Stops all stages; the micro-batch on the device may finish."""
        with self._moved:
            self._cancelled = True
            if self._group is not None:
                self._group.leave(self)
            # Work that waits in the pools keeps slots alive.
            for slot in self._slots:
                slot.sample = slot.image = None
            self._slots.clear()
            self._flying.clear()
            self._num_decoded = 0
            self._moved.notify_all()
            self._room.notify_all()
        self._connection.stop_reading()
        if self._reader.ident is not None:
            self._reader.join(JOIN_SECONDS)
            if self._reader.is_alive():
                logger.warning("the reader of a job is still busy")

    # --- the writer's thread ---

    def _take_batch(self) -> Batch | None:
        assert self._group is not None, "a job with features has one"
        with self._moved:
            # The time the answer's reader took is not the pipeline's.
            self._last_step = time.monotonic()
            while True:
                self._check()
                if self._flying and self._flying[0].done:
                    return self._taken(self._flying.popleft())
                if self._ended and not self._slots and not self._flying:
                    return None
                lingers = self._num_decoded and not self._flying
                self._moved.wait(
                    DEFAULT_LINGER_SECONDS if lingers else POLL_SECONDS
                )
                if lingers:
                    self._group.consider()

    def _taken(self, batch: Batch) -> Batch:
        self._flying_rows -= len(batch.rows)
        batch.timings["read"] = self._read_seconds()
        assert self._group is not None, "a job with features has one"
        self._group.consider()
        return batch

    def _take_rows(self) -> Batch | None:
        with self._moved:
            self._last_step = time.monotonic()
            while True:
                self._check()
                full = len(self._slots) >= INDEX_BATCH_ROWS
                if full or self._blocked or self._ended:
                    slots = self.take(INDEX_BATCH_ROWS)
                    if slots:
                        rows = [slot.row for slot in slots]
                        timings = {"read": self._read_seconds()}
                        return Batch(rows, timings)
                    if self._ended:
                        return None
                self._moved.wait(POLL_SECONDS)

    def _read_seconds(self) -> float:
        waited = self._body.waited_seconds
        since, self._waited_before = self._waited_before, waited
        return waited - since

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._connection.is_gone():
            raise SenderGoneError("the other end closed the connection")
        if _since(self._last_step) > self._bounds.step_seconds:
            raise TooSlowError(
                "too_slow",
                f"no sample moved on for {self._bounds.step_seconds:g} s",
            )

    # --- the group, with the lock held ---

    @property
    def num_ready(self) -> int:
        return 0 if self._is_out() else self._num_decoded

    @property
    def num_pending(self) -> int:
        return 0 if self._is_out() else len(self._slots) - self._num_decoded

    @property
    def is_quiet(self) -> bool:
        return self._ended or self._blocked or self._is_out()

    @property
    def oldest(self) -> float:
        return self._slots[0].ready_at or 0.0

    def take(self, size: int) -> list[QueuedSample]:
        count = min(size, self._num_decoded)
        slots = [self._slots.popleft() for _ in range(count)]
        self._num_decoded -= count
        self._charge(-sum(slot.charged_bytes for slot in slots))
        return slots

    def started(self, batch: Batch) -> None:
        self._flying.append(batch)
        self._flying_rows += len(batch.rows)
        self._meter.pass_begun()

    def charge(self, device_seconds: float, cpu_seconds: float) -> None:
        self._meter.pass_ended(device_seconds, cpu_seconds)

    def finished(self, batch: Batch) -> None:
        batch.done = True
        self._step()
        if self._flying and self._flying[0] is batch:
            self._moved.notify_all()

    def fail(self, error: Exception) -> None:
        if not isinstance(error, (HapiError, SenderGoneError)):
            logger.error("a defect: a job failed", exc_info=error)
            error = InternalError(
                "internal", f"the worker failed: {type(error).__name__}"
            )
        with self._moved:
            if self._failure is None:
                self._failure = error
            self._moved.notify_all()

    def _is_out(self) -> bool:
        """Whether passes leave its samples: its reader takes nothing, or it
        has failed."""
        if self._group is None:
            return False
        if self._failure is not None:
            return True
        rows = self._flying_rows
        flying_bytes = rows * self._group.compute.output_bytes
        return (
            rows >= DEPTH * self._group.size
            and flying_bytes >= self._bounds.buffer_bytes
        )

    # --- the decoding threads ---

    def _decode(self, slot: QueuedSample, decoder: Decoder) -> None:
        sample = slot.sample
        if self._cancelled or sample is None:
            return
        started, cpu = time.monotonic(), time.thread_time()
        try:
            with self._meter.decoding():
                slot.image = decoder(sample)
        except SampleError as error:
            slot.row = replace(slot.row, error=self._describe(error))
        except Exception as error:
            self.fail(error)
            return
        slot.decode_seconds = _since(started)
        slot.decode_cpu = time.thread_time() - cpu
        with self._moved:
            if not self._cancelled:
                self._settle(slot)
                assert self._group is not None, "rows are not decoded"
                self._group.consider()

    def _settle(self, slot: QueuedSample) -> None:
        kept = row_bytes(slot.row)
        if slot.image is not None:
            kept += slot.image.nbytes
        slot.sample = None
        slot.ready_at = time.monotonic()
        self._charge(kept - slot.charged_bytes)
        slot.charged_bytes = kept
        while (
            self._num_decoded < len(self._slots)
            and self._slots[self._num_decoded].ready_at is not None
        ):
            self._num_decoded += 1
        self._step()

    # --- the reader's thread ---

    def _read(self) -> None:
        try:
            for sample in self._samples:
                if not self._accept(sample):
                    return
            # Nothing more is wanted: a sender that still sends may stop.
            self._connection.stop_reading()
        except Exception as error:
            self.fail(error)
            return
        finally:
            self.read_cpu = time.thread_time()
        with self._moved:
            self._ended = True
            self._step()
            self._reconsider()
            self._moved.notify_all()

    def _accept(self, sample: Sample) -> bool:
        row = row_of(sample)
        slot = QueuedSample(row, None, row_bytes(row))
        decode: Callable[[], None] | None = None
        if self._group is not None and row.error is None:
            compute = self._group.compute
            decoder = compute.decoder
            slot.sample = sample
            slot.charged_bytes += compute.input_bytes + sum(
                len(data) for data in sample.members.values()
            )

            def decode() -> None:
                self._decode(slot, decoder)

        with self._moved:
            self._await_room(slot.charged_bytes)
            if self._cancelled:
                return False
            self._buffered += slot.charged_bytes
            self._slots.append(slot)
            if decode is None:
                self._settle(slot)
            if not self._begun or decode is None:
                self._begun = True
                self._moved.notify_all()
            self._step()
        if decode is not None:
            self._decode_pool.submit(self._account, decode)
        return True

    def _await_room(self, more_bytes: int) -> None:
        while self._is_full(more_bytes):
            self._blocked = True
            self._reconsider()
            self._moved.notify_all()
            self._room.wait(POLL_SECONDS)
        self._blocked = False

    def _is_full(self, more_bytes: int) -> bool:
        return (
            not self._cancelled
            and self._buffered > 0
            and self._buffered + more_bytes > self._bounds.buffer_bytes
        )

    def _reconsider(self) -> None:
        if self._group is not None and not self._cancelled:
            self._group.consider()

    # --- all threads, with the lock held ---

    def _charge(self, num_bytes: int) -> None:
        self._buffered += num_bytes
        if num_bytes < 0 and self._blocked:
            self._room.notify()

    def _step(self) -> None:
        self._last_step = time.monotonic()


def _since(moment: float) -> float:
    return time.monotonic() - moment
