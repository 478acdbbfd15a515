"""Spans that are read before the loop asks for them."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from hapi_client import ReadConfig
from hapi_client.loading.early_reads import EarlyReads
from hapi_client.swift.traffic_counters import Traffic
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import ClientError, UnavailableError
from waiting import until

SIZE = 1000
SPANS = [
    Span("a.tar", "etag", (IndexRow(n, f"k{n}", n * SIZE, SIZE, 0),))
    for n in range(8)
]


class Store:
    """Answers reads when the test says so."""

    def __init__(self):
        self.traffic = Traffic()
        self.asked = []
        self.answers = threading.Semaphore(0)
        self.failure = None

    def working_for(self, scope):
        return nullcontext()

    def cancel(self, scope):
        scope.set_cancelled()
        self.failure = ClientError("not_connected", "closed")
        self.answers.release(len(SPANS))

    def get_range(self, container, shard, byte_range, *, if_match, seconds):
        self.asked.append(byte_range.first // SIZE)
        self.answers.acquire()
        if self.failure:
            raise self.failure
        self.traffic.add(received_bytes=SIZE)
        return bytes([byte_range.first // SIZE]) * SIZE


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def early(store):
    """Starts the reads; all of them end with the test."""
    started = []

    def start(**options):
        started.append(
            EarlyReads(
                store,
                SPANS,
                ReadConfig(**{"num_threads": 1, **options}),
            )
        )
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_spans_are_read_in_order_and_each_is_taken_once(store, early):
    store.answers.release(len(SPANS))
    reads = early()
    for number, span in enumerate(SPANS):
        until(lambda span=span: reads.holds(span))
        assert reads.take(span, CancelScope()) == bytes([number]) * SIZE
        assert not reads.holds(span)
    assert reads.take(SPANS[0], CancelScope()) is None
    assert store.asked == [*range(len(SPANS))]


def test_another_epoch_frees_what_one_has_left(store, early):
    store.answers.release(len(SPANS))
    reads = early()
    until(lambda: reads.num_samples == len(SPANS))
    reads.begin_epoch()
    assert reads.take(SPANS[3], CancelScope()) == bytes([3]) * SIZE
    assert reads.num_samples == len(SPANS) - 1
    reads.begin_epoch()
    assert reads.num_samples == 0


def test_a_loop_that_has_caught_up_ends_them(store, early):
    reads = early()
    until(lambda: store.asked == [0])
    assert reads.take(SPANS[1], CancelScope()) is None
    store.answers.release(len(SPANS))
    # The one in flight is waited for; no other begins.
    assert reads.take(SPANS[0], CancelScope()) == bytes(SIZE)
    assert store.asked == [0]


def test_memory_is_limited(store, early):
    store.answers.release(len(SPANS))
    reads = early(ahead_bytes=3 * SIZE)
    until(lambda: len(store.asked) == 3 and reads.num_samples == 3)
    assert [reads.holds(each) for each in SPANS[:4]] == [True] * 3 + [False]


def test_an_error_leaves_the_reads_to_the_loader(store, early):
    store.failure = UnavailableError("queue_full", "down")
    reads = early()
    until(lambda: store.asked == [0])
    store.answers.release(len(SPANS))
    assert reads.take(SPANS[0], CancelScope()) is None
    assert reads.take(SPANS[1], CancelScope()) is None
    assert store.asked == [0]


def test_a_wait_ends_with_its_loader_and_with_the_job(store, early):
    reads = early()
    until(lambda: reads.holds(SPANS[0]))
    scope = CancelScope()
    scope.set_cancelled()
    with pytest.raises(ClientError, match="closed"):
        reads.take(SPANS[0], scope)
    other = early()
    until(lambda: other.holds(SPANS[0]))
    found = SimpleNamespace(data=b"none yet")

    def take():
        found.data = other.take(SPANS[0], CancelScope())

    thread = threading.Thread(target=take)
    thread.start()
    other.close()
    thread.join(10)
    assert found.data is None


def test_throughput_counts_after_a_second(store, early, monkeypatch):
    monkeypatch.setattr(
        "hapi_client.loading.early_reads.MIN_RATE_SECONDS", 1e6
    )
    store.answers.release(2)
    reads = early()
    until(lambda: len(store.asked) == 3)
    assert reads.bytes_per_second is None
    monkeypatch.setattr("hapi_client.loading.early_reads.MIN_RATE_SECONDS", 0)
    store.answers.release(1)
    until(lambda: len(store.asked) == 4)
    assert reads.bytes_per_second > 0
