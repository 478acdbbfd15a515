"""Batches of loaders: contents, order, errors, threads, reports."""

import gc
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch

from hapi_client.loading import prefetcher as prefetcher_module
from hapi_client.loading.feature_loader import FeatureLoader
from hapi_client.loading.loader_plan import LoaderPlan
from hapi_client.loading.prefetcher import MAX_EARLY_SPANS, Prefetcher
from hapi_client.loading.read_concurrency import ReadConcurrency
from hapi_client.loading.read_config import ReadConfig
from hapi_client.loading.span_source import LoadedSpan, SpanTask
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.sampling.partition import EpochPartition, Reader
from hapi_client.sampling.sampler import (
    ReadPlan,
    SamplerConfig,
    index_order,
    shuffled_order,
)
from hapi_client.swift.traffic_counters import Traffic
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import ClientError, HapiError, TooSlowError

CPU = torch.device("cpu")
SIX_AT_A_TIME = index_order([3] * 8, SamplerConfig(6))


def make_spans(sizes):
    return [
        Span(f"{n}.tar", "etag", tuple(row_of(n, row) for row in range(size)))
        for n, size in enumerate(sizes)
    ]


def row_of(span, row):
    return IndexRow(row, f"{span}/{row}", row * 512, 512, 0)


def value(span, row):
    return 100.0 * int(span.shard.partition(".")[0]) + row


class Source:
    """Loads spans of numbers; can wait, fail, or break samples."""

    def __init__(self, failures=(), seconds=0.0, error=None, read_queue="raw"):
        self.read_queue = read_queue
        self.failures = set(failures)
        self.seconds = seconds
        self.error = error
        self.loaded = []

    def concurrency_limit(self, read_queue):
        return 99

    def task(self, span, has_room, samples_left):
        load = partial(self.load, span)
        return SpanTask(self.read_queue, 10 * len(span.rows), load)

    def load(self, span, scope):
        scope.wait(self.seconds)
        self.loaded.append(span.shard)
        if self.error and span.shard == "1.tar":
            raise self.error
        keys = [row.key for row in span.rows]
        failures = {
            n: "broken" for n, k in enumerate(keys) if k in self.failures
        }
        good = [n for n in range(len(keys)) if n not in failures]
        features = torch.tensor([[value(span, n)] for n in good])
        return LoadedSpan(span, 0, features.reshape(-1, 1), failures)


def fake_connection():
    return SimpleNamespace(
        traffic=Traffic(),
        working_for=nullcontext,
        cancel=CancelScope.set_cancelled,
    )


def open_with(source, connection=None, **options):
    options = ReadConfig(**{"num_threads": 2, **options})
    connection = connection or fake_connection()
    return lambda spans: Prefetcher(connection, source, spans, options)


def make_loader(
    source,
    sizes,
    order=None,
    on_error="raise",
    open_spans=None,
    job=None,
    delivered=lambda step: None,
    **options,
):
    spans = make_spans(sizes)
    labels = [[value(s, n) for n in range(len(s.rows))] for s in spans]
    recorder = EpochRecorder(JobRecorder(Traffic()))
    plan = LoaderPlan(
        spans=spans,
        labels=[np.array(each, np.int64) for each in labels],
        on_error=on_error,
        **{
            "recorder": recorder,
            "run_suffix": lambda cut, f, size: f * 1.0,
            "batch_samples": lambda span_samples: span_samples,
            **(job or {}),
        },
    )
    order = order or index_order(sizes, SamplerConfig(4))
    reading = order if isinstance(order, ReadPlan) else order.read_plan()
    open_spans = open_spans or open_with(source, **options)
    loader = FeatureLoader(plan, reading, open_spans, CPU, delivered)
    return loader, plan.recorder.job.counters


def rows_of(loader):
    return [
        float(each)
        for features, labels in loader
        for each in features[:, 0].tolist()
        if torch.equal(features[:, 0].long(), labels)
    ]


SIZES = [5, 3, 7, 1]
ALL = [100.0 * span + row for span, n in enumerate(SIZES) for row in range(n)]


def fetch_threads():
    names = ("hapi-raw", "hapi-pushdown")
    return [t for t in threading.enumerate() if t.name.startswith(names)]


@contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not fetch_threads()


def test_batches_are_in_index_order_and_autograd_may_save_them():
    loader, _ = make_loader(Source(), SIZES)
    assert len(loader) == 4
    weight = torch.ones(1, requires_grad=True)
    rows = []
    for features, labels in loader:
        assert features[:, 0].tolist() == labels.tolist()
        rows += labels.tolist()
        assert not features.is_inference()
        assert (features.dtype, labels.dtype) == (torch.float32, torch.int64)
        features.mul_(2)
        (features * weight).sum().backward()
    assert rows == ALL
    assert weight.grad is not None
    with pytest.raises(RuntimeError, match="one epoch"):
        iter(loader)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("ahead_bytes", [1, 10_000])
