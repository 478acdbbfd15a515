"""The planning thread; what it plans has functional tests."""

import contextlib
import gc
import logging
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hapi_client.metrics.events import (
    SpanEvent,
    StageEvent,
    WindowMetrics,
)
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.planning import job_planner as planning
from hapi_client.planning.client_facts import READ_SECONDS
from hapi_client.planning.cost_estimators import CostEstimators
from hapi_client.planning.inputs import RemainingWork
from hapi_client.planning.job_planner import JobPlanner
from hapi_client.planning.job_problem import decline_reason
from hapi_client.planning.loop_probe import TrainingThreadProbe
from hapi_client.planning.observed_costs import sample_seconds
from hapi_client.planning.plan_chooser import MIN_PUSH_GAIN
from hapi_client.planning.route_mix import speedup_over
from hapi_client.planning.route_scheduler import RouteScheduler
from hapi_client.planning.sample_probe import ProbeSamples
from hapi_client.swift.traffic_counters import Traffic
from hapi_client.swift.transport import CancelScope
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import ModelPath
from hapi_splitter.planner.plan import Option, solve, streaming_plan
from hapi_splitter.planner.problem import RAW_ROUTE, StartupCost
from problems import problem_of


class Connection:
    """Fails and counts attempts."""

    def __init__(self, error):
        self.error = error
        self.attempts = 0

    @contextlib.contextmanager
    def working_for(self, scope):
        self.attempts += 1
        raise self.error.with_traceback(None)
        yield

    def cancel(self, scope):
        scope.set_cancelled()


def planner_of(connection):
    return JobPlanner(
        SimpleNamespace(connection=connection, measure=None),
        CostEstimators(pushdown_concurrency=lambda: 4, train_on_cpu=True),
        RouteScheduler({RAW_ROUTE: 1.0}),
        JobRecorder(Traffic()),
    )


def threads():
    return [t for t in threading.enumerate() if t.name == "hapi-plan"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ClientError("not_connected", "no proxy"), "no proxy"),
        (RuntimeError("of ours"), "internal error while planning"),
    ],
)
def test_attempts_that_fail_are_logged_and_repeated(
    error, text, caplog, monkeypatch
):
    monkeypatch.setattr(planning, "RETRY_SECONDS", 0.01)
    connection = Connection(error)
    planner = planner_of(connection)
    planner.begin()
    with contextlib.closing(planner):
        assert planner.wait(300)
        deadline = time.monotonic() + 5
        while connection.attempts < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert connection.attempts >= 3
    assert text in caplog.text
    assert planner.plan is None
    assert not threads()


def test_thread_ends_if_the_planner_is_dropped(caplog):
    # A log record would keep the error, and with it the planner.
    caplog.set_level(logging.ERROR)
    planner = planner_of(Connection(ClientError("not_connected", "none")))
    planner.begin()
    assert planner.wait(300)
    [thread] = threads()
    forgotten = weakref.ref(planner)
    del planner
    deadline = time.monotonic() + 5
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()
        thread.join(0.05)
    assert not thread.is_alive()
    assert forgotten() is None


PROBE = ProbeSamples((), 1.0)


def test_error_of_measuring_is_left_to_the_planning_thread():
    error = ClientError("bad_sample", "none of the samples decodes")
    measurement = TrainingThreadProbe(Mock(side_effect=error))
    measurement.request(PROBE)
    measurement.span_arrived()

    assert "none of the samples decodes" in str(measurement.take_failure())
    assert measurement.take_failure() is None
    assert measurement.facts is None


def test_measurement_can_be_repeated_after_an_interrupt():
    measure = Mock(side_effect=[KeyboardInterrupt, "facts"])
    measurement = TrainingThreadProbe(measure)
    measurement.request(PROBE)
    with pytest.raises(KeyboardInterrupt):
        measurement.span_arrived()
    assert "ended during the measurement" in str(measurement.take_failure())

    measurement.span_arrived()
    measure.assert_called_once_with(PROBE)
    measurement.request(PROBE)
    measurement.span_arrived()
    assert measurement.facts == "facts"


