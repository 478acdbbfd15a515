"""Loading one span: whole or not at all, and the way back to streaming."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from hapi_client.loading.circuit_breaker import (
    PushdownCircuitBreaker,
    PushdownConcurrency,
)
from hapi_client.loading.decode_pool import DecodePool
from hapi_client.loading.feature_source import (
    FeatureRequestSpec,
    FeatureSource,
)
from hapi_client.loading.raw_source import RawSource
from hapi_client.loading.read_concurrency import ReadConcurrency
from hapi_client.loading.route_source import RoutingSource
from hapi_client.loading.span_source import SpanLimits
from hapi_client.metrics.counters import JobCounters
from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.swift.retry import Backoff
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.errors import (
    ClientError,
    SourceChangedError,
    TooSlowError,
    TruncatedStreamError,
    UnavailableError,
    UnsupportedError,
    make_error,
)
from hapi_protocol.feature_stream import Row, feature_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.headers import ByteRange, ModelPath
from hapi_protocol.shards import iter_samples
from hapi_protocol.transforms import Training
from hapi_splitter.encodings import decode as decode_features
from hapi_splitter.encodings import encode
from hapi_splitter.inputs.image_decode import SampleError
from hapi_splitter.inputs.sample_format import SampleForm
from hapi_splitter.planner.problem import RAW_ROUTE
from photos import tar_of

SHAPE = (1, 2, 2)
LIMITS = SpanLimits(5, Backoff(attempts=3, first_seconds=0, max_seconds=0))
MODEL = ModelPath("AUTH_test", "models", "x.hapi")
ONE, TWO = Training(seed=5, epoch=100), Training(seed=5, epoch=200)
PUSHED = (2, "float32")
BUSY = UnavailableError("queue_full", "full", retry_after=0)


def decode(image, key, training):
    if image == b"bad":
        raise SampleError("no image")
    changed = 0 if training is None else training.epoch + int(key[1:]) / 8
    return torch.full(SHAPE, float(image) + changed)


def shard(*images):
    return tar_of(
        [(f"k{n}.jpg", str(i).encode()) for n, i in enumerate(images)]
    )


def span_of(data):
    rows = tuple(
        IndexRow(s.index, s.key, s.offset, s.length, 0)
        for s in iter_samples(io.BytesIO(data), name="s")
    )
    return Span("a.tar", "etag", rows)


def stream(keys, *, shape=(2,), errors=(), closed=True, saturated=0):
    sink = io.BytesIO()
    writer = FeatureStreamWriter(sink, feature_schema(shape, "float32"))
    rows = [
        Row(n, key, error="bad" if n in errors else None)
        for n, key in enumerate(keys)
    ]
    good = [n for n in range(len(rows)) if n not in errors]
    features = np.array([[n, n] for n in good], np.float32)
    writer.write(rows, features.reshape(len(good), *shape))
    if closed:
        writer.close(source_etag="etag", source_bytes=1, saturated=saturated)
    return sink.getvalue()


def encoded_stream(keys, features, encoding, sizes):
    """One whose batches have these sizes."""
    sink = io.BytesIO()
    schema = feature_schema(features.shape[1:], encoding)
    writer = FeatureStreamWriter(sink, schema)
    rows = [Row(n, key) for n, key in enumerate(keys)]
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        sent = encode(features[part], encoding)
        writer.write(rows[part], sent.array, scale=sent.scale, zero=sent.zero)
        start += size
    writer.close(source_etag="etag", source_bytes=1)
    return sink.getvalue()


class Body(io.BytesIO):
    def __init__(self, data, cache="off"):
        super().__init__(data)
        self.headers = {"X-Hapi-Cache": cache}

    def drain(self):
        self.read()


class FakeConnection:
    """Answers ranges from ``data``; features as scripted."""

    def __init__(self, data):
        self.data = data
        self.answers = []
        self.annotations = []
        self.ranges = []
        self.cache = "off"

    def get_range(
        self, container, name, byte_range, *, ending=lambda: None, **_
    ):
        self.ranges.append(byte_range)
        ending()
        return self.data[byte_range.first : byte_range.last + 1]

    def get_features(self, container, name, annotation, **_):
        self.annotations.append(annotation)
        answers = self.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return Body(answer, self.cache)


@pytest.fixture
def pool():
    made = DecodePool(decode, 2)
    yield made
    made.close()


class Bench:
    def __init__(
        self, pool, data, encoding="float32", shape=(2,), cache="off"
    ):
        self.connection = FakeConnection(data)
        self.span = span_of(data)
        self.counters = JobCounters()
        self.now = 0.0
        self.width = PushdownConcurrency(4)
        self.limits = []
        self.read_concurrency = ReadConcurrency(
            4,
            lambda: 0,
            lambda: self.limits.append(self.read_concurrency.limit),
        )
        self.raw = RawSource(
            self.connection,
            "c",
            pool,
            SampleForm(SHAPE),
            LIMITS,
            self.counters,
            MetricsCollector(lambda: 0),
            self.read_concurrency,
        )
        self.pushed = FeatureSource(
            self.connection,
            "c",
            FeatureRequestSpec(MODEL, 2, encoding, shape, cache),
            self.raw,
            PushdownCircuitBreaker(lambda: self.now, 5),
            self.width,
            LIMITS,
            self.counters,
        )

    def load(self):
        return self.pushed.load(self.span, CancelScope())


@pytest.fixture
def bench(pool):
    return Bench(pool, shard(10, 11, 12))


KEYS = ["k0", "k1", "k2"]


def test_a_raw_span_is_decoded_in_order(bench):
    loaded = bench.raw.load(bench.span, CancelScope())
    assert loaded.cut == 0
    assert loaded.features[:, 0, 0, 0].tolist() == [10, 11, 12]
    assert loaded.features.shape == (3, *SHAPE)


def test_a_raw_span_that_has_nearly_come_makes_room_for_another_read(bench):
    bench.raw.load(bench.span, CancelScope())
    # The first as it ends, and more are allowed when it has been decoded.
    assert bench.limits == [2, 2]
    assert bench.read_concurrency.limit == 1


def test_a_raw_span_of_training_is_changed_by_epoch_and_key(bench):
    tasks = [bench.raw.task(bench.span, epoch) for epoch in (ONE, TWO, None)]
    loaded = [task.load(CancelScope()).features for task in tasks]
    assert [each[:, 0, 0, 0].tolist() for each in loaded] == [
        [110, 111.125, 112.25],
        [210, 211.125, 212.25],
        [10, 11, 12],
    ]


def test_a_pushed_span_of_training_asks_for_its_epoch(bench):
    bench.connection.answers = [stream(KEYS)]
    for training in (ONE, TWO, None):
        bench.pushed.task(bench.span, training).load(CancelScope())
    asked = [each.transform for each in bench.connection.annotations]
    assert asked == [
        "train;seed=5;epoch=100",
        "train;seed=5;epoch=200",
        "eval",
    ]


@pytest.mark.parametrize(
    "answer",
    [
        stream(KEYS, errors=(1,)),
        make_error("unsupported_transform", "no augmentation"),
        make_error("unknown_transform", "an older release"),
    ],
)
def test_a_span_of_training_that_falls_back_has_its_epoch(bench, answer):
    bench.connection.answers = [answer]
    loaded = bench.pushed.task(bench.span, ONE).load(CancelScope())
    assert loaded.cut == 0
    assert loaded.features[:, 0, 0, 0].tolist() == [110, 111.125, 112.25]
    bench.pushed._breaker.failed()
    loaded = bench.pushed.task(bench.span, TWO).load(CancelScope())
    assert loaded.features[:, 0, 0, 0].tolist() == [210, 211.125, 212.25]


class FakeSources:
    """Given ones."""

    num_threads = 3

    def __init__(self, routes, tracker):
        self.tracker = tracker
        self._routes = routes

    def __call__(self, route):
        return self._routes[route]

    def recording(self, recorder):
        return nullcontext()


def test_loaders_of_two_epochs_and_of_none_go_their_own_ways(bench):
    scheduler, metrics = (
        RouteScheduler({RAW_ROUTE: 1.0}),
        MetricsCollector(lambda: 0),
    )
    found = []
    for training in (ONE, None, TWO):
        sources = FakeSources({RAW_ROUTE: bench.raw}, CacheTracker())
        source = RoutingSource(
            scheduler, sources, metrics, EpochRecorder(), training
        )
        task = source.task(bench.span, lambda read_queue: True, 3)
        found.append(task.load(CancelScope()).features[0, 0, 0, 0].item())
    assert found == [110, 10, 210]


def test_undecodable_samples_are_told_apart(pool):
    bench = Bench(pool, shard(10, "bad", 12))
    loaded = bench.raw.load(bench.span, CancelScope())
    assert loaded.failures == {1: "no image"}
    assert loaded.features[:, 0, 0, 0].tolist() == [10, 12]


def test_another_key_than_the_indexs_is_refused_by_name(bench):
    bench.connection.data = tar_of(
        [("k0.jpg", b"10"), ("kX.jpg", b"11"), ("k2.jpg", b"12")]
    )
    with pytest.raises(ClientError) as caught:
        bench.raw.load(bench.span, CancelScope())
    assert caught.value.code == "keys_changed"
    assert "'k1'" in caught.value.message
    assert "a.tar" in caught.value.message


def test_a_broken_range_is_read_again(bench):
    whole = bench.connection.get_range
    failures = [TruncatedStreamError("truncated", "broke")] * 2

    def flaky(*arguments, **keywords):
        if failures:
            raise failures.pop()
        return whole(*arguments, **keywords)

    bench.connection.get_range = flaky
    assert len(bench.raw.load(bench.span, CancelScope()).features) == 3
    assert bench.counters.snapshot().retries == 2


def test_a_pushed_span_asks_for_its_samples_and_bytes(bench):
    bench.connection.answers = [stream(KEYS)]
    loaded = bench.load()
    assert loaded.cut == 2
    assert loaded.features.tolist() == [[0, 0], [1, 1], [2, 2]]
    (annotation,) = bench.connection.annotations
    assert annotation.samples == bench.span.samples
    assert annotation.byte_range == bench.span.byte_range
    assert annotation.if_source_etag == "etag"
    assert annotation.model == MODEL
    assert bench.connection.ranges == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_features_of_every_encoding_come_back_as_float32(pool, encoding):
    bench = Bench(pool, shard(10, 11, 12), encoding, (3, 40))
    features = torch.randn(3, 3, 40)
    bench.connection.answers = [
        encoded_stream(KEYS, features, encoding, (2, 1))
    ]
    loaded = bench.load()
    sent = encode(features, encoding)
    wanted = decode_features(sent.array, encoding, sent.scale, sent.zero)
    assert loaded.features.dtype == torch.float32
    assert torch.equal(loaded.features, wanted)
    (annotation,) = bench.connection.annotations
    assert annotation.encoding == encoding


@pytest.mark.parametrize(
    ("dtype", "value_bytes", "sample_bytes"),
    [
        ("float32", 8, 0),
        ("float16", 6, 0),
        ("bfloat16", 6, 0),
        ("uint8", 5, 3 * 8),
    ],
)
def test_cost_is_that_of_what_comes_and_what_it_becomes(
    pool, dtype, value_bytes, sample_bytes
):
    bench = Bench(pool, shard(10, 11), dtype, (3, 40))
    wanted = 2 * (3 * 40 * value_bytes + sample_bytes)
    assert bench.pushed.cost_bytes(bench.span) == wanted


@pytest.mark.parametrize(
    ("answered", "shape"), [("float16", (2,)), ("float32", (3,))]
)
def test_features_that_were_not_asked_for_are_not_delivered(
    bench, answered, shape
):
    features = torch.ones(3, *shape)
    bench.connection.answers = [encoded_stream(KEYS, features, answered, (3,))]
    loaded = bench.load()
    assert loaded.cut == 0
    assert bench.counters.snapshot().fallbacks == 1


def test_kept_features_cost_the_store_nothing(bench, caplog):
    bench.connection.answers = [stream(KEYS)]
    bench.connection.cache = "hit"
    report = bench.load().report
    assert report.was_cached
    assert report.server_cpu_seconds == 0
    assert bench.counters.snapshot().cached == 3
    bench.connection.cache = "store"
    assert not bench.load().report.was_cached
    assert bench.counters.snapshot().cached == 3
    assert not caplog.records


def caching_source(bench, tracker, metrics):
    """Streams spans, except those that are cached."""
    pushed = FeatureSource(
        bench.connection,
        "c",
        FeatureRequestSpec(MODEL, *PUSHED, (2,), tracker.mode),
        bench.raw,
        PushdownCircuitBreaker(lambda: bench.now, 5),
        bench.width,
        LIMITS,
        bench.counters,
        tracker,
    )
    sources = FakeSources({RAW_ROUTE: bench.raw, PUSHED: pushed}, tracker)
    sources.read_concurrency = bench.read_concurrency
    return RoutingSource(
        RouteScheduler({RAW_ROUTE: 1.0}), sources, metrics, EpochRecorder()
    )


def caching():
    tracker = CacheTracker("readwrite")
    tracker.identify("digest", "exact")
    tracker.use([PUSHED])
    return tracker


def test_a_cached_span_is_read_outside_the_plan(bench):
    tracker, metrics = caching(), MetricsCollector(lambda: 0)
    source = caching_source(bench, tracker, metrics)
    bench.connection.answers = [stream(KEYS)]

    def load():
        task = source.task(bench.span, lambda read_queue: True, 3)
        return task.read_queue, task.load(CancelScope())

    assert load()[0] == "raw"
    bench.connection.cache = "store"
    source._sources(PUSHED).load(bench.span, CancelScope())
    bench.connection.cache = "hit"
    metrics.take()
    credit = dict(source._scheduler._credit)
    read_queue, loaded = load()
    assert (read_queue, loaded.cut) == ("cached", 2)
    assert (
        source.concurrency_limit("cached"),
        source.concurrency_limit("raw"),
    ) == (3, 1)
    assert source._scheduler._credit == credit
    seen = metrics.take()
    assert seen.cached == {PUSHED: 3}
    assert (seen.push_seconds, seen.max_pushed) == (0, 0)
    # It has gone by now: computed once more, and dealt from then on.
    bench.connection.cache = "miss"
    assert load()[0] == "cached"
    assert metrics.take().pushed_samples == 3
    assert load()[0] == "raw"


def test_a_cached_span_is_streamed_while_push_down_rests(bench):
    tracker, metrics = caching(), MetricsCollector(lambda: 0)
    source = caching_source(bench, tracker, metrics)
    tracker.record(PUSHED, bench.span, None, "store")
    source._sources(PUSHED)._breaker.failed()
    task = source.task(bench.span, lambda read_queue: True, 3)
    assert task.read_queue == "raw"
    assert task.load(CancelScope()).cut == 0


def test_hits_of_kept_spans_do_not_widen_what_the_worker_admits(bench):
    bench.width.refused(BUSY)
    before = bench.width.limit
    bench.connection.answers = [stream(KEYS)]
    bench.connection.cache = "hit"

    def load(*, expect_hit):
        task = bench.pushed.task(bench.span, expect_hit=expect_hit)
        task.load(CancelScope())

    for _ in range(100):
        load(expect_hit=True)
    assert bench.width.limit == before
    # Where the cut is fixed, hits are all that may come any more.
    for _ in range(100):
        load(expect_hit=False)
    assert bench.width.limit > before


def test_a_hit_ends_the_rest_of_push_down(bench):
    bench.pushed._breaker.failed(BUSY)
    bench.connection.answers = [stream(KEYS)]
    bench.connection.cache = "hit"
    bench.now += 10
    for _ in range(2):
        task = bench.pushed.task(bench.span)
        assert task.read_queue == "pushdown"
        assert task.load(CancelScope()).report.was_cached


def test_features_with_errors_are_not_taken_to_be_cached(bench):
    tracker, metrics = caching(), MetricsCollector(lambda: 0)
    source = caching_source(bench, tracker, metrics)
    bench.connection.answers = [stream(KEYS, errors=(1,))]
    bench.connection.cache = "store"
    source._sources(PUSHED).load(bench.span, CancelScope())
    assert tracker.cached_route(bench.span, None) is None


def test_store_that_keeps_nothing_is_warned_of_once(pool, caplog):
    bench = Bench(pool, shard(10, 11, 12), cache="readwrite")
    bench.connection.answers = [stream(KEYS)]
    bench.load()
    bench.load()
    assert [each.cache for each in bench.connection.annotations] == [
        "readwrite"
    ] * 2
    (record,) = caplog.records
    assert "caches no features" in record.getMessage()


def test_features_may_be_changed_in_place(bench):
    bench.connection.answers = [stream(KEYS)]
    loaded = bench.load()
    loaded.features.add_(1)
    assert loaded.features[0].tolist() == [1, 1]


def test_samples_the_store_cannot_decode_are_tried_here(bench):
    """Its limits must not decide which samples an epoch has."""
    bench.connection.answers = [stream(KEYS, errors={1})]
    loaded = bench.load()
    assert loaded.cut == 0
    assert loaded.failures == {}
    assert len(loaded.features) == 3
    row = bench.span.rows[1]
    alone = ByteRange(row.offset, row.offset + row.length - 1)
    assert bench.connection.ranges == [alone, bench.span.byte_range]
    assert bench.counters.snapshot().fallbacks == 1
    # It is known by now, so that nothing is computed in vain.
    task = bench.pushed.task(bench.span)
    assert task.read_queue == "raw"
    assert len(task.load(CancelScope()).features) == 3
    assert len(bench.connection.annotations) == 1


def test_of_samples_nobody_can_decode_only_their_bytes_are_read_once(pool):
    bench = Bench(pool, shard(10, "bad", 12))
    bench.connection.answers = [stream(KEYS, errors={1})]
    for _epoch in range(3):
        loaded = bench.pushed.task(bench.span).load(CancelScope())
        assert loaded.cut == 2
        assert loaded.failures == {1: "no image"}
        assert loaded.features.tolist() == [[0, 0], [2, 2]]
    row = bench.span.rows[1]
    assert bench.connection.ranges == [
        ByteRange(row.offset, row.offset + row.length - 1)
    ]
    assert bench.counters.snapshot().fallbacks == 0


def test_clipped_features_are_counted_and_warned_of_once(bench, caplog):
    bench.connection.answers = [stream(KEYS, saturated=2)]
    bench.load()
    bench.load()
    assert bench.counters.snapshot().saturated == 4
    (warning,) = [r for r in caplog.records if "clipped" in r.getMessage()]
    assert "float32" in warning.getMessage()


def test_features_are_float32_whatever_torchs_default_is(bench):
    bench.connection.answers = [stream(KEYS)]
    torch.set_default_dtype(torch.float64)
    try:
        assert bench.load().features.dtype == torch.float32
        raw = bench.raw.load(bench.span, CancelScope())
    finally:
        torch.set_default_dtype(torch.float32)
    assert raw.features.dtype == torch.float32


@pytest.mark.parametrize(
    "first", [BUSY, stream(KEYS, closed=False), stream(KEYS)[:-200]]
)
def test_a_broken_stream_is_asked_for_again_whole(bench, first):
    bench.connection.answers = [first, stream(KEYS)]
    loaded = bench.load()
    assert loaded.cut == 2
    assert len(loaded.features) == 3
    assert bench.counters.snapshot().retries == 1
    assert bench.counters.snapshot().fallbacks == 0


def test_after_the_last_try_the_span_is_streamed(bench):
    bench.connection.answers = [BUSY]
    assert bench.load().cut == 0
    assert len(bench.connection.annotations) == 3
    assert bench.counters.snapshot().fallbacks == 1


def test_while_the_gate_is_shut_no_push_is_tried(bench):
    bench.connection.answers = [BUSY]
    bench.load()
    assert bench.load().cut == 0
    assert len(bench.connection.annotations) == 3
    assert bench.counters.snapshot().fallbacks == 2


def test_push_down_comes_back_by_itself(bench):
    bench.connection.answers = [BUSY]
    bench.load()
    bench.connection.answers = [stream(KEYS)]
    bench.now = 6
    assert bench.load().cut == 2
    assert bench.load().cut == 2


@pytest.mark.parametrize(
    "error",
    [
        SourceChangedError("source_changed", "x"),
        make_error("bad_annotation", "x"),
        make_error("unauthorized", "x"),
        make_error("forbidden", "x"),
        make_error("not_found", "x"),
    ],
)
def test_what_streaming_would_meet_as_well_is_raised(bench, error):
    bench.connection.answers = [error]
    with pytest.raises(type(error)):
        bench.load()
    assert len(bench.connection.annotations) == 1
    assert bench.connection.ranges == []


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedError("does_not_fit", "x"),
        ClientError("no_hapi", "x"),
        make_error("object_too_large", "x"),
        make_error("bad_package", "x"),
        make_error("compute_not_allowed", "x"),
        make_error("not_found", "x", details={"object_role": "model"}),
    ],
)
def test_what_only_the_store_refuses_is_streamed_at_once(bench, error, caplog):
    bench.connection.answers = [error]
    assert bench.load().cut == 0
    assert len(bench.connection.annotations) == 1
    assert bench.counters.snapshot().fallbacks == 1
    assert error.code in caplog.text


def test_fall_backs_are_told_once_with_object_and_transaction(bench, caplog):
    caplog.set_level("INFO", "hapi_client")
    error = UnavailableError(
        "worker_unavailable", "x", object_name="c/a.tar", trans_id="tx7"
    )
    bench.connection.answers = [error] * 99
    for _ in range(5):
        bench.pushed._breaker._probe_at = None
        assert bench.load().cut == 0
    (recording,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "push-down of a.tar 0-2 failed" in recording.message
    assert "object c/a.tar, transaction tx7" in recording.message
    assert bench.counters.snapshot().fallbacks == 5


@pytest.mark.parametrize("keys", [["k0", "kX", "k2"], ["k0", "k1"]])
def test_pushed_keys_must_be_those_of_the_index(bench, keys):
    bench.connection.answers = [stream(keys)]
    with pytest.raises(ClientError) as caught:
        bench.load()
    assert caught.value.code == "keys_changed"


def test_a_changed_shard_is_named_when_pushed(bench):
    bench.connection.answers = [SourceChangedError("source_changed", "412")]
    with pytest.raises(SourceChangedError, match=r"c/a\.tar has changed"):
        bench.load()


def test_a_cancelled_scope_ends_the_tries(bench):
    bench.connection.answers = [BUSY]
    scope = CancelScope()
    scope.set_cancelled()
    with pytest.raises(ClientError, match="closed"):
        bench.pushed.load(bench.span, scope)
    assert not bench.connection.annotations


def test_a_pause_of_decoding_is_no_time_of_a_span(bench, pool):
    bench.raw._limits = SpanLimits(1.0, Backoff(attempts=1))
    with ThreadPoolExecutor(1) as thread:
        with pool.paused(5):
            loading = thread.submit(bench.raw.load, bench.span, CancelScope())
            with pytest.raises(FutureTimeoutError):
                loading.result(2.0)
        loaded = loading.result(5)
    assert loaded.features[:, 0, 0, 0].tolist() == [10, 11, 12]


def test_an_image_that_takes_too_long_is_named_as_that():
    begun = threading.Event()
    pool = DecodePool(lambda *_: begun.wait(5) and None, 1)
    try:
        future = pool.submit(b"1", torch.empty(SHAPE))
        with pytest.raises(TooSlowError, match=r"in 0\.2 s"):
            pool.result(future, 0.2)
    finally:
        begun.set()
        pool.close()


def test_the_pool_leaves_the_callers_threads_as_they_were():
    before = torch.get_num_threads()
    inside = []
    pool = DecodePool(
        lambda *_: inside.append(torch.get_num_threads()) or torch.zeros(1), 2
    )
    pool.submit(b"", torch.zeros(1)).result(5)
    pool.close()
    assert inside == [1]
    assert torch.get_num_threads() == before


def test_spans_go_the_plain_lane_while_push_down_rests(bench):
    assert bench.pushed.task(bench.span).read_queue == "pushdown"
    bench.pushed._breaker.failed()

    task = bench.pushed.task(bench.span)
    loaded = task.load(CancelScope())

    assert task.read_queue == "raw"
    assert task.cost_bytes == bench.raw.cost_bytes(bench.span)
    assert loaded.cut == 0
    assert loaded.report.fell_back
    assert bench.counters.snapshot().fallbacks == 1
    bench.now += 5
    assert bench.pushed.task(bench.span).read_queue == "pushdown"