def test_threads_and_memory_do_not_change_the_order(num_threads, ahead_bytes):
    def run(**options):
        settings = SamplerConfig(4, buffer_spans=2)
        order = shuffled_order(SIZES, settings, seed=5, epoch=1)
        loader, counters = make_loader(Source(), SIZES, order, **options)
        rows = rows_of(loader)
        assert sorted(rows) == ALL
        assert counters.count().samples == len(ALL)
        return rows

    rows = run(num_threads=num_threads, ahead_bytes=ahead_bytes)
    assert rows == run() != ALL


def test_samples_count_as_left_until_the_loop_asks_for_more():
    class Waiting(Source):
        """Starts the second span when the loop is done with the first."""

        def task(self, span, has_room, samples_left):
            asked.append((span.shard, samples_left))
            if span.shard == "0.tar" or samples_left == 4:
                return super().task(span, has_room, samples_left)
            return None

    asked = []
    prefetcher = open_with(Waiting())(make_spans([4, 4]))
    spans = iter(prefetcher)
    next(spans)
    assert set(asked) == {("0.tar", 8), ("1.tar", 8)}
    next(spans)
    assert asked[-1] == ("1.tar", 4)
    prefetcher.close()


class FirstSpanWaits(Source):
    """The first span is pushed down, and waits for an event."""

    def __init__(self, **options):
        super().__init__(**options)
        self.event = threading.Event()

    def task(self, span, has_room, samples_left):
        if span.shard != "0.tar":
            return super().task(span, has_room, samples_left)
        return SpanTask("pushdown", 1, partial(self.wait, span))

    def wait(self, span, scope):
        assert self.event.wait(300)
        return self.load(span, scope)


def test_few_spans_that_have_arrived_come_before_one_that_has_not():
    source = FirstSpanWaits()
    prefetcher = open_with(source)(make_spans([4] * 9))
    spans = iter(prefetcher)
    early = [next(spans)[0] for _ in range(MAX_EARLY_SPANS)]
    threading.Timer(0.1, source.event.set).start()
    rest = [position for position, _ in spans]
    prefetcher.close()
    assert 0 not in early
    assert rest[0] == 0
    assert sorted(early + rest) == list(range(9))


