"""Pools of threads, choice of devices, and one forward pass."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hapi_protocol.errors import DoesNotFitError
from hapi_worker.execution.devices import choose_devices
from hapi_worker.execution.forward import core_clock, padded, run_prefix
from hapi_worker.scheduling.fair_pool import DEVICE, FairPool
from hapi_worker.scheduling.fair_queue import Ledger


@pytest.fixture
def pool():
    pool = FairPool("test", 1, Ledger(), torch_threads=1)
    yield pool
    pool.close()


def test_pool_serves_accounts_in_turn(pool):
    gate = threading.Event()
    order: list[str] = []
    done = threading.Event()
    pool.submit("first", gate.wait)
    for _ in range(8):
        pool.submit("a", lambda: (time.sleep(0.06), order.append("a"))[1])
    pool.submit("b", lambda: order.append("b"))
    pool.submit("b", done.set)
    gate.set()
    assert done.wait(300)
    assert order.index("b") <= 2


@pytest.mark.parametrize(("device", "num_cores"), [("cpu", 3), ("cuda", 1)])
def test_core_seconds_include_torchs_threads(device, num_cores):
    pool = FairPool("cores", 1, Ledger(), torch_threads=3)
    found: list[float] = []

    def measure():
        thread = time.thread_time()
        while time.thread_time() < thread + 0.05:
            pass
        before = core_clock(torch.device(device)), time.thread_time()
        found.append(before[0] / before[1])

    done = threading.Event()
    pool.submit("a", measure)
    pool.submit("a", done.set)
    assert done.wait(300)
    pool.close()
    assert found == [pytest.approx(num_cores, rel=0.05)]


def test_pool_survives_work_that_raises(pool, caplog):
    done = threading.Event()
    pool.submit("a", lambda: 1 // 0)
    pool.submit("a", done.set)
    assert done.wait(300)
    assert "ZeroDivisionError" in caplog.text


def test_paused_pool_finishes_running_work_and_starts_none(pool):
    begun, release, after = (threading.Event() for _ in range(3))

    def work():
        begun.set()
        release.wait(300)

    pool.submit("a", work)
    assert begun.wait(300)
    with pool.paused(0.05) as idle:
        assert not idle
    pool.submit("a", after.set)
    threading.Timer(0.1, release.set).start()
    with pool.paused(5) as idle:
        assert idle
        assert not after.wait(0.2)
    assert after.wait(300)


def test_pool_threads_have_their_own_number_of_torch_threads():
    before = torch.get_num_threads()
    pools = [FairPool(f"t{n}", 1, Ledger(), torch_threads=n) for n in (1, 3)]
    found = []
    for pool in pools:
        done = threading.Event()
        pool.submit("a", lambda: found.append(torch.get_num_threads()))
        pool.submit("a", done.set)
        assert done.wait(300)
        pool.close()
    assert found == [1, 3]
    assert torch.get_num_threads() == before


def test_closed_pool_takes_no_work_and_has_no_threads():
    pool = FairPool("closing", 2, Ledger())
    pool.close()
    with pytest.raises(RuntimeError):
        pool.submit("a", lambda: None)
    assert not [t for t in threading.enumerate() if "closing" in t.name]


def test_work_may_pause_its_own_pool(pool):
    found: list[bool] = []
    done = threading.Event()

    def work():
        with pool.paused(1.0, num_allowed=1) as idle:
            found.append(idle)

    pool.submit("a", work)
    pool.submit("a", done.set)
    assert done.wait(300)
    assert found == [True]


def test_urgent_work_goes_before_the_same_accounts_other_work(pool):
    gate, done = threading.Event(), threading.Event()
    order: list[str] = []
    pool.submit("a", gate.wait)
    pool.submit("a", lambda: order.append("decode"))
    pool.submit("a", lambda: order.append("pass"), kind=DEVICE, urgent=True)
    pool.submit("a", done.set)
    gate.set()
    assert done.wait(300)
    assert order == ["pass", "decode"]


def test_unknown_device_is_refused():
    assert choose_devices("cpu") == [torch.device("cpu")]
    assert choose_devices("cpu,cpu") == [torch.device("cpu")] * 2
    with pytest.raises(ValueError, match="cuda:99"):
        choose_devices("cuda:99")


def test_devices_of_two_kinds_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices("auto") == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    with pytest.raises(ValueError, match="one kind"):
        choose_devices("cpu,cuda:1")


def test_batch_is_padded_with_zeros():
    images = [torch.ones(2, 3), torch.full((2, 3), 2.0)]
    batch = padded(images, 4, torch.device("cpu"))
    assert batch.shape == (4, 2, 3)
    assert batch[:, 0, 0].tolist() == [1, 2, 0, 0]


def prefix_with_memory_for(batch, too_large):
    sizes: list[int] = []

    def prefix(images):
        sizes.append(len(images))
        return too_large() if len(images) > batch else images * 2

    return sizes, prefix


def raise_out_of_memory():
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize(
    "too_large",
    [raise_out_of_memory, lambda: torch.empty(2**60, dtype=torch.uint8)],
    ids=["gpu", "cpu"],
)
def test_batch_is_halved_until_it_fits(too_large):
    images = torch.arange(7.0).reshape(7, 1)
    sizes, prefix = prefix_with_memory_for(2, too_large)
    computed = run_prefix(prefix, images, device=torch.device("cpu"))
    assert computed.features.tolist() == (images * 2).tolist()
    assert sizes == [7, 3, 1, 2, 4, 2, 2]
    assert computed.num_halvings == 2


def test_error_of_the_model_is_not_out_of_memory():
    def prefix(images):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        run_prefix(prefix, torch.zeros(2, 1), device=torch.device("cpu"))


def test_one_sample_that_does_not_fit_is_an_error():
    _, prefix = prefix_with_memory_for(0, raise_out_of_memory)
    with pytest.raises(DoesNotFitError, match="no memory"):
        run_prefix(prefix, torch.zeros(2, 1), device=torch.device("cpu"))