@pytest.mark.parametrize(
    ("epochs", "so_far", "reason"),
    [
        # 1,980 samples at 4 a second; 200 were loaded meanwhile.
        (10.0, 20, None),
        (1.0, 20, "about 45 s"),
        # Its first batch is still being trained.
        (1.0, 32, "about 26 s"),
        (1.0, 160, "about 1 s"),
    ],
)
@pytest.mark.parametrize("observed", [None, "facts"])
def test_job_does_not_measure_near_its_end(
    monkeypatch, epochs, so_far, reason, observed
):
    planner = planner_of(Connection(RuntimeError()))
    asked = []
    parts = planner._parts
    parts.remaining_work = RemainingWork(200, epochs)
    parts.samples_so_far = lambda: so_far
    parts.earlier_samples = lambda: 0
    parts.read = asked.append
    parts.observe = lambda window: observed
    window = WindowMetrics(5.0, samples={RAW_ROUTE: 200})
    client = planner._client
    monkeypatch.setattr(client, "_warm_up", lambda: True)
    monkeypatch.setattr(planner._recorder, "take", lambda: window)

    goes_on = client.request()

    assert bool(asked) is (reason is None)
    if observed and so_far < 160 and reason is not None:
        # It plans with what its raw reads have shown.
        assert client.known == observed
        assert goes_on
    elif reason is not None:
        assert reason in client.decline_reason
        assert not goes_on


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 0.006),  # not 0.05: the loop began within the window
        ({"training": StageEvent(10.0, samples=100)}, 0.05),
        # The link decides.
        ({"raw": SpanEvent(read_seconds=6.0, raw_seconds=10.0)}, 0.05),
        ({"training": StageEvent()}, 0.05),
        ({"layers": StageEvent()}, 0.05),
        ({"samples": {}}, 0.05),
    ],
)
def test_time_per_sample_is_without_that_of_starting(changes, seconds):
    window = WindowMetrics(
        5.0,
        samples={RAW_ROUTE: 200},
        raw=SpanEvent(decode_cpu_seconds=0.6),
        layers=StageEvent(cpu_seconds=0.2, samples_by_cut={0: 100}),
        training=StageEvent(0.1, samples=100),
    )
    measured = sample_seconds(replace(window, **changes), 100)
    assert measured == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("pushes", "streaming_seconds", "pays"),
    [
        (True, 14.0, False),  # less than the risk of an early upload
        (True, 16.0, True),
        (True, None, True),  # raw reads are not possible
        (False, 16.0, False),
    ],
)
def test_package_is_stored_early_if_that_pays_clearly(
    monkeypatch, pushes, streaming_seconds, pays
):
    planner = planner_of(None)
    rates = iter([None, 2e6, 3e6])
    planner._parts.early_rate = lambda: next(rates)
    facts = SimpleNamespace(samples=SimpleNamespace(raw_bytes=1e5))
    planner._parts.observe = lambda window: facts
    monkeypatch.setattr(planner._worker, "upload_bytes", lambda: 4e6)
    best = SimpleNamespace(pushes=pushes, total_seconds=10.0)
    streaming = streaming_seconds and SimpleNamespace(
        total_seconds=streaming_seconds
    )
    monkeypatch.setattr(
        planner._problem, "best_case", lambda *_: (best, streaming)
    )
    assert not planner._stores_early()  # the link is not known yet
    assert planner._stores_early() is pays
    assert planner._estimates.link.bytes_per_second == 2e6
    assert not planner._stores_early()  # asked once


def test_package_whose_upload_is_quick_does_not_wait(monkeypatch):
    planner = planner_of(None)
    planner._parts.early_rate = lambda: 20e6
    planner._parts.observe = lambda window: None
    monkeypatch.setattr(planner._worker, "upload_bytes", lambda: 9e6)
    assert planner._stores_early()
    assert not planner._stores_early()  # asked once


@pytest.mark.parametrize(
    ("seconds", "received_bytes"),
    [(9.0, 0), (9.0, 100), (9.0, 90_000_000), (0.0, 0)],
)
def test_reads_of_the_split_are_a_bound_of_the_upload(
    monkeypatch, seconds, received_bytes
):
    """A window after them may have had little left to read, or nothing."""
    planner = planner_of(None)
    expected = []
    planner._client.early_rate = 5e6
    monkeypatch.setattr(planner._problem, "expect_startup", expected.append)
    monkeypatch.setattr(planner._problem, "build", lambda *_: None)
    monkeypatch.setattr(planner._estimates, "observe_start", lambda *_: None)
    monkeypatch.setattr(planning, "layer_threads", lambda _: None)
    monkeypatch.setattr(planning, "unlimited_worker", lambda _: None)
    window = WindowMetrics(seconds, received_bytes=received_bytes)
    planner._client._window = window
    planner._observe_start(SimpleNamespace(client=None))
    assert expected == [max(5e6, received_bytes / 9)]


@pytest.mark.parametrize(
    ("pushed", "one_off_seconds", "reason"),
    [
        (0.2, 0.0, "no cut would be faster, not even on an infinitely"),
        (0.05, 1000.0, "break-even is 20,000 samples"),
        (0.098, 0.0, "cut 1 · float32 would be 2.0% faster"),
    ],
)
def test_reason_names_why_push_down_would_not_pay(
    pushed, one_off_seconds, reason
):
    options = (
        Option(0, "raw", {"client device": 0.1}, 0, 0),
        Option(1, "float32", {"client device": pushed}, 0, 0),
    )
    problem = replace(
        problem_of(options, {"client device": 1.0}),
        num_samples=100,
        startup=StartupCost(load_seconds=one_off_seconds),
    )
    plan = solve(problem)
    gain = speedup_over(streaming_plan(problem), plan)
    assert plan.pushes is (gain > 1)
    assert gain < MIN_PUSH_GAIN
    assert reason in decline_reason(plan, gain)


def test_waiting_thread_may_cancel_its_own_scope():
    scope = CancelScope()
    # As the garbage collector does, which may run during the wait.
    with scope._changed:
        scope.set_cancelled()
    with pytest.raises(ClientError, match="closed"):
        scope.wait(60)


def test_samples_are_read_within_some_seconds_of_the_link():
    client = planner_of(None)._client
    window = WindowMetrics(4.0, received_bytes=2_000_000)
    # The job has four raw reads at the same time.
    assert client._max_probe_bytes(window) == pytest.approx(
        READ_SECONDS * 500e3 / 5
    )
    assert client._max_probe_bytes(WindowMetrics(0.0)) == float("inf")


@pytest.mark.parametrize(
    ("stored", "num_bytes"),
    [(None, 45e6), (ModelPath("AUTH_lib", "models", "d.hapi"), 0)],
)
def test_package_that_is_found_costs_no_upload(stored, num_bytes):
    planner = planner_of(None)
    planner._parts.models_container = "hapi-models"
    planner._parts.region = SimpleNamespace(
        find=lambda connection, container: stored, parameter_bytes=45e6
    )
    assert planner._worker.upload_bytes() == num_bytes
