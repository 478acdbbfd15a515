"""Streams that share micro-batches, and the memory of a pipeline."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hapi_protocol.errors import DoesNotFitError
from hapi_protocol.samples import Sample, SampleError
from hapi_splitter.inputs.subprocess_decode import LargeImage
from hapi_worker.execution.batch_items import MicroBatch
from hapi_worker.execution.coalescing import Group
from hapi_worker.execution.forward import PassResult, encode_rows, padded
from hapi_worker.jobs.pipeline import Pipeline
from hapi_worker.jobs.sample_queue import SampleQueue
from hapi_worker.models.loaded_model import Reservation
from hapi_worker.monitoring.accounting import JobUsageMeter
from hapi_worker.scheduling.batch_start import DEFAULT_LINGER_SECONDS
from waiting import until
from worker_under_test import job_for


class NoConnection:
    """A peer that stays connected and sends no more."""

    def is_disconnected(self):
        return False

    def stop_reading(self):
        """Nothing is read here."""


class Body:
    waited_seconds = 0.0


class ManualPool:
    """Runs its work when the test calls :meth:`run`."""

    def __init__(self):
        self.work: dict[str, list[Callable[[], None]]] = {
            "decode": [],
            "device": [],
        }

    def submit(self, account, work, *, kind="decode", urgent=False):
        self.work[kind].append(work)

    def run(self, kind, count=None):
        for _ in range(len(self.work[kind]) if count is None else count):
            self.work[kind].pop(0)()


class Compute:
    """Samples of one byte each; features are twice the image."""

    input_bytes = 4
    output_bytes = 4
    lease = None

    def __init__(self):
        self.ran: list[list[float]] = []
        self.room: int | None = None
        self.starved: list[Callable[[], None]] = []
        self.error: Exception | None = None
        self.seconds = 0.0
        self.pass_seconds = 1.0
        self.cores = 0.0
        self.memory = self

    def decoder(self, sample):
        if sample.key.startswith("bad"):
            raise SampleError("cannot be read")
        return torch.full((1,), float(sample.index))

    def core_seconds(self):
        return self.cores

    def reserve(self, lease, size, starved):
        if self.room == 0:
            self.starved.append(starved)
            return None
        nobody: Any = None
        return Reservation(min(size, self.room or size), 0, nobody)

    def cancel_wait(self, starved):
        """Nobody else waits."""

    def free(self, reservation):
        """Nothing is held here."""

    def encode(self, rows, encoding):
        return encode_rows(rows, encoding)

    def run(self, singles, size):
        images = padded(singles, size, torch.device("cpu"))
        time.sleep(self.seconds)
        self.cores += 8.0
        if self.error is not None:
            raise self.error
        self.ran.append(images.flatten().tolist())
        return PassResult(
            images * 2, seconds=self.pass_seconds, cpu_seconds=1.0
        )


def pipeline(samples, pool, *, group=None, buffer_bytes=100_000, large=None):
    queue = SampleQueue(
        samples,
        NoConnection(),
        account="a",
        group=group,
        decode_pool=pool,
        large=large,
        meter=JobUsageMeter(job_for(b"x"), None, threading.Condition()),
        buffer_bytes=buffer_bytes,
    )
    return Pipeline(queue, Body(), "float32", 10)


def samples_of(start, count, key="k"):
    return [
        Sample(start + n, f"{key}{n}", 0, 1, {"jpg": b"x"})
        for n in range(count)
    ]


class Shared:
    """Streams of one group; the test runs each stage."""

    def __init__(self, size=4):
        self.pool = ManualPool()
        self.compute = Compute()
        self.group = Group("a", self.compute, self.pool, size)
        self.jobs: list[Any] = []

    def stream(self, samples, **options):
        job = pipeline(samples, self.pool, group=self.group, **options)
        job.start()
        self.jobs.append(job)
        return job

    def read(self, job):
        job.queue._reader.join(5)
        assert not job.queue._reader.is_alive()

    def decode(self, *jobs):
        """Reads all samples of the jobs and decodes them."""
        for job in jobs:
            self.read(job)
        self.pool.run("decode")

    def run(self, *jobs):
        """Reads and decodes the jobs' samples, and runs the passes."""
        self.decode(*jobs)
        self.pool.run("device")

    def take(self, job, count=1):
        batches = job.batches()
        return [next(batches) for _ in range(count)]

    def close(self):
        for job in self.jobs:
            job.cancel()


@pytest.fixture
def shared():
    shared = Shared()
    yield shared
    shared.close()


def held():
    """Two samples, then silence until the job is cancelled."""
    yield from samples_of(0, 2)
    threading.Event().wait(0.5)