def test_batches_are_the_same_if_spans_are_computed_out_of_order():
    source = FirstSpanWaits()
    computed = []

    def run_suffix(cut, features, size):
        computed.append(float(features[0, 0]) // 100)
        if len(computed) == MAX_EARLY_SPANS:
            source.event.set()
        return features * 1.0

    order = shuffled_order([4] * 9, SamplerConfig(4), seed=1, epoch=0)
    in_order = [piece.span for piece in order.read_plan().pieces]
    assert in_order.index(0) < MAX_EARLY_SPANS
    job = {"run_suffix": run_suffix}
    rows = rows_of(make_loader(source, [4] * 9, order, job=job)[0])
    assert computed != in_order
    assert rows == rows_of(make_loader(Source(), [4] * 9, order)[0])


@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        ({"failures": ["1/2"]}, "bad_sample", r"'1/2'.* 1\.tar"),
        ({"error": ClientError("not_found", "gone")}, "not_found", "gone"),
    ],
)
def test_error_of_a_span_out_of_order_is_raised_in_order(wrong, code, text):
    source = FirstSpanWaits(**wrong)
    loader, _ = make_loader(source, [4] * 3)
    threading.Timer(0.2, source.event.set).start()
    batches = iter(loader)
    assert next(batches)[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(ClientError, match=text) as caught:
        next(batches)
    assert caught.value.code == code


def test_memory_ahead_is_bounded():
    source = Source()
    loader, _ = make_loader(source, [5] * 20, ahead_bytes=150)
    batches = iter(loader)
    next(batches)
    time.sleep(0.2)
    assert len(source.loaded) <= 4
    loader.close()


def test_samples_are_skipped_and_counted_and_a_batch_has_its_keys():
    bad = {"0/1", "2/0", "2/1", "2/2", "2/3", "3/0"}
    steps = []
    loader, counters = make_loader(
        Source(bad), SIZES, on_error="skip", delivered=steps.append
    )
    assert loader.keys == []
    rows = []
    for features, labels in loader:
        assert len(labels) > 0  # all samples of step 2 are bad
        parts = [key.split("/") for key in loader.keys]
        values = [100.0 * int(span) + int(row) for span, row in parts]
        assert features[:, 0].tolist() == labels.tolist() == values
        rows += values
    assert rows == [v for v in ALL if v not in (1, 200, 201, 202, 203, 300)]
    assert steps == [0, 1, 2, 3]
    assert counters.count().skipped == len(bad)


@pytest.mark.parametrize("first_step", [0, 1])
def test_epoch_without_samples_is_an_error_unless_resumed(first_step):
    """A loop until a number of samples would never end."""
    order = index_order([3, 2], SamplerConfig(2))
    steps = []
    loader, counters = make_loader(
        Source({"0/0", "0/1", "0/2", "1/0", "1/1"}),
        [3, 2],
        order.read_plan(Reader(first_step=first_step)),
        on_error="skip",
        delivered=steps.append,
    )
    if first_step:
        assert list(loader) == []
    else:
        with pytest.raises(ClientError) as caught:
            list(loader)
        assert caught.value.code == "bad_sample"
        assert "none of the 5 samples" in caught.value.message
        assert "'0/0' of shard 0.tar: broken" in caught.value.message
    assert steps == [0, 1, 2][first_step:]
    assert counters.count().samples == 0


def test_step_of_virtual_nodes_may_have_no_samples():
    order = index_order([3, 3, 4], SamplerConfig(4, EpochPartition(4)))
    loader, _ = make_loader(
        Source({"0/1", "1/1", "1/2", "2/1"}),
        [3, 3, 4],
        order.read_plan(Reader((0, 2), 4)),
        on_error="skip",
        job={"empty_steps": "deliver"},
    )
    sizes = []
    for features, labels in loader:
        assert len(features) == len(labels) == sum(loader.sizes)
        sizes.append(loader.sizes)
    assert len(sizes) == 2
    assert all(len(of_nodes) == 2 for of_nodes in sizes)
    assert any(0 in of_nodes for of_nodes in sizes)


def test_short_slices_share_a_batch_of_the_frozen_layers():
    computed = []

    def run_suffix(cut, features, size):
        computed.append((len(features), size))
        return features * 1.0

    job = {"run_suffix": run_suffix, "batch_samples": lambda samples: 8}
    loader, _ = make_loader(Source(), [3] * 8, SIX_AT_A_TIME, job=job)
    assert rows_of(loader) == rows_of(
        make_loader(Source(), [3] * 8, SIX_AT_A_TIME)[0]
    )
    assert sum(count for count, _ in computed) == 24
    assert len(computed) <= 4
    assert {size for _, size in computed} == {8}


def test_step_that_other_ranks_take_is_an_error_without_samples():
    loader, _ = make_loader(
        Source({"0/2", "1/0", "1/1"}),
        [3, 3],
        index_order([3, 3], SamplerConfig(2)),
        on_error="skip",
        job={"empty_steps": "raise"},
    )
    batches = iter(loader)
    assert next(batches)[1].tolist() == [0, 1]
    with pytest.raises(ClientError) as caught:
        next(batches)
    assert caught.value.code == "bad_sample"
    assert "2 samples of step 1" in caught.value.message
    assert "sample '0/2' of shard 0.tar: broken" in caught.value.message
    assert caught.value.object_name == "0.tar"
    assert caught.value.details == {"key": "0/2"}


# The second is not the prefetcher's own deadline.
@pytest.mark.parametrize(
    "error", [HapiError("does_not_fit", "x"), TimeoutError("of another")]
)
def test_error_of_a_span_reaches_the_loop(error):
    loader, _ = make_loader(Source(error=error), SIZES)
    with pytest.raises(type(error)) as caught:
        rows_of(loader)
    assert caught.value is error


def test_late_span_is_a_named_error_and_its_request_ends(monkeypatch):
    monkeypatch.setattr(prefetcher_module, "WAIT_SECONDS", 0.05)
    loader, _ = make_loader(Source(seconds=60), SIZES, retry_seconds=0)
    started = time.monotonic()
    with pytest.raises(TooSlowError, match=r"0\.tar"):
        rows_of(loader)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("in_step", [False, True])
def test_loop_gets_an_error_if_another_thread_closes_its_loader(
    monkeypatch, in_step
):
    monkeypatch.setattr(prefetcher_module, "AHEAD_SPANS", 4)
    loader, _ = make_loader(
        Source(seconds=0.0 if in_step else 60.0),
        [4] * 200,
        num_threads=1,
    )
    timer = threading.Timer(0.2, loader.close)
    started = time.monotonic()
    timer.start()

    def train():
        for _batch in loader:
            timer.join()

    with pytest.raises(ClientError, match="the loader was closed"):
        train()
    assert time.monotonic() - started < 30
    timer.join()


@pytest.mark.parametrize("begun", ["no", "iterator", "all spans were read"])
def test_loop_gets_an_error_if_its_loader_was_closed_before(begun):
    loader, _ = make_loader(Source(), [4] * 3)
    batches = None if begun == "no" else iter(loader)
    if begun == "all spans were read":
        next(batches)
        time.sleep(0.1)
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join()
    with pytest.raises(ClientError, match="the loader was closed"):
        next(batches or iter(loader))


def test_loop_gets_an_error_after_it_moved_to_another_thread():
    loader, _ = make_loader(Source(seconds=0.3), [4] * 50)
    batches = iter(loader)
    next(batches)
    errors = []

    def iterate():
        try:
            for _ in batches:
                pass
        except ClientError as error:
            errors.append(error)

    other = threading.Thread(target=iterate)
    other.start()
    time.sleep(0.1)
    loader.close()
    other.join(10)
    assert [error.code for error in errors] == ["not_connected"]


def test_prefetcher_may_be_closed_by_one_of_its_threads():
    class Closing(Source):
        def load(self, span, scope):
            prefetcher.close()
            return super().load(span, scope)

    prefetcher = open_with(Closing())(make_spans([4, 4]))
    with pytest.raises(HapiError, match="closed"):
        list(prefetcher)


def test_next_span_is_read_while_one_is_decoded():
    begun = threading.Semaphore(0)
    bytes_arrived, decoded = threading.Event(), threading.Event()

    class OneByOne(Source):
        def concurrency_limit(self, read_queue):
            return concurrency.limit

        def load(self, span, scope):
            with concurrency.reading(1):
                begun.release()
                assert bytes_arrived.wait(300)
            with concurrency.decoding():
                assert decoded.wait(300)
            return super().load(span, scope)

    # Starts with a limit of one read.
    concurrency = ReadConcurrency(2, lambda: 0, lambda: prefetcher.top_up())
    spans = make_spans([2, 2, 2])
    prefetcher = open_with(OneByOne(), num_threads=2)(spans)
    try:
        prefetcher.top_up()
        assert begun.acquire(timeout=300)
        assert not begun.acquire(timeout=0.2)
        bytes_arrived.set()
        assert begun.acquire(timeout=300)
        assert not begun.acquire(timeout=0.2)  # no thread is free
        decoded.set()
        loaded = dict(prefetcher)  # in any order
        assert [loaded[n].span for n in range(3)] == spans
    finally:
        bytes_arrived.set()
        decoded.set()
        prefetcher.close()


@pytest.mark.parametrize(
    ("read_queue", "received_bytes", "warnings"),
    [
        ("pushdown", 0, ["no bytes received; the worker is busy ("]),
        ("pushdown", 1_500_000, ["1.5 MB received; the link may be slow"]),
        ("raw", 0, []),
    ],
)
def test_wait_for_features_is_logged_once(
    monkeypatch, caplog, read_queue, received_bytes, warnings
):
    monkeypatch.setattr("hapi_client.loading.prefetcher.QUIET_SECONDS", 0.1)
    spans = make_spans([2, 2])
    connection = fake_connection()
    connection.traffic.add(received_bytes=70_000_000)

    class Receiving(Source):
        def load(self, span, scope):
            connection.traffic.add(received_bytes=received_bytes)
            return super().load(span, scope)

    source = Receiving(seconds=0.3, read_queue=read_queue)
    prefetcher = open_with(source, connection, num_threads=1)(spans)
    assert [loaded.span for _, loaded in prefetcher] == spans
    prefetcher.close()
    # Threads of earlier tests may log, too.
    texts = [
        record.getMessage()
        for record in caplog.records
        if record.name == prefetcher_module.__name__
    ]
    assert len(texts) == len(warnings)
    for text, part in zip(texts, warnings, strict=True):
        assert "0.tar 0-1 for" in text
        assert part in text


def test_first_iterator_in_use_delivers_the_epoch():
    """Lightning makes several."""
    loader, _ = make_loader(Source(), SIZES)
    iter(loader)
    other = iter(loader)
    assert len(rows_of(loader)) == sum(SIZES)
    with pytest.raises(RuntimeError, match="one epoch"):
        next(other)


def leave_by_break(loader, wrapped):
    for _ in wrapped(loader):
        assert fetch_threads()
        break


def leave_by_break_after_an_error(loader, wrapped):
    for _ in wrapped(loader):
        try:
            raise ValueError("of the step")
        except ValueError as error:
            kept = error
            break
    return kept


def leave_by_error(loader, wrapped):
    for _ in wrapped(loader):
        raise ValueError("of the step")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrapped", [iter, enumerate])
@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_break_after_an_error, leave_by_error]
)
def test_leaving_the_loop_ends_all_although_loader_and_error_remain(
    leave, wrapped
):
    kept = prefetcher = None

    def open_noted(spans):
        nonlocal prefetcher
        opened = open_with(Source(seconds=0.01))(spans)
        prefetcher = weakref.ref(opened)
        return opened

    with without_collector():
        loader, _ = make_loader(Source(), [4] * 50, open_spans=open_noted)
        try:
            kept = leave(loader, wrapped)
        except ValueError as error:
            kept = error
        assert fetch_threads() == []
        gc.collect()
        assert prefetcher() is None  # nor spans that were read ahead
        loader.close()
        with pytest.raises(RuntimeError, match="one epoch"):
            iter(loader)
    assert kept is None or kept


