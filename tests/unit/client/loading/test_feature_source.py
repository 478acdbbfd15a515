"""Loading of one span as features or raw, and the fallback."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hapi_client.loading import raw_source
from hapi_client.loading.circuit_breaker import (
    PushdownCircuitBreaker,
    PushdownConcurrency,
)
from hapi_client.loading.decode_pool import DecodePool
from hapi_client.loading.feature_fetcher import FeatureFetcher
from hapi_client.loading.feature_request import (
    FeatureRequestSpec,
    check_objects,
)
from hapi_client.loading.feature_source import FeatureSource
from hapi_client.loading.raw_source import RawSource
from hapi_client.loading.read_concurrency import ReadConcurrency
from hapi_client.loading.route_source import RoutingSource
from hapi_client.loading.span_source import SpanLimits
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.swift.retry import Backoff
from hapi_client.swift.traffic_counters import Traffic
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.encodings import ENCODINGS
from hapi_protocol.errors import (
    ClientError,
    HapiError,
    TooSlowError,
    TruncatedStreamError,
    UnavailableError,
    make_error,
)
from hapi_protocol.feature_stream import Row, feature_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.headers import ByteRange, ModelPath
from hapi_protocol.samples import SampleError
from hapi_protocol.shards import iter_samples
from hapi_protocol.transforms import Training
from hapi_splitter.encodings import decode as decode_features
from hapi_splitter.encodings import encode
from hapi_splitter.inputs.sample_format import SampleForm
from hapi_splitter.planner.problem import RAW_ROUTE, Route
from photos import tar_of

SHAPE = (1, 2, 2)
LIMITS = SpanLimits(5, Backoff(attempts=3, first_seconds=0, max_seconds=0))
MODEL = ModelPath("AUTH_test", "models", "x.hapi")
ONE, TWO = Training(seed=5, epoch=100), Training(seed=5, epoch=200)
PUSHED = Route(2, "float32")
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
    return Span("a.tar", "etag", rows, "c")


KEYS = ["k0", "k1", "k2"]
FEATURES = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])


def stream(
    keys=KEYS,
    features=FEATURES,
    encoding="float32",
    *,
    errors=(),
    closed=True,
    saturated=0,
):
    """A stream of two batches."""
    sink = io.BytesIO()
    schema = feature_schema(features.shape[1:], encoding)
    writer = FeatureStreamWriter(sink, schema)
    rows = [
        Row(n, key, error="bad" if n in errors else None)
        for n, key in enumerate(keys)
    ]
    for batch in (rows[:2], rows[2:]):
        good = [row.index for row in batch if row.error is None]
        sent = encode(features[good], encoding)
        writer.write(batch, sent.array, scale=sent.scale, zero=sent.zero)
    if closed:
        writer.close(source_etag="etag", source_bytes=1, saturated=saturated)
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
        self.connection.answers = [stream()]
        self.span = span_of(data)
        self.recorder = JobRecorder(Traffic())
        self.counters = self.recorder.counters
        self.now = 0.0
        self.concurrency = PushdownConcurrency(4)
        self.limits = []
        self.read_concurrency = ReadConcurrency(
            4,
            lambda: 0,
            lambda: self.limits.append(self.read_concurrency.limit),
        )
        self.raw = RawSource(
            self.connection,
            pool,
            SampleForm(SHAPE),
            LIMITS,
            self.recorder,
            self.read_concurrency,
        )
        spec = FeatureRequestSpec(MODEL, 2, encoding, shape, cache)
        self.pushed = self.feature_source(spec)
        row = self.span.rows[1]
        self.row_range = ByteRange(row.offset, row.offset + row.length - 1)

    def feature_source(self, spec, *tracker):
        return FeatureSource(
            FeatureFetcher(
                self.connection, spec, LIMITS.seconds, self.counters, *tracker
            ),
            self.raw,
            PushdownCircuitBreaker(lambda: self.now),
            self.concurrency,
            LIMITS,
            self.counters,
        )

    def load(self, training=None, source=None):
        task = (source or self.pushed).task(self.span, training)
        return task.load(CancelScope())

    def load_raw(self):
        return self.raw.load(self.span, CancelScope())

    @property
    def fallbacks(self):
        return self.counters.count().fallbacks


@pytest.fixture
def bench(pool):
    return Bench(pool, shard(10, 11, 12))


def values(loaded):
    return loaded.features[:, 0, 0, 0].tolist()


def test_raw_span_is_decoded_in_order(bench):
    loaded = bench.load_raw()
    assert loaded.cut == 0
    assert values(loaded) == [10, 11, 12]
    assert loaded.features.shape == (3, *SHAPE)
    # Another read may begin at its end, and when it has been decoded.
    assert bench.limits == [2, 2]
    assert bench.read_concurrency.limit == 1


CHANGED = {
    ONE: [110, 111.125, 112.25],
    TWO: [210, 211.125, 212.25],
    None: [10, 11, 12],
}


def test_pushed_span_requests_the_changes_of_its_epoch(bench):
    for training in CHANGED:
        bench.load(training)
    assert [each.transform for each in bench.connection.annotations] == [
        "train;seed=5;epoch=100",
        "train;seed=5;epoch=200",
        "eval",
    ]


@pytest.mark.parametrize(
    "answer",
    [
        stream(errors=(1,)),
        make_error("unsupported_transform", "no augmentation"),
        make_error("unknown_transform", "an older release"),
    ],
)
def test_fallback_has_the_changes_of_its_epoch(bench, answer):
    bench.connection.answers = [answer]
    loaded = bench.load(ONE)
    assert loaded.cut == 0
    assert values(loaded) == CHANGED[ONE]
    bench.pushed._breaker.failed()
    assert values(bench.load(TWO)) == CHANGED[TWO]


class FakeSources:
    """Registry of given sources."""

    num_threads = 3

    def __init__(self, routes, tracker):
        self.tracker = tracker
        self._routes = routes

    def __call__(self, route):
        return self._routes[route]

    early = SimpleNamespace(holds=lambda span: False)


def test_each_loader_has_the_changes_of_its_epoch(bench):
    scheduler = RouteScheduler({RAW_ROUTE: 1.0})
    sources = FakeSources({RAW_ROUTE: bench.raw}, CacheTracker())
    for training, expected in CHANGED.items():
        source = RoutingSource(
            scheduler, sources, EpochRecorder(bench.recorder), training
        )
        task = source.task(bench.span, lambda read_queue: True, 3)
        assert values(task.load(CancelScope())) == expected


def test_damaged_bytes_are_read_again_and_not_kept(bench, monkeypatch):
    data = bench.connection.data
    crc32s = [s.crc32 for s in iter_samples(io.BytesIO(data), name="s")]
    rows = zip(bench.span.rows, crc32s, strict=True)
    bench.span = replace(
        bench.span, rows=tuple(replace(r, crc32=crc) for r, crc in rows)
    )
    reads = [data.replace(b"11", b"10"), data]
    kept = []
    stored = SimpleNamespace(
        get=lambda span: None, put=lambda span, found: kept.append(found)
    )
    monkeypatch.setattr(raw_source, "delay_seconds", lambda *args: 0)
    monkeypatch.setattr(bench.raw, "_read", lambda span: reads.pop(0))
    monkeypatch.setattr(bench.raw, "_stored", lambda training: stored)
    assert values(bench.load_raw()) == [10, 11, 12]
    assert kept == [data]
    reads += [data.replace(b"12", b"10")] * LIMITS.backoff.attempts
    with pytest.raises(UnavailableError, match=r"sample 2 \('k2'\)") as caught:
        bench.load_raw()
    assert caught.value.code == "source_damaged"
    assert kept == [data]
    bench.load()
    assert bench.connection.annotations[0].crc32s == tuple(crc32s)


def test_samples_that_cannot_be_decoded_are_failures(pool):
    loaded = Bench(pool, shard(10, "bad", 12)).load_raw()
    assert loaded.failures == {1: "no image"}
    assert values(loaded) == [10, 12]


@pytest.mark.parametrize("keys", [["k0", "kX", "k2"], ["k0", "k1"]])
def test_keys_must_be_those_of_the_index(bench, keys):
    bench.connection.answers = [stream(keys)]
    bench.connection.data = tar_of([(f"{key}.jpg", b"10") for key in keys])
    named = r"a\.tar: sample \d is 'k\d'"
    for load in (bench.load_raw, bench.load):
        with pytest.raises(ClientError, match=named) as caught:
            load()
        assert caught.value.code == "keys_changed"


def break_off(bench, num_reads):
    """Lets a number of raw reads break off."""
    get_range = bench.connection.get_range
    failures = [TruncatedStreamError("truncated", "broke")] * num_reads

    def flaky(*arguments, **keywords):
        if failures:
            raise failures.pop()
        return get_range(*arguments, **keywords)

    bench.connection.get_range = flaky


@pytest.mark.parametrize(
    ("num_reads", "retry_seconds"),
    [(LIMITS.backoff.attempts - 1, 0), (20, 60)],
)
def test_broken_range_is_read_again(bench, num_reads, retry_seconds):
    """It is read for ``retry_seconds``, in more than the usual attempts."""
    bench.raw._limits = replace(LIMITS, retry_seconds=retry_seconds)
    break_off(bench, num_reads)
    assert len(bench.load_raw().features) == 3
    assert bench.counters.count().retries == num_reads


@pytest.mark.parametrize("retry_seconds", [0, 1e-9])
def test_range_that_stays_broken_is_an_error(bench, retry_seconds):
    bench.raw._limits = replace(LIMITS, retry_seconds=retry_seconds)
    break_off(bench, 20)
    with pytest.raises(TruncatedStreamError) as caught:
        bench.load_raw()
    assert ("retry_seconds" in str(caught.value)) == bool(retry_seconds)


def test_pushed_span_requests_its_samples_and_bytes(bench):
    loaded = bench.load()
    assert loaded.cut == 2
    assert loaded.features.tolist() == [[0, 0], [1, 1], [2, 2]]
    loaded.features.add_(1)  # writable
    (annotation,) = bench.connection.annotations
    assert annotation.samples == bench.span.samples
    assert annotation.byte_range == bench.span.byte_range
    assert annotation.if_source_etag == "etag"
    assert annotation.model == MODEL
    assert bench.connection.ranges == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_features_of_every_encoding_arrive_as_float32(pool, encoding):
    bench = Bench(pool, shard(10, 11, 12), encoding, (3, 40))
    features = torch.randn(3, 3, 40)
    bench.connection.answers = [stream(KEYS, features, encoding)]
    loaded = bench.load()
    sent = encode(features, encoding)
    expected = decode_features(sent.array, encoding, sent.scale, sent.zero)
    assert loaded.features.dtype == torch.float32
    assert torch.equal(loaded.features, expected)
    assert bench.connection.annotations[0].encoding == encoding


def test_features_are_float32_with_another_default_of_torch(bench):
    torch.set_default_dtype(torch.float64)
    try:
        loaded = [bench.load(), bench.load_raw()]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {each.features.dtype for each in loaded} == {torch.float32}


@pytest.mark.parametrize(
    ("dtype", "value_bytes", "sample_bytes"),
    [
        ("float32", 8, 0),
        ("float16", 6, 0),
        ("bfloat16", 6, 0),
        ("uint8", 5, 24),
    ],
)
def test_cost_counts_received_and_decoded_features(
    pool, dtype, value_bytes, sample_bytes
):
    bench = Bench(pool, shard(10, 11), dtype, (3, 40))
    expected = 2 * (3 * 40 * value_bytes + sample_bytes)
    assert bench.pushed.task(bench.span).cost_bytes == expected


@pytest.mark.parametrize(
    ("answered", "shape"), [("float16", (2,)), ("float32", (3,))]
)
def test_features_other_than_requested_are_not_delivered(
    bench, answered, shape
):
    features = torch.ones(3, *shape)
    bench.connection.answers = [stream(KEYS, features, answered)]
    assert bench.load().cut == 0
    assert bench.fallbacks == 1


def test_cached_features_use_nothing_of_the_worker(bench, caplog):
    bench.connection.cache = "hit"
    costs = bench.load().costs
    assert costs.was_cached
    assert costs.server_cpu_seconds == 0
    bench.connection.cache = "store"
    assert not bench.load().costs.was_cached
    assert bench.counters.count().cached == 3
    assert not caplog.records


@pytest.fixture
def tracker():
    tracker = CacheTracker("readwrite")
    tracker.identify("digest", "exact")
    tracker.use([PUSHED])
    return tracker


@pytest.fixture
def source(bench, tracker):
    """Reads spans raw, except those that are cached."""
    spec = FeatureRequestSpec(MODEL, *PUSHED, (2,), tracker.mode)
    pushed = bench.feature_source(spec, tracker)
    sources = FakeSources({RAW_ROUTE: bench.raw, PUSHED: pushed}, tracker)
    sources.read_concurrency = bench.read_concurrency
    return RoutingSource(
        RouteScheduler({RAW_ROUTE: 1.0}),
        sources,
        EpochRecorder(bench.recorder),
    )


def test_cached_span_is_read_outside_the_weights(bench, source):
    def load():
        task = source.task(bench.span, lambda read_queue: True, 3)
        return task.read_queue, task.load(CancelScope())

    assert load()[0] == "raw"
    bench.connection.cache = "store"
    bench.load(source=source._sources(PUSHED))
    bench.connection.cache = "hit"
    bench.recorder.take()
    credit = dict(source._scheduler._credit)
    read_queue, loaded = load()
    assert (read_queue, loaded.cut) == ("cached", 2)
    assert source.concurrency_limit("cached") == 3
    assert source.concurrency_limit("raw") == 1
    assert source._scheduler._credit == credit
    window = bench.recorder.take()
    assert window.cached == {PUSHED: 3}
    assert (window.pushed.seconds, window.max_pushed) == (0, 0)
    # Evicted meanwhile: computed once more, and scheduled from then on.
    bench.connection.cache = "miss"
    assert load()[0] == "cached"
    assert bench.recorder.take().pushed.samples == 3
    assert load()[0] == "raw"


def test_cached_span_is_read_raw_while_the_breaker_is_open(
    bench, source, tracker
):
    tracker.record(PUSHED, bench.span, None, "store")
    source._sources(PUSHED)._breaker.failed()
    task = source.task(bench.span, lambda read_queue: True, 3)
    assert task.read_queue == "raw"
    assert task.load(CancelScope()).cut == 0


def test_features_with_errors_do_not_count_as_cached(bench, source, tracker):
    bench.connection.answers = [stream(errors=(1,))]
    bench.connection.cache = "store"
    bench.load(source=source._sources(PUSHED))
    assert tracker.cached_route(bench.span, None) is None


@pytest.mark.parametrize("expect_hit", [True, False])
def test_only_unexpected_hits_raise_the_concurrency_limit(bench, expect_hit):
    bench.concurrency.refused(BUSY)
    before = bench.concurrency.limit
    bench.connection.cache = "hit"
    for _ in range(100):
        task = bench.pushed.task(bench.span, expect_hit=expect_hit)
        task.load(CancelScope())
    assert (bench.concurrency.limit == before) is expect_hit


def test_hit_closes_the_breaker(bench):
    bench.pushed._breaker.failed(BUSY)
    bench.connection.cache = "hit"
    bench.now += 10
    for _ in range(2):
        task = bench.pushed.task(bench.span)
        assert task.read_queue == "pushdown"
        assert task.load(CancelScope()).costs.was_cached


def test_disabled_cache_is_logged_once(pool, caplog):
    bench = Bench(pool, shard(10, 11, 12), cache="readwrite")
    for _ in range(2):
        bench.load()
        assert bench.connection.annotations[-1].cache == "readwrite"
    (record,) = caplog.records
    assert "caches no features" in record.getMessage()


def test_client_decodes_samples_that_the_store_cannot(bench):
    """The store's limits must not change the samples of an epoch."""
    bench.connection.answers = [stream(errors={1})]
    loaded = bench.load()
    assert loaded.cut == 0
    assert loaded.failures == {}
    assert len(loaded.features) == 3
    assert bench.connection.ranges == [bench.row_range, bench.span.byte_range]
    assert bench.fallbacks == 1
    # The next time, no features are requested.
    task = bench.pushed.task(bench.span)
    assert task.read_queue == "raw"
    assert len(task.load(CancelScope()).features) == 3
    assert len(bench.connection.annotations) == 1