def test_streams_of_a_group_fill_each_others_batches(shared):
    first = shared.stream(iter(samples_of(0, 6)))
    second = shared.stream(iter(samples_of(10, 6)))
    shared.run(first, second)
    assert shared.compute.ran == [
        [0, 1, 2, 3],
        [4, 5, 10, 11],
        [12, 13, 14, 15],
    ]
    batches = shared.take(first, 2)
    assert [[r.index for r in b.rows] for b in batches] == [
        [0, 1, 2, 3],
        [4, 5],
    ]
    assert batches[1].features.tolist() == [[8], [10]]
    assert batches[1].timings["forward"] == 0.5
    rows = [row for b in shared.take(second, 2) for row in b.rows]
    assert [row.index for row in rows] == [10, 11, 12, 13, 14, 15]


def test_streams_are_charged_their_part_of_a_pass_even_if_it_fails(shared):
    shared.compute.error = DoesNotFitError("does_not_fit", "no room")
    shared.compute.seconds = 0.05
    jobs = [
        shared.stream(iter(samples_of(start, count)))
        for start, count in ((0, 3), (10, 1))
    ]
    shared.run(*jobs)
    used = [job.queue.meter._device_seconds for job in jobs]
    assert used[0] == pytest.approx(3 * used[1])
    assert sum(used) >= 0.05
    # Those of all cores that the pass had, not of the thread that ran it.
    assert [job.queue.meter._cpu_seconds for job in jobs] == pytest.approx(
        [6.0, 2.0], abs=0.5
    )
    assert all(job.queue.meter.is_idle for job in jobs)


def test_long_stream_does_not_block_other_streams_of_its_account(shared):
    long = shared.stream(iter(samples_of(0, 30)))
    shared.read(long)
    shared.pool.run("decode", 20)
    short = shared.stream(iter(samples_of(100, 4)))
    shared.read(short)
    waiting = shared.pool.work["decode"]
    waiting[:] = waiting[-4:] + waiting[:-4]
    shared.pool.run("decode")
    for _ in range(6):
        shared.pool.run("device", 1)
    assert shared.compute.ran[5] == [100, 101, 102, 103]


def test_batch_is_padded_when_no_more_samples_come(shared):
    job = shared.stream(iter(samples_of(1, 2)))
    shared.read(job)
    shared.pool.run("decode", 1)
    assert shared.pool.work["device"] == []
    shared.pool.run("decode")
    shared.pool.run("device")
    assert shared.compute.ran == [[1, 2, 0, 0]]
    [batch] = shared.take(job)
    assert batch.features.tolist() == [[2], [4]]


def test_pass_takes_samples_that_arrived_before_it_started(shared):
    first = shared.stream(iter(samples_of(0, 2)))
    shared.decode(first)
    assert len(shared.pool.work["device"]) == 1
    second = shared.stream(iter(samples_of(10, 2)))
    shared.run(second)
    assert shared.compute.ran == [[0, 1, 10, 11]]


@pytest.mark.parametrize("wakes", [0, 1, 2])
def test_no_pass_stays_requested_after_a_wait_for_memory(shared, wakes):
    shared.compute.room = 0
    job = shared.stream(iter(samples_of(0, 12)))
    shared.decode(job)
    shared.pool.run("device", 1)
    shared.compute.room = None
    for _ in range(wakes):
        shared.compute.starved[0]()
    while shared.pool.work["device"]:
        shared.pool.run("device", 1)
    assert len(shared.compute.ran) == 3
    assert shared.group._num_requested == 0
    later = shared.stream(iter(samples_of(20, 4)))
    shared.run(later)
    assert shared.compute.ran[-1] == [20, 21, 22, 23]


def test_rows_without_an_image_need_no_pass(shared):
    job = shared.stream(iter(samples_of(0, 2, key="bad")))
    shared.run(job)
    assert shared.compute.ran == []
    [batch] = shared.take(job)
    assert batch.features is None
    assert all("cannot be read" in (row.error or "") for row in batch.rows)


def test_samples_of_a_slow_sender_are_computed_after_a_while(shared):
    job = shared.stream(held())
    until(lambda: len(shared.pool.work["decode"]) == 2)
    shared.pool.run("decode")
    assert shared.pool.work["device"] == []
    taken: list[MicroBatch] = []
    writer = threading.Thread(target=lambda: taken.extend(shared.take(job)))
    writer.start()
    until(lambda: bool(shared.pool.work["device"]))
    shared.pool.run("device")
    writer.join(5)
    assert [row.index for row in taken[0].rows] == [0, 1]