def test_leaving_the_loop_ends_an_unnamed_loader():
    with without_collector():
        for _ in make_loader(Source(seconds=0.01), [4] * 50)[0]:
            break
        assert fetch_threads() == []


@pytest.mark.parametrize("close", [False, True])
def test_explicit_iterator_lasts_until_it_is_dropped_or_closed(close):
    loader, _ = make_loader(Source(seconds=0.01), [4] * 50)
    batches = iter(loader)
    assert len(next(batches)[1]) == 4
    gc.collect()
    assert fetch_threads()
    assert len(next(batches)[1]) == 4
    if close:
        loader.close()
        assert list(batches) == []
    else:
        del batches
    assert fetch_threads() == []


def recorded_loader(source, **options):
    """Returns a loader, its counters and recorder, and the mock of a bar."""
    start_bar = Mock()
    recorder = EpochRecorder(JobRecorder(Traffic()), 0, start_bar=start_bar)
    job = {"recorder": recorder}
    loader, counters = make_loader(source, SIZES, job=job, **options)
    return loader, counters, recorder, start_bar


def test_report_of_an_epoch_adds_up():
    source = Source({"0/1", "2/0"})
    loader, counters, recorder, start_bar = recorded_loader(
        source, on_error="skip"
    )
    assert recorder.report is None
    for _ in loader:
        time.sleep(0.02)
    report, stats = recorder.report, counters.count()
    assert report.is_finished
    assert report.expected_samples == sum(SIZES)
    assert report.samples == stats.samples == sum(SIZES) - 2
    assert report.samples_by_cut == stats.samples_by_cut == {0: 14}
    assert report.skipped_samples == stats.skipped == 2
    assert report.seconds == pytest.approx(stats.seconds, abs=0.1)
    assert report.loop_seconds["training"] >= 4 * 0.02
    assert sum(report.loop_seconds.values()) <= report.seconds
    start_bar.assert_called_once_with(16)
    *added, last = start_bar.return_value.mock_calls
    assert sum(each.args[0] for each in added) == 16
    assert last == call.close()


