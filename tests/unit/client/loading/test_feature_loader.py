"""Batches: complete, ordinary tensors, bounded ahead, no thread left."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from hapi_client.loading.feature_loader import FeatureLoader, LoaderPlan
from hapi_client.loading.prefetcher import (
    MAX_EARLY_SPANS,
    Prefetcher,
    ReadConfig,
)
from hapi_client.loading.read_concurrency import ReadConcurrency
from hapi_client.loading.span_source import LoadedSpan, SpanTask
from hapi_client.metrics.counters import JobCounters
from hapi_client.metrics.window_collector import MetricsCollector
from hapi_client.reports.epoch_recorder import EpochRecorder
from hapi_client.sampling.partition import Reader
from hapi_client.sampling.sampler import (
    ReadPlan,
    SamplerConfig,
    index_order,
    shuffled_order,
)
from hapi_client.swift.traffic_counters import Traffic
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import ClientError, HapiError, TooSlowError

CPU = torch.device("cpu")


def make_spans(sizes):
    return [
        Span(
            f"{number}.tar",
            "etag",
            tuple(
                IndexRow(row, f"{number}/{row}", row * 512, 512, 0)
                for row in range(size)
            ),
        )
        for number, size in enumerate(sizes)
    ]


def value(span, row):
    return 100.0 * int(span.shard.partition(".")[0]) + row


class Source:
    """Loads a span as its numbers; may fail, wait, or break samples."""

    def __init__(self, failures=(), seconds=0.0, error=None, read_queue="raw"):
        self.read_queue = read_queue
        self.failures = set(failures)
        self.seconds = seconds
        self.error = error
        self.loaded = []

    def concurrency_limit(self, read_queue):
        return 99

    def task(self, span, has_room, samples_left):
        return SpanTask(
            self.read_queue,
            10 * len(span.rows),
            lambda scope: self.load(span, scope),
        )

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


class FakeConnection:
    def __init__(self):
        self.traffic = Traffic()

    def working_for(self, scope):
        import contextlib

        return contextlib.nullcontext()

    def cancel(self, scope):
        scope.set_cancelled()


def open_with(source, connection=None, **options):
    options = ReadConfig(**{"num_threads": 2, **options})
    return lambda spans: Prefetcher(
        connection or FakeConnection(), source, spans, options
    )


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
    counters = JobCounters()
    plan = LoaderPlan(
        spans=spans,
        labels=[
            np.array([value(s, n) for n in range(len(s.rows))], np.int64)
            for s in spans
        ],
        on_error=on_error,
        counters=counters,
        metrics=MetricsCollector(lambda: 0),
        **{"run_suffix": lambda cut, f: f * 1.0, **(job or {})},
    )
    order = order or index_order(sizes, SamplerConfig(4))
    reading = order if isinstance(order, ReadPlan) else order.read_plan()
    open_spans = open_spans or open_with(source, **options)
    loader = FeatureLoader(plan, reading, open_spans, CPU, delivered)
    return loader, counters


def rows_of(loader):
    return [
        float(each)
        for features, labels in loader
        for each in features[:, 0].tolist()
        if torch.equal(features[:, 0].long(), labels)
    ]


SIZES = [5, 3, 7, 1]
ALL = sorted(
    value(span, row)
    for span in make_spans(SIZES)
    for row in range(len(span.rows))
)


def fetch_threads():
    return [
        t
        for t in threading.enumerate()
        if t.name.startswith(("hapi-raw", "hapi-pushdown"))
    ]


def test_features_and_labels_go_together_in_index_order():
    loader, _ = make_loader(Source(), SIZES)
    assert rows_of(loader) == ALL


def test_a_shuffled_epoch_has_each_sample_once_with_its_label():
    order = shuffled_order(
        SIZES, SamplerConfig(4, buffer_spans=2), seed=0, epoch=0
    )
    loader, counters = make_loader(Source(), SIZES, order)
    got = rows_of(loader)
    assert sorted(got) == ALL
    assert got != ALL
    assert counters.snapshot().samples == len(ALL)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("ahead_bytes", [1, 10_000])
def test_threads_and_memory_do_not_change_the_batches(
    num_threads, ahead_bytes
):
    def run(**options):
        order = shuffled_order(SIZES, SamplerConfig(4), seed=5, epoch=1)
        return rows_of(make_loader(Source(), SIZES, order, **options)[0])

    assert run(num_threads=num_threads, ahead_bytes=ahead_bytes) == run()


def test_tensors_are_ordinary_ones_that_autograd_may_save():
    loader, _ = make_loader(Source(), SIZES)
    weight = torch.ones(1, requires_grad=True)
    for features, labels in loader:
        assert not features.is_inference()
        assert features.dtype == torch.float32
        assert labels.dtype == torch.int64
        features.mul_(2)
        (features * weight).sum().backward()
    assert weight.grad is not None


def test_samples_are_left_until_the_loop_comes_back_for_more():
    class Held(Source):
        """Deals no second span before the loop has come back."""

        def task(self, span, has_room, samples_left):
            asked.append((span.shard, samples_left))
            if span.shard == "0.tar" or samples_left == 4:
                return super().task(span, has_room, samples_left)
            return None

    asked = []
    spans = iter(open_with(Held())(make_spans([4, 4])))

    next(spans)  # the span has come, and its layers are still to be computed
    assert set(asked) == {("0.tar", 8), ("1.tar", 8)}
    next(spans)
    assert asked[-1] == ("1.tar", 4)


class Gated(Source):
    """The first span comes by the other lane, when it is let through."""

    def __init__(self, **options):
        super().__init__(**options)
        self.breaker = threading.Event()

    def task(self, span, has_room, samples_left):
        if span.shard == "0.tar":
            return SpanTask(
                "pushdown", 1, lambda scope: self.held(span, scope)
            )
        return super().task(span, has_room, samples_left)

    def held(self, span, scope):
        assert self.breaker.wait(20)
        return self.load(span, scope)


def test_what_has_come_is_computed_while_a_span_before_it_is_waited_for():
    source = Gated()
    prefetcher = open_with(source)(make_spans([4] * 9))
    spans = iter(prefetcher)

    early = [next(spans)[0] for _ in range(MAX_EARLY_SPANS)]
    threading.Timer(0.1, source.breaker.set).start()
    rest = [position for position, _ in spans]
    prefetcher.close()

    assert 0 not in early
    assert rest[0] == 0  # no more than these in memory without it
    assert sorted(early + rest) == list(range(9))


def test_batches_are_the_same_when_spans_are_computed_out_of_turn():
    source = Gated()
    computed = []

    def run_suffix(cut, features):
        computed.append(float(features[0, 0]) // 100)
        if len(computed) == MAX_EARLY_SPANS:
            source.breaker.set()
        return features * 1.0

    order = shuffled_order([4] * 9, SamplerConfig(4), seed=1, epoch=0)
    in_turn = [piece.span for piece in order.read_plan().pieces]
    assert in_turn.index(0) < MAX_EARLY_SPANS
    job = {"run_suffix": run_suffix}
    got = rows_of(make_loader(source, [4] * 9, order, job=job)[0])

    assert computed != in_turn
    assert got == rows_of(make_loader(Source(), [4] * 9, order)[0])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"failures": ["1/2"]}, "1/2"),
        ({"error": ClientError("not_found", "gone")}, "gone"),
    ],
)
def test_what_is_wrong_with_a_span_out_of_turn_waits_for_its_turn(wrong, said):
    source = Gated(**wrong)
    loader, _ = make_loader(source, [4] * 3)
    threading.Timer(0.2, source.breaker.set).start()
    batches = iter(loader)

    assert next(batches)[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(ClientError, match=said):
        next(batches)


def test_memory_ahead_is_bounded():
    source = Source()
    loader, _ = make_loader(source, [5] * 20, ahead_bytes=150)
    batches = iter(loader)
    next(batches)
    time.sleep(0.2)
    assert len(source.loaded) <= 4
    loader.close()


def test_a_bad_sample_is_an_error_that_names_it():
    loader, _ = make_loader(Source({"2/3"}), SIZES)
    with pytest.raises(ClientError) as caught:
        rows_of(loader)
    assert caught.value.code == "bad_sample"
    assert "'2/3'" in caught.value.message
    assert "2.tar" in caught.value.message
    assert not fetch_threads()


def test_bad_samples_may_be_skipped_and_are_counted():
    bad = {"0/0", "2/3", "3/0"}
    loader, counters = make_loader(Source(bad), SIZES, on_error="skip")
    assert rows_of(loader) == [v for v in ALL if v not in (0, 203, 300)]
    assert counters.snapshot().skipped == 3


def test_keys_of_the_batch_delivered_last_go_with_it():
    broken = {"0/1", "2/0", "2/1", "2/2", "2/3"}
    loader, _ = make_loader(Source(broken), SIZES, on_error="skip")
    assert loader.keys == []
    found = []
    for features, _ in loader:
        parts = [key.split("/") for key in loader.keys]
        values = [100.0 * int(span) + int(row) for span, row in parts]
        assert features[:, 0].tolist() == values
        found += values
    assert len(found) == sum(SIZES) - len(broken)


def test_a_batch_that_lost_all_its_samples_is_left_out():
    steps = []
    loader, _ = make_loader(
        Source({"1/0", "1/1"}),
        [2, 2, 2, 2],
        index_order([2, 2, 2, 2], SamplerConfig(2)),
        on_error="skip",
        delivered=steps.append,
    )
    assert [labels.tolist() for _, labels in loader] == [
        [0, 1], [200, 201], [300, 301]
    ]  # fmt: skip
    assert steps == [0, 1, 2, 3]


@pytest.mark.parametrize("first_step", [0, 1])
def test_epoch_that_delivers_nothing_is_an_error_where_it_is_whole(first_step):
    """A loop for as many epochs, or samples, would go on in silence."""
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
    assert counters.snapshot().samples == 0
    assert not fetch_threads()


def test_step_that_other_ranks_wait_for_names_a_sample_that_it_lost():
    loader, _ = make_loader(
        Source({"0/2", "1/0", "1/1"}),
        [3, 3],
        index_order([3, 3], SamplerConfig(2)),
        on_error="skip",
        job={"needs_every_step": True},
    )
    batches = iter(loader)
    assert next(batches)[1].tolist() == [0, 1]
    with pytest.raises(ClientError) as caught:
        next(batches)
    assert caught.value.code == "bad_sample"
    assert "none of the 2 samples of step 1" in caught.value.message
    assert "sample '0/2' of shard 0.tar: broken" in caught.value.message
    assert caught.value.object_name == "0.tar"
    assert caught.value.details == {"key": "0/2"}
    assert not fetch_threads()


def test_an_error_of_a_span_reaches_the_loop():
    error = HapiError("does_not_fit", "x")
    loader, _ = make_loader(Source(error=error), SIZES)
    with pytest.raises(HapiError, match="x"):
        rows_of(loader)
    assert not fetch_threads()


def test_leaving_the_loop_leaves_no_thread():
    loader, _ = make_loader(Source(seconds=0.05), [4] * 50)
    for _features, _labels in loader:
        break
    loader.close()
    assert not fetch_threads()


def test_closing_ends_waits_at_once():
    loader, _ = make_loader(Source(seconds=60), SIZES, wait_seconds=0.05)
    started = time.monotonic()
    with pytest.raises(TooSlowError, match=r"0\.tar"):
        rows_of(loader)
    assert time.monotonic() - started < 5
    assert not fetch_threads()


@pytest.mark.parametrize("in_step", [False, True])
def test_closing_from_another_thread_is_a_named_error_in_the_loop(in_step):
    seconds = 0.0 if in_step else 30.0
    loader, _ = make_loader(Source(seconds=seconds), [4] * 200, ahead_spans=4)
    timer = threading.Timer(0.2, loader.close)
    timer.start()

    def train():
        for _batch in loader:
            timer.join()

    with pytest.raises(ClientError, match="the loader was closed"):
        train()
    timer.join()
    assert not fetch_threads()


@pytest.mark.parametrize("begun", [False, True])
def test_loop_that_begins_after_it_was_closed_is_a_named_error(begun):
    loader, _ = make_loader(Source(), SIZES)
    batches = iter(loader) if begun else None

    def close():
        loader.close()

    closer = threading.Thread(target=close)
    closer.start()
    closer.join()
    with pytest.raises(ClientError, match="the loader was closed"):
        next(batches or iter(loader))
    assert not fetch_threads()


def test_closing_reaches_a_thread_that_has_taken_the_loop_over():
    loader, _ = make_loader(Source(seconds=0.3), [4] * 50)
    batches = iter(loader)
    next(batches)
    errors = []

    def go_on():
        try:
            for _ in batches:
                pass
        except ClientError as error:
            errors.append(error)

    other = threading.Thread(target=go_on)
    other.start()
    time.sleep(0.1)
    loader.close()
    other.join(10)
    assert [error.code for error in errors] == ["not_connected"]
    assert not fetch_threads()


def test_closing_when_all_is_fetched_is_an_error_of_another_thread():
    loader, _ = make_loader(Source(), [4] * 3, ahead_spans=3)
    batches = iter(loader)
    next(batches)
    time.sleep(0.1)
    closer = threading.Thread(target=loader.close)
    closer.start()
    closer.join()
    with pytest.raises(ClientError, match="the loader was closed"):
        next(batches)


def test_closing_reaches_spans_that_have_not_begun():
    made = open_with(Source(seconds=30.0), num_threads=1)(make_spans([4, 4]))
    found = iter(made)
    threading.Timer(0.2, made.close).start()
    started = time.monotonic()
    with pytest.raises(ClientError, match="closed"):
        next(found)
    assert time.monotonic() - started < 5


def test_the_next_span_is_read_while_one_is_decoded():
    begun = threading.Semaphore(0)
    bytes_came, decoded = threading.Event(), threading.Event()

    class OneByOne(Source):
        def concurrency_limit(self, read_queue):
            return width.limit

        def load(self, span, scope):
            with width.reading(1):
                begun.release()
                assert bytes_came.wait(20)
            with width.decoding():
                assert decoded.wait(20)
            return super().load(span, scope)

    # One read at a time is all that is known to be of use.
    width = ReadConcurrency(2, lambda: 0, lambda: prefetcher.top_up())
    spans = make_spans([2, 2, 2])
    prefetcher = open_with(OneByOne(), num_threads=2)(spans)
    try:
        prefetcher.top_up()
        assert begun.acquire(timeout=10)
        assert not begun.acquire(timeout=0.2)
        bytes_came.set()
        assert begun.acquire(timeout=10)
        assert not begun.acquire(timeout=0.2)  # no thread is free
        decoded.set()
        came = dict(prefetcher)  # in any order
        assert [came[n].span for n in range(3)] == spans
    finally:
        bytes_came.set()
        decoded.set()
        prefetcher.close()


@pytest.mark.parametrize(
    ("read_queue", "received_bytes", "told"),
    [
        ("pushdown", 0, ["no bytes received; the worker may hang"]),
        ("pushdown", 1_500_000, ["1.5 MB received; the link may be slow"]),
        ("raw", 0, []),
    ],
)
def test_features_that_do_not_come_are_told_of_once(
    monkeypatch, caplog, read_queue, received_bytes, told
):
    """A worker that hangs would leave the loop silent for minutes."""
    monkeypatch.setattr("hapi_client.loading.prefetcher.QUIET_SECONDS", 0.1)
    spans = make_spans([2, 2])
    connection = FakeConnection()
    connection.traffic.add(received_bytes=70_000_000)

    class Receiving(Source):
        def load(self, span, scope):
            connection.traffic.add(received_bytes=received_bytes)
            return super().load(span, scope)

    source = Receiving(seconds=0.3, read_queue=read_queue)
    prefetcher = open_with(source, connection, num_threads=1)(spans)
    assert [loaded.span for _, loaded in prefetcher] == spans
    prefetcher.close()
    texts = [each.getMessage() for each in caplog.records]
    assert len(texts) == len(told)
    for text, part in zip(texts, told, strict=True):
        assert "0.tar 0-1 for" in text
        assert part in text


def test_time_out_of_a_source_is_not_taken_for_the_loops_own():
    source = Source(error=TimeoutError("of something else"))
    loader, _ = make_loader(source, SIZES)
    with pytest.raises(TimeoutError, match="of something else"):
        list(loader)


def test_an_error_in_the_training_loop_leaves_no_thread():
    def train():
        loader, _ = make_loader(Source(seconds=0.01), [4] * 50)
        try:
            for _batch in loader:
                raise KeyboardInterrupt
        finally:
            loader.close()

    with pytest.raises(KeyboardInterrupt):
        train()
    assert not fetch_threads()


def test_a_loader_serves_one_epoch():
    loader, _ = make_loader(Source(), SIZES)
    rows_of(loader)
    with pytest.raises(RuntimeError, match="one epoch"):
        iter(loader)


def test_iterator_may_be_asked_for_again_before_the_first_batch():
    """As Lightning does."""
    loader, _ = make_loader(Source(), SIZES)
    iter(loader)
    kept = iter(loader)
    assert len(rows_of(loader)) == sum(SIZES)
    with pytest.raises(RuntimeError, match="one epoch"):
        next(kept)


def test_its_length_is_the_number_of_batches():
    loader, _ = make_loader(Source(), SIZES)
    assert len(loader) == 4


def test_leaving_the_loop_ends_the_threads_without_a_collector():
    gc.collect()
    gc.disable()
    try:
        loader, _ = make_loader(Source(seconds=0.01), [4] * 50)
        for _ in loader:
            assert fetch_threads()
            break
        del loader
        assert fetch_threads() == []
    finally:
        gc.enable()


def leave_by_break(loader, wrapped):
    for _ in wrapped(loader):
        assert fetch_threads()
        break


def leave_by_return(loader, wrapped):
    for _ in wrapped(loader):
        return fetch_threads()


def leave_by_break_behind_an_error(loader, wrapped):
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
    "leave",
    [
        leave_by_break,
        leave_by_return,
        leave_by_break_behind_an_error,
        leave_by_error,
    ],
)
def test_leaving_the_loop_ends_all_while_its_loader_and_error_are_kept(
    leave, wrapped
):
    gc.collect()
    gc.disable()
    kept = prefetcher = None

    def open_noted(spans):
        nonlocal prefetcher
        opened = open_with(Source(seconds=0.01))(spans)
        prefetcher = weakref.ref(opened)
        return opened

    try:
        loader, _ = make_loader(Source(), [4] * 50, open_spans=open_noted)
        try:
            kept = leave(loader, wrapped)
        except ValueError as error:
            kept = error
        assert fetch_threads() == []
        gc.collect()
        assert prefetcher() is None  # nor what it has fetched ahead
        loader.close()
        with pytest.raises(RuntimeError, match="one epoch"):
            iter(loader)
    finally:
        gc.enable()
    assert kept is None or kept


@pytest.mark.parametrize("close", [False, True])
def test_loop_by_hand_lasts_until_its_iterator_goes_or_is_closed(close):
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


def test_loader_that_nobody_named_ends_with_its_loop():
    gc.collect()
    gc.disable()
    try:
        for _ in make_loader(Source(seconds=0.01), [4] * 50)[0]:
            break
        assert fetch_threads() == []
    finally:
        gc.enable()


def test_fetcher_may_be_closed_from_a_thread_of_its_own():
    made = []

    class Closing(Source):
        def load(self, span, scope):
            made[0].close()
            return super().load(span, scope)

    made.append(open_with(Closing())(make_spans([4, 4])))
    with pytest.raises(HapiError, match="closed"):
        list(made[0])


class Line:
    """Counts what it would show."""

    def __init__(self, samples):
        self.samples = samples
        self.shown = 0
        self.is_open = True

    def add(self, samples):
        assert self.is_open
        self.shown += samples

    def close(self):
        self.is_open = False


def told_loader(source, **options):
    """A loader, its tally, and the lines that it has opened."""
    lines = []

    def start_bar(samples):
        lines.append(Line(samples))
        return lines[-1]

    recorder = EpochRecorder(0, start_bar=start_bar)
    loader, counters = make_loader(
        source, SIZES, job={"recorder": recorder}, **options
    )
    return loader, counters, recorder, lines


def test_report_of_a_pass_adds_up():
    source = Source({"0/1", "2/0"})
    loader, counters, recorder, lines = told_loader(source, on_error="skip")
    assert recorder.report is None
    for _ in loader:
        time.sleep(0.02)
    report, stats = recorder.report, counters.snapshot()
    assert report.is_finished
    assert report.expected_samples == sum(SIZES)
    assert report.samples == stats.samples == sum(SIZES) - 2
    assert report.samples_by_cut == stats.samples_by_cut == {0: 14}
    assert report.skipped_samples == stats.skipped == 2
    assert report.seconds == pytest.approx(stats.seconds, abs=0.1)
    assert report.loop_seconds["training"] >= 4 * 0.02
    assert sum(report.loop_seconds.values()) <= report.seconds
    assert [(line.samples, line.shown) for line in lines] == [(16, 14)]


def leave(loader):
    for _ in loader:
        break


def raise_in_step(loader):
    def train():
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def close_inside(loader):
    batches = iter(loader)
    next(batches)
    loader.close()


def drop(loader):
    next(iter(loader))


@pytest.mark.parametrize("end", [leave, raise_in_step, close_inside, drop])
def test_pass_that_breaks_off_is_told_unfinished_and_shows_no_more(end):
    loader, _, recorder, lines = told_loader(Source())
    end(loader)
    gc.collect()
    assert not recorder.report.is_finished
    assert recorder.report.samples == 4
    assert not lines[0].is_open


def test_pass_that_fails_shows_no_more():
    error = HapiError("does_not_fit", "x")
    loader, _, recorder, lines = told_loader(Source(error=error))
    with pytest.raises(HapiError):
        rows_of(loader)
    assert not recorder.report.is_finished
    assert not lines[0].is_open