def test_sample_that_nobody_can_decode_is_read_once(pool):
    bench = Bench(pool, shard(10, "bad", 12))
    bench.connection.answers = [stream(errors={1})]
    for _epoch in range(3):
        loaded = bench.load()
        assert loaded.cut == 2
        assert loaded.failures == {1: "no image"}
        assert loaded.features.tolist() == [[0, 0], [2, 2]]
    assert bench.connection.ranges == [bench.row_range]
    assert bench.fallbacks == 0


@pytest.mark.parametrize(
    ("meta", "code"),
    [
        ({"status": 404, "etag": None}, "source_changed"),
        ({"status": 200, "etag": "other"}, "source_changed"),
        ({"status": 503, "etag": None}, "worker_unavailable"),
        ({}, "truncated"),
    ],
)
def test_objects_are_compared_with_the_index(bench, meta, code):
    rows = [Row(0, "k0", meta=json.dumps(meta))]
    with pytest.raises(HapiError) as caught:
        check_objects(bench.span, rows)
    assert caught.value.code == code


def test_clipped_features_are_counted_and_logged_once(bench, caplog):
    bench.connection.answers = [stream(saturated=2)]
    bench.load()
    bench.load()
    assert bench.counters.count().saturated == 4
    (warning,) = [r for r in caplog.records if "clipped" in r.getMessage()]
    assert "float32" in warning.getMessage()