@pytest.mark.parametrize("num_taken", [2, 4])
def test_epoch_from_memory_is_recorded(num_taken):
    values = torch.tensor(ALL)[:, None]
    cache = SimpleNamespace(selector=lambda slices: values.__getitem__)
    recorder = EpochRecorder(JobRecorder(Traffic()))
    job = {"recorder": recorder, "cache": cache}
    loader, counters = make_loader(None, SIZES, job=job)
    for _, _ in zip(range(num_taken), loader, strict=False):
        time.sleep(0.02)
    gc.collect()
    report, stats = recorder.report, counters.count()
    assert report.samples == report.local_hits == 4 * num_taken
    assert (stats.samples, stats.local_hits) == (4 * num_taken,) * 2
    assert report.is_finished is (num_taken == 4)
    assert report.loop_seconds["training"] >= num_taken * 0.02


def close_inside(loader):
    batches = iter(loader)
    next(batches)
    loader.close()


def drop(loader):
    next(iter(loader))


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (partial(leave_by_break, wrapped=iter), None),
        (partial(leave_by_error, wrapped=iter), None),
        (close_inside, None),
        (drop, None),
        (rows_of, HapiError("does_not_fit", "x")),
    ],
)
def test_epoch_that_is_left_is_reported_as_unfinished(end, error):
    loader, _, recorder, start_bar = recorded_loader(Source(error=error))
    with suppress(ValueError, HapiError):
        end(loader)
    gc.collect()
    assert not recorder.report.is_finished
    assert recorder.report.samples == 4
    assert start_bar.return_value.mock_calls[-1] == call.close()
