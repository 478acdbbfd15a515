"""One job's way from body to features, all stages overlapped and bounded.

Three kinds of threads meet under one condition: the job's *reader* takes
samples off the body and hands them to the decoding pool; the pools' threads
decode samples and run micro-batches; the *writer* (the thread that answers
the request) starts micro-batches in shard order and takes their results.

The reader stops while ``buffer_bytes`` of samples wait, so a slow device, or
a reader at the far end that takes nothing, stops the sender as well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import torch

from hapi_protocol.errors import HapiError, InternalError, TooSlowError
from hapi_protocol.shards import Sample
from hapi_splitter.transforms import SampleError
from hapi_worker.batching import (
    DEFAULT_LINGER_SECONDS,
    Backlog,
    next_batch_size,
)
from hapi_worker.body import ChunkedBody, Connection, SenderGoneError
from hapi_worker.decode import Decoder
from hapi_worker.executor import FairPool
from hapi_worker.flow import Batch, Compute, Slot, row_bytes, row_of

POLL_SECONDS = 0.25
"""How soon a closed connection is noticed."""
JOIN_SECONDS = 5.0
INDEX_BATCH_ROWS = 1024

logger = logging.getLogger(__name__)


class Pipeline:
    """Runs one job.

    Args:
        samples: the wanted samples, read by the job's reader thread.
        body: their source, for its waiting time.
        connection: of the request, to notice when the other end is gone.
        account: that pays for the threads' seconds.
        compute: None for a job that wants rows only.
        decode_pool: shared by all jobs.
        device_pool: shared by all jobs; one thread.
        buffer_bytes: samples read and not yet in a micro-batch.
        step_seconds: longest time without any step forward.

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
        compute: Compute | None,
        decode_pool: FairPool,
        device_pool: FairPool,
        buffer_bytes: int,
        step_seconds: float,
    ) -> None:
        self._samples = samples
        self._body = body
        self._connection = connection
        self._account = account
        self._compute = compute
        self._decode_pool = decode_pool
        self._device_pool = device_pool
        self._buffer_bytes = buffer_bytes
        self._step_seconds = step_seconds
        self._changed = threading.Condition()
        self._slots: deque[Slot] = deque()
        self._flying: deque[Batch] = deque()
        self._buffered = 0
        self._blocked = False
        self._ended = False
        self._cancelled = False
        self._failure: Exception | None = None
        self._started = False
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
        self._reader.start()
        with self._changed:
            while not (self._started or self._ended):
                self._check()
                self._wait(POLL_SECONDS)
            self._check()

    def batches(self) -> Iterator[Batch]:
        """The finished micro-batches in shard order.

        Raises:
            HapiError, SenderGoneError: as :meth:`start`.
        """
        while True:
            with self._changed:
                size = self._await_step()
                batch = None if size else self._take_done()
            if size:
                self._launch(size)
            elif batch is not None:
                yield batch
            else:
                return

    def abort(self, error: HapiError) -> None:
        """Makes the writer fail, from another thread."""
        self._fail(error)
        self._connection.break_off()

    def cancel(self) -> None:
        """Stops all stages; the micro-batch on the device may finish."""
        with self._changed:
            self._cancelled = True
            # Work that waits in the pools keeps slots and batches alive.
            for slot in self._slots:
                slot.sample = slot.image = None
            for batch in self._flying:
                batch.images = None
            self._slots.clear()
            self._changed.notify_all()
        self._connection.stop_reading()
        if self._reader.ident is not None:
            self._reader.join(JOIN_SECONDS)
            if self._reader.is_alive():
                logger.warning("the reader of a job is still busy")

    # --- the writer's thread ---

    def _await_step(self) -> int:
        """Waits for work; the size of the batch to start, or 0."""
        # The time the answer's reader took is not the pipeline's.
        self._last_step = time.monotonic()
        while True:
            self._check()
            if self._flying and self._flying[0].done:
                return 0
            size = next_batch_size(self._backlog())
            if size:
                return size
            if self._ended and not self._slots and not self._flying:
                return 0
            self._wait(
                DEFAULT_LINGER_SECONDS
                if self._slots and not self._flying
                else POLL_SECONDS
            )

    def _backlog(self) -> Backlog:
        ready = 0
        limit = self._limit()
        for slot in self._slots:
            if slot.ready_at is None or ready >= limit:
                break
            ready += 1
        oldest = self._slots[0].ready_at if ready else None
        return Backlog(
            ready=ready,
            pending=len(self._slots) - ready,
            limit=limit,
            flying=len(self._flying),
            ended=self._ended,
            blocked=self._blocked,
            waited_seconds=0.0 if oldest is None else _since(oldest),
        )

    def _limit(self) -> int:
        if self._compute is None:
            return INDEX_BATCH_ROWS
        return self._compute.batch_limit()

    def _take_done(self) -> Batch | None:
        return self._flying.popleft() if self._flying else None

    def _launch(self, size: int) -> None:
        with self._changed:
            slots = [self._slots.popleft() for _ in range(size)]
        images = [slot.image for slot in slots if slot.image is not None]
        batch = Batch(
            rows=[slot.row for slot in slots],
            timings={
                "read": self._read_seconds(),
                "decode": sum(slot.decode_seconds for slot in slots),
                "decode_cpu": sum(slot.decode_cpu for slot in slots),
            },
        )
        batch.images = torch.stack(images) if images else None
        with self._changed:
            self._flying.append(batch)
            self._buffered -= sum(slot.charged_bytes for slot in slots)
            self._changed.notify_all()
        if not images:
            self._finish(batch)
        else:
            self._device_pool.submit(
                self._account, lambda: self._forward(batch)
            )

    def _read_seconds(self) -> float:
        waited = self._body.waited_seconds
        since, self._waited_before = self._waited_before, waited
        return waited - since

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._connection.is_gone():
            raise SenderGoneError("the other end closed the connection")
        if _since(self._last_step) > self._step_seconds:
            raise TooSlowError(
                "too_slow",
                f"no sample moved on for {self._step_seconds:g} s",
            )

    def _wait(self, seconds: float) -> None:
        self._changed.wait(seconds)

    # --- the device's thread ---

    def _forward(self, batch: Batch) -> None:
        images, batch.images = batch.images, None
        if self._cancelled or self._compute is None or images is None:
            return
        batch.timings["queue"] = _since(batch.submitted)
        try:
            computed = self._compute.run(images)
        except Exception as error:
            self._fail(error)
            return
        batch.timings["forward"] = computed.forward_seconds
        batch.timings["encode"] = computed.encode_seconds
        batch.timings["forward_cpu"] = computed.forward_cpu
        batch.timings["encode_cpu"] = computed.encode_cpu
        batch.computed = computed
        self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        with self._changed:
            batch.done = True
            self._step()

    # --- the decoding threads ---

    def _decode(self, slot: Slot, decoder: Decoder) -> None:
        sample = slot.sample
        if self._cancelled or sample is None:
            return
        started, cpu = time.monotonic(), time.thread_time()
        try:
            slot.image = decoder(sample)
        except SampleError as error:
            slot.row = replace(slot.row, error=str(error))
        except Exception as error:
            self._fail(error)
            return
        slot.decode_seconds = _since(started)
        slot.decode_cpu = time.thread_time() - cpu
        with self._changed:
            self._settle(slot)

    def _settle(self, slot: Slot) -> None:
        kept = row_bytes(slot.row)
        if slot.image is not None:
            kept += slot.image.nbytes
        slot.sample = None
        slot.ready_at = time.monotonic()
        self._buffered += kept - slot.charged_bytes
        slot.charged_bytes = kept
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
            self._fail(error)
            return
        finally:
            self.read_cpu = time.thread_time()
        with self._changed:
            self._ended = True
            self._step()

    def _accept(self, sample: Sample) -> bool:
        compute = self._compute
        row = row_of(sample)
        slot = Slot(row, sample if compute else None, row_bytes(row))
        if compute is not None:
            slot.charged_bytes += compute.input_bytes + sum(
                len(data) for data in sample.members.values()
            )
        with self._changed:
            self._await_room(slot.charged_bytes)
            if self._cancelled:
                return False
            self._buffered += slot.charged_bytes
            self._slots.append(slot)
            self._started = True
            if compute is None:
                self._settle(slot)
            else:
                self._step()
        if compute is not None:
            decoder = compute.decoder
            self._decode_pool.submit(
                self._account, lambda: self._decode(slot, decoder)
            )
        return True

    def _await_room(self, more_bytes: int) -> None:
        while (
            not self._cancelled
            and self._buffered
            and self._buffered + more_bytes > self._buffer_bytes
        ):
            self._blocked = True
            self._changed.notify_all()
            self._wait(POLL_SECONDS)
        self._blocked = False

    # --- all threads ---

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, (HapiError, SenderGoneError)):
            logger.error("a defect: a job failed", exc_info=error)
            error = InternalError(
                "internal", f"the worker failed: {type(error).__name__}"
            )
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _step(self) -> None:
        self._last_step = time.monotonic()
        self._changed.notify_all()


def _since(moment: float) -> float:
    return time.monotonic() - moment
