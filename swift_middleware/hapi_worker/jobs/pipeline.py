"""Pipeline of one job, from body to features: overlapped, bounded stages.

Samples are read and decoded into a queue
(:mod:`hapi_worker.jobs.sample_queue`).  The coalescing group
(:mod:`hapi_worker.execution.coalescing`) runs micro-batches with samples of
the account's streams in shard order.  The *writer* (the thread that answers
the request) takes their results.

A stream has at most ``buffer_bytes`` of features, or two micro-batches,
between the device and its writer; at that bound, passes leave its samples out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from hapi_protocol.errors import HapiError, TooSlowError
from hapi_worker.execution.batch_items import MicroBatch, QueuedSample
from hapi_worker.jobs.chunked_body import ChunkedBody
from hapi_worker.jobs.sample_queue import SampleQueue
from hapi_worker.peer import POLL_SECONDS, ClientDisconnectedError
from hapi_worker.scheduling.batch_start import DEFAULT_LINGER_SECONDS

INDEX_BATCH_ROWS = 1024
"""Rows of an index have no features, so that a thousand are small."""
MIN_BATCHES_IN_FLIGHT = 2
"""Micro-batches that a stream may have in flight whatever their size."""


@dataclass(eq=False)
class Pipeline:
    """Runs one job; a ``coalescing.Stream`` of its group.

    Args:
        queue: the samples; its reader is started and ended here.
        body: source of the samples, for its waiting time and length.
        encoding: wire encoding of the features.
        step_seconds: longest time without progress.
    """

    queue: SampleQueue
    body: ChunkedBody
    encoding: str
    step_seconds: float

    def __post_init__(self) -> None:
        self._changed = self.queue.changed
        self._group = self.queue.group
        self._in_flight: deque[MicroBatch] = deque()
        self._rows_in_flight = 0
        self._reported_wait_seconds = 0.0

    def start(self) -> None:
        """Starts to read; returns when the first sample is complete.

        Raises:
            HapiError: the object or the body is unusable.
            ClientDisconnectedError: the connection was closed.
        """
        if self._group is not None:
            self._group.join(self)
        self.queue.start()
        with self._changed:
            while not (self.queue.has_first or self.queue.has_ended):
                self._check()
                self._changed.wait(POLL_SECONDS)
            self._check()

    def batches(self) -> Iterator[MicroBatch]:
        """Yields the finished rows in shard order.

        Raises:
            HapiError: the object or the body is unusable.
            ClientDisconnectedError: the connection was closed.
        """
        take = self._take_rows if self._group is None else self._take_batch
        while (batch := take()) is not None:
            yield batch

    def buffered_bytes(self) -> int:
        """Bytes of samples that were read and of features not sent yet."""
        in_flight_bytes = 0
        if self._group is not None:
            in_flight_bytes = (
                self._rows_in_flight * self._group.compute.output_bytes
            )
        return self.queue.buffered_bytes + in_flight_bytes

    def abort(self, error: HapiError) -> None:
        """Makes the writer fail, from another thread."""
        self.fail(error)
        self.queue.connection.break_off()

    def cancel(self) -> None:
        """Stops all stages; the micro-batch on the device may finish."""
        with self._changed:
            self.queue.cancel()
            if self._group is not None:
                self._group.leave(self)
            self._in_flight.clear()
        self.queue.join()

    # --- the writer's thread ---

    def _take_batch(self) -> MicroBatch | None:
        queue = self.queue
        assert self._group is not None, "a job with features has one"
        with self._changed:
            # The time that the client took is not the pipeline's.
            queue.note_progress()
            while True:
                self._check()
                if self._in_flight and self._in_flight[0].done:
                    return self._delivered(self._in_flight.popleft())
                if queue.has_ended and not (queue or self._in_flight):
                    return None
                lingers = queue.num_ready and not self._in_flight
                self._changed.wait(
                    DEFAULT_LINGER_SECONDS if lingers else POLL_SECONDS
                )
                if lingers:
                    self._group.request_passes()

    def _delivered(self, batch: MicroBatch) -> MicroBatch:
        self._rows_in_flight -= len(batch.rows)
        batch.timings["read"] = self._read_seconds()
        assert self._group is not None, "a job with features has one"
        self._group.request_passes()
        return batch

    def _take_rows(self) -> MicroBatch | None:
        queue = self.queue
        with self._changed:
            queue.note_progress()
            while True:
                self._check()
                full = len(queue) >= INDEX_BATCH_ROWS
                if full or queue.is_blocked or queue.has_ended:
                    queued = self.take(INDEX_BATCH_ROWS)
                    if queued:
                        rows = [queued_sample.row for queued_sample in queued]
                        timings = {"read": self._read_seconds()}
                        return MicroBatch(rows, timings)
                    if queue.has_ended:
                        return None
                self._changed.wait(POLL_SECONDS)

    def _read_seconds(self) -> float:
        since = self._reported_wait_seconds
        self._reported_wait_seconds = self.body.waited_seconds
        return self._reported_wait_seconds - since

    def _check(self) -> None:
        if self.queue.failure is not None:
            raise self.queue.failure
        if self.queue.connection.is_disconnected():
            raise ClientDisconnectedError(
                "the other end closed the connection"
            )
        waited = time.monotonic() - self.queue.last_progress
        if waited > self.step_seconds:
            raise TooSlowError(
                "too_slow",
                f"no sample moved on for {self.step_seconds:g} s",
            )

    # --- the group, with the lock held ---

    @property
    def num_ready(self) -> int:
        return 0 if self._is_paused() else self.queue.num_ready

    @property
    def num_pending(self) -> int:
        num_pending = len(self.queue) - self.queue.num_ready
        return 0 if self._is_paused() else num_pending

    @property
    def is_quiet(self) -> bool:
        return (
            self.queue.has_ended or self.queue.is_blocked or self._is_paused()
        )

    @property
    def oldest(self) -> float:
        return self.queue.oldest

    def take(self, size: int) -> list[QueuedSample]:
        return self.queue.take(size)

    def pass_started(self, batch: MicroBatch) -> None:
        self._in_flight.append(batch)
        self._rows_in_flight += len(batch.rows)
        self.queue.meter.pass_started()

    def charge(self, device_seconds: float, cpu_seconds: float) -> None:
        self.queue.meter.pass_ended(device_seconds, cpu_seconds)

    def pass_finished(self, batch: MicroBatch) -> None:
        batch.done = True
        self.queue.note_progress()
        if self._in_flight and self._in_flight[0] is batch:
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        self.queue.fail(error)

    def _is_paused(self) -> bool:
        """True if passes leave its samples out: it failed, or the client is
        slow."""
        if self._group is None:
            return False
        if self.queue.failure is not None:
            return True
        rows = self._rows_in_flight
        in_flight_bytes = rows * self._group.compute.output_bytes
        return (
            rows >= MIN_BATCHES_IN_FLIGHT * self._group.size
            and in_flight_bytes >= self.queue.buffer_bytes
        )