@pytest.mark.parametrize(
    "first", [BUSY, stream(closed=False), stream()[:-200]]
)
def test_broken_stream_is_requested_again(bench, first):
    bench.connection.answers = [first, stream()]
    loaded = bench.load()
    assert (loaded.cut, len(loaded.features)) == (2, 3)
    stats = bench.counters.count()
    assert (stats.retries, stats.fallbacks) == (1, 0)


def test_push_down_stops_after_the_last_attempt_until_a_probe(bench):
    bench.connection.answers = [BUSY]
    for fallbacks in (1, 2):
        assert bench.load().cut == 0
        assert len(bench.connection.annotations) == 3
        assert bench.fallbacks == fallbacks
    bench.connection.answers = [stream()]
    bench.now = 6
    assert bench.load().cut == 2
    assert bench.load().cut == 2


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("source_changed", r"c/a\.tar has changed"),
        ("bad_annotation", "x"),
        ("unauthorized", "x"),
        ("forbidden", "x"),
        ("not_found", "x"),
    ],
)
def test_error_that_raw_reads_would_meet_is_raised(bench, code, message):
    error = make_error(code, "x")
    bench.connection.answers = [error]
    with pytest.raises(type(error), match=message):
        bench.load()
    assert len(bench.connection.annotations) == 1
    assert bench.connection.ranges == []


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("does_not_fit", {}),
        ("no_hapi", {}),
        ("object_too_large", {}),
        ("bad_package", {}),
        ("compute_not_allowed", {}),
        ("not_found", {"object_role": "model"}),
    ],
)
def test_error_of_the_store_alone_falls_back_at_once(
    bench, code, details, caplog
):
    bench.connection.answers = [make_error(code, "x", details=details)]
    assert bench.load().cut == 0
    assert len(bench.connection.annotations) == 1
    assert bench.fallbacks == 1
    assert code in caplog.text


