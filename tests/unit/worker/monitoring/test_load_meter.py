"""The sliding window behind the load report, with a clock of its own."""

import threading

import pytest

from clock import Clock
from hapi_worker.monitoring.load_meter import (
    MAX_ACCOUNTS,
    NUM_SLOTS,
    WINDOW_SECONDS,
    Accounts,
    BusyWindow,
    LoadMeter,
    RateWindow,
)
from hapi_worker.scheduling.fair_pool import DEVICE, FairPool
from hapi_worker.scheduling.fair_queue import Ledger


@pytest.mark.parametrize("offset", [0.0, 0.1, 0.3, 123.45])
def test_busy_fraction_is_that_of_the_last_seconds(offset):
    window = BusyWindow(offset)
    for second in range(60):
        start = offset + second
        window.add(start, start + 0.25)
    assert window.fraction(offset + 60) == pytest.approx(0.25, abs=0.03)
    assert window.fraction(offset + 65) == pytest.approx(0.125, abs=0.03)
    assert window.fraction(offset + 75) == 0.0


def test_new_window_knows_only_its_own_time():
    window = BusyWindow(100.0)
    assert window.fraction(100.0) == 0.0
    window.add(100.0, 101.0)
    assert window.fraction(102.0) == pytest.approx(0.5)


def test_work_longer_than_the_window_fills_it():
    window = BusyWindow(0.0)
    window.add(0.0, 1000.0)
    assert window.fraction(1000.0) == pytest.approx(1.0)
    assert window.fraction(1000.0, num_at_once=4) == pytest.approx(0.25)


def test_overlapping_work_is_never_more_than_all():
    window = BusyWindow(0.0)
    for _ in range(3):
        window.add(0.0, 5.0)
    assert window.fraction(5.0) == 1.0


def test_windows_keep_no_more_than_their_slots():
    busy, rate = BusyWindow(0.0), RateWindow()
    for step in range(100_000):
        now = step / 1000
        busy.add(now, now + 0.001)
        rate.note(now, now)
    assert len(busy._slots) <= NUM_SLOTS
    assert len(rate._readings) <= NUM_SLOTS + 2


def test_rate_is_that_since_the_oldest_reading_of_the_window():
    rate = RateWindow()
    count = 0.0
    for now in range(100):
        count += 0.1 if now < 80 else 2.0
        rate.note(float(now), count)
    assert rate.per_second(99.0, count) == pytest.approx(2.0)


def test_idle_time_before_does_not_thin_the_rate():
    rate = RateWindow()
    rate.note(0.0, 0.0)
    rate.note(3600.0, 1.0)
    assert rate.per_second(3604.0, 9.0) == pytest.approx(2.0)
    assert RateWindow().per_second(5.0, 1.0) == 0.0


def test_accounts_without_recent_work_share_no_more():
    accounts = Accounts()
    for name in ("a", "b", "c"):
        accounts.note(0.0, name)
    accounts.note(5.0, "b")
    assert accounts.share(9.0, "a") == pytest.approx(1 / 3)
    assert accounts.share(14.0, "a") == pytest.approx(1 / 2)
    assert accounts.share(50.0, "new") == 1.0


def test_accounts_are_bounded():
    accounts = Accounts()
    for number in range(MAX_ACCOUNTS + 100):
        accounts.note(1.0, str(number))
    assert len(accounts._seen) == MAX_ACCOUNTS


def test_report_counts_work_under_way():
    clock, cpu = Clock(), Clock(7.0)
    meter = LoadMeter(cores=4, clock=clock, cpu_clock=cpu)
    work = meter.start_work("a", on_device=True)
    clock.now += 4
    cpu.now += 4
    load = meter.report("b", 2)
    assert (load.share, load.streams) == (0.5, 2)
    assert load.device_busy == pytest.approx(1.0)
    assert load.cpu_busy == pytest.approx(0.25)
    clock.now += 4
    meter.end_work(work)
    assert meter.report("a", 0).device_busy == pytest.approx(1.0)
    clock.now += WINDOW_SECONDS / 2
    assert meter.report("a", 0).device_busy == pytest.approx(0.5, abs=0.06)


def test_decoding_keeps_no_device_busy():
    clock = Clock()
    meter = LoadMeter(cores=1, clock=clock, cpu_clock=clock)
    work = meter.start_work("a", on_device=False)
    clock.now += 3
    meter.end_work(work)
    load = meter.report("a", 1)
    assert load.device_busy == 0.0
    assert load.cpu_busy == pytest.approx(1.0)


def test_clock_of_the_process_is_not_read_for_each_piece_of_work():
    clock, readings = Clock(), []

    def cpu_clock():
        readings.append(clock.now)
        return clock.now

    meter = LoadMeter(cores=1, clock=clock, cpu_clock=cpu_clock)
    for _ in range(100):
        work = meter.start_work("a", on_device=False)
        clock.now += 0.01
        meter.end_work(work)
    assert len(readings) <= 3
    assert meter.report("a", 1).cpu_busy == pytest.approx(1.0)


def test_share_is_by_weight():
    clock = Clock()
    weights = {"a": 3.0}
    meter = LoadMeter(
        cores=1,
        weight=lambda account: weights.get(account, 1.0),
        clock=clock,
        cpu_clock=clock,
    )
    meter.end_work(meter.start_work("b", on_device=False))
    assert meter.report("a", 1).share == 0.75
    assert meter.report("b", 1).share == 0.25


@pytest.mark.parametrize("fails", [False, True])
def test_pool_tells_the_meter_when_work_begins_and_ends(fails):
    meter = LoadMeter(cores=1)
    pool = FairPool("metered", 1, Ledger(), meter=meter)
    begun, release = threading.Event(), threading.Event()

    def work():
        begun.set()
        release.wait(300)
        if fails:
            raise RuntimeError("told to")

    pool.submit("a", work, kind=DEVICE)
    assert begun.wait(300)
    assert {(w.account, w.on_device) for w in meter._running} == {("a", True)}
    release.set()
    pool.close()
    assert meter._running == set()
    assert meter.report("b", 0).share == 0.5