@pytest.mark.parametrize(("seconds", "is_due"), [(0.0, True), (60.0, False)])
def test_partial_pass_waits_as_long_as_passes_take(shared, seconds, is_due):
    shared.compute.pass_seconds = seconds
    whole = shared.stream(iter(samples_of(10, 4)))
    shared.run(whole)
    shared.stream(held())
    until(lambda: len(shared.pool.work["decode"]) == 2)
    shared.pool.run("decode")
    time.sleep(2 * DEFAULT_LINGER_SECONDS)
    with shared.group.lock:
        shared.group.request_passes()
    assert bool(shared.pool.work["device"]) == is_due


def test_stream_of_a_client_that_takes_nothing_is_left_out_of_passes(shared):
    shared.compute.output_bytes = 10_000
    stalled = shared.stream(iter(samples_of(0, 30)), buffer_bytes=50_000)
    until(lambda: len(shared.pool.work["decode"]) == 30)
    shared.pool.run("decode")
    while shared.pool.work["device"]:
        shared.pool.run("device")
    assert shared.compute.ran == [[0, 1, 2, 3], [4, 5, 6, 7]]
    other = shared.stream(iter(samples_of(100, 4)))
    shared.run(other)
    assert shared.compute.ran[-1] == [100, 101, 102, 103]
    shared.take(stalled)
    shared.pool.run("device")
    assert shared.compute.ran[-1] == [8, 9, 10, 11]


def test_failed_pass_fails_each_of_its_streams(shared):
    shared.compute.error = DoesNotFitError("does_not_fit", "no room")
    jobs = [shared.stream(iter(samples_of(n, 2))) for n in (0, 10)]
    shared.run(*jobs)
    for job in jobs:
        with pytest.raises(DoesNotFitError):
            shared.take(job)


def test_cancelled_stream_takes_no_part_in_later_passes(shared):
    first = shared.stream(iter(samples_of(0, 2)))
    second = shared.stream(iter(samples_of(10, 2)))
    shared.decode(first, second)
    first.cancel()
    shared.pool.run("device")
    assert shared.compute.ran == [[10, 11, 0, 0]]


def test_pass_without_memory_waits_until_some_is_free(shared):
    shared.compute.room = 0
    job = shared.stream(iter(samples_of(0, 4)))
    shared.run(job)
    assert shared.compute.ran == []
    for _ in range(5):
        with shared.group.lock:
            shared.group.request_passes()
    # It is asked for once, and not each time that somebody looks.
    assert shared.pool.work["device"] == []
    assert len(shared.compute.starved) == 1
    shared.compute.room = 3
    shared.compute.starved.pop()()
    while shared.pool.work["device"]:
        shared.pool.run("device")
    assert shared.compute.ran == [[0, 1, 2], [3, 0, 0]]


def test_cancelled_job_frees_samples_that_wait_in_a_pool():
    sample = Sample(0, "k", 0, 1, {"jpg": bytes(1000)})
    alive = weakref.ref(sample)
    pool = ManualPool()
    group = Group("a", Compute(), pool, 8)
    job = pipeline(iter([sample]), pool, group=group)
    del sample
    job.start()
    until(lambda: bool(pool.work["decode"]))
    assert alive() is not None
    job.cancel()
    gc.collect()
    assert pool.work["decode"]
    assert alive() is None


def test_cancelled_job_frees_large_images_that_wait_in_a_pool():
    """Else clients that come and go fill the memory of the worker."""
    image = LargeImage(
        bytes(1000), Mock(), "k", Mock(), None, 1, ("jpeg", "png")
    )
    alive = weakref.ref(image)
    pool, large_pool = ManualPool(), ManualPool()
    compute = Compute()
    waiting = [image]
    compute.decoder = lambda sample: waiting.pop()
    job = pipeline(
        iter(samples_of(0, 1)),
        pool,
        group=Group("a", compute, pool, 8),
        large=Mock(pool=large_pool),
    )
    del image
    job.start()
    until(lambda: bool(pool.work["decode"]))
    pool.run("decode")
    assert alive() is not None
    job.cancel()
    gc.collect()
    assert large_pool.work["decode"]
    assert alive() is None
    large_pool.run("decode")


@pytest.mark.parametrize("has_model", [False, True])
def test_texts_of_rows_count_against_the_buffer(has_model):
    num_read = 0

    def samples():
        nonlocal num_read
        for index in range(1000):
            num_read += 1
            yield Sample(index, "k", 0, 1, {"json": b"x" * 10_000})

    pool = ManualPool()
    group = Group("a", Compute(), pool, 8) if has_model else None
    job = pipeline(samples(), pool, group=group, buffer_bytes=200_000)
    job.start()
    job.queue._reader.join(0.5)
    job.cancel()
    # Each holds its text, and up to four bytes a character as a row.
    assert num_read < 10