def test_fallbacks_are_logged_once_with_object_and_transaction(bench, caplog):
    caplog.set_level("INFO", "hapi_client")
    error = UnavailableError(
        "worker_unavailable", "x", object_name="c/a.tar", trans_id="tx7"
    )
    bench.connection.answers = [error] * 99
    for _ in range(5):
        bench.pushed._breaker._probe_at = None
        assert bench.load().cut == 0
    (warning,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "push-down of a.tar 0-2 failed" in warning.message
    assert "object c/a.tar, transaction tx7" in warning.message
    assert bench.fallbacks == 5


def test_cancelled_scope_ends_the_attempts(bench):
    bench.connection.answers = [BUSY]
    scope = CancelScope()
    scope.set_cancelled()
    with pytest.raises(ClientError, match="closed"):
        bench.pushed.load(bench.span, scope)
    assert not bench.connection.annotations


def test_raw_queue_is_used_while_the_breaker_is_open(bench):
    assert bench.pushed.task(bench.span).read_queue == "pushdown"
    bench.pushed._breaker.failed()
    task = bench.pushed.task(bench.span)
    loaded = task.load(CancelScope())
    assert task.read_queue == "raw"
    assert task.cost_bytes == bench.raw.cost_bytes(bench.span)
    assert loaded.cut == 0
    assert loaded.costs.fell_back
    assert bench.fallbacks == 1
    bench.now += 5
    assert bench.pushed.task(bench.span).read_queue == "pushdown"


def test_paused_decoding_does_not_count_for_the_deadline(bench, pool):
    bench.raw._limits = SpanLimits(1.0, Backoff(attempts=1))
    with ThreadPoolExecutor(1) as thread:
        with pool.paused(5):
            loading = thread.submit(bench.raw.load, bench.span, CancelScope())
            with pytest.raises(FutureTimeoutError):
                loading.result(2.0)
        loaded = loading.result(300)
    assert values(loaded) == [10, 11, 12]


def test_slow_decoding_is_a_named_error():
    begun = threading.Event()
    pool = DecodePool(lambda *_: begun.wait(300) and None, 1)
    try:
        future = pool.submit(b"1", torch.empty(SHAPE))
        with pytest.raises(TooSlowError, match=r"in 0\.2 s"):
            pool.result(future, 0.2)
    finally:
        begun.set()
        pool.close()


def test_decode_pool_keeps_the_callers_number_of_threads():
    before = torch.get_num_threads()
    inside = []
    pool = DecodePool(
        lambda *_: inside.append(torch.get_num_threads()) or torch.zeros(1), 2
    )
    pool.submit(b"", torch.zeros(1)).result(300)
    pool.close()
    assert inside == [1]
    assert torch.get_num_threads() == before
