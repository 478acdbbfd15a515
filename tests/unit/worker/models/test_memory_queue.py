"""Models take turns if the memory does not suffice for all of them."""

import threading

import pytest
import torch

from hapi_protocol.errors import (
    ConflictError,
    PackageError,
    UnavailableError,
)
from hapi_protocol.job_messages import ModelIdentity
from hapi_splitter.profiling.memory_model import MemoryRequirement
from hapi_worker.models import device_models as device_models_module
from hapi_worker.models.device_models import DeviceModels
from hapi_worker.models.load_queue import (
    HEAD_SECONDS,
    LOAD_GRACE_SECONDS,
    MAX_LOADS_PER_ACCOUNT,
    LoadQueue,
    QueuedLoad,
)
from hapi_worker.models.memory_queue import MemoryQueue
from hapi_worker.models.registry import Models
from hapi_worker.models.uploads import GRACE_SECONDS
from worker_under_test import refusal

WORKING_BYTES = 10


class FakeFrozen:
    """A model with as many parameter bytes as its package has bytes."""

    cuts = (None,)

    def __init__(self, package):
        self.parameter_bytes = len(package)

    def to(self, device):
        return self


def simple_needs(frozen, cut, dtype):
    return MemoryRequirement(frozen.parameter_bytes, ((WORKING_BYTES, 0),))


@pytest.fixture
def models(monkeypatch, clock):
    """With room for 1,000 bytes."""
    monkeypatch.setattr(
        device_models_module, "memory_requirement", simple_needs
    )
    return models_on(1, clock)


def models_on(num_devices, clock):
    changed = threading.Condition()
    device = torch.device("cpu")
    return Models(
        [
            DeviceModels(device, 1000, changed=changed, clock=clock)
            for _ in range(num_devices)
        ],
        changed,
        max_identities=10,
        wait_seconds=60.0,
        max_waiting=8,
        load=FakeFrozen,
        clock=clock,
    )


def package_of(model):
    return bytearray(model.object.encode().ljust(model.length_bytes))


def model_of(num_bytes, account="AUTH_a"):
    name = f"model of {account} with {num_bytes}"
    return ModelIdentity(account, "models", name, "etag", num_bytes)


def asked(models, model):
    """The refusal of a job whose model is not in memory."""
    return refusal(models.acquire, model, 1).code


def upload(models, model):
    models.begin_upload(model)
    models.put(model, package_of(model))
    models.end_upload(model)


def test_account_with_many_loads_has_one_turn_like_others(clock):
    load_queue = LoadQueue(clock)
    clock.now = LOAD_GRACE_SECONDS
    made = [
        QueuedLoad(account, 10, since, 1000.0, "")
        for since, account in enumerate(["a", "a", "a", "b", "c", "b"])
    ]
    for request in reversed(made):
        load_queue.add(request)
    order = sorted(made, key=load_queue.bytes_ahead)
    assert order == [made[n] for n in (0, 3, 4, 1, 5, 2)]
    assert load_queue.blocking() is made[0]
    # The account had its turn: its others come behind those of all.
    load_queue.remove(made[0], served=True)
    order = sorted(made[1:], key=load_queue.bytes_ahead)
    assert order[:2] == [made[3], made[4]]


def test_load_blocks_others_after_its_grace_period(clock):
    load_queue = LoadQueue(clock)
    first, second = (QueuedLoad(a, 10, clock.now, 1000.0, "") for a in "ab")
    load_queue.add(first)
    load_queue.add(second)
    clock.now += LOAD_GRACE_SECONDS - 0.1
    assert load_queue.blocking() is None
    clock.now += 0.1
    assert load_queue.blocking() is first
    load_queue.remove(first, served=True)
    assert load_queue.blocking() is None
    clock.now += LOAD_GRACE_SECONDS
    assert load_queue.blocking() is second


def test_load_that_is_not_extended_expires(clock):
    load_queue = LoadQueue(clock)
    load_queue.add(QueuedLoad("a", 10, 0.0, clock.now + 1, ""))
    assert len(load_queue) == 1
    clock.now += 1
    assert len(load_queue) == 0
    assert load_queue.blocking() is None


def test_waiting_model_gets_its_turn(models, clock):
    small, large = model_of(300), model_of(800, "AUTH_b")
    upload(models, small)
    running = models.acquire(small, 1)
    assert asked(models, large) == "queue_full"
    # Jobs of the model that is there still begin.
    models.acquire(small, 1).release()
    for _ in range(3):
        clock.now += LOAD_GRACE_SECONDS / 2
        assert asked(models, large) == "queue_full"
    passed = refusal(models.acquire, small, 1)
    assert isinstance(passed, UnavailableError)
    assert "waited longer" in passed.message
    assert models.num_queued_loads() == 2
    running.release()
    assert asked(models, large) == "model_needed"
    upload(models, large)
    models.acquire(large, 1).release()
    # It is used for a while; then it is the other one's turn.
    assert asked(models, small) == "model_needed"


def test_late_upload_loses_its_memory(models, clock):
    small, large = model_of(300), model_of(800, "AUTH_b")
    upload(models, small)
    assert asked(models, large) == "model_needed"
    clock.now += LOAD_GRACE_SECONDS
    assert refusal(models.acquire, small, 1).code == "queue_full"
    clock.now += GRACE_SECONDS - LOAD_GRACE_SECONDS
    models.acquire(small, 1).release()


def test_models_that_fit_next_to_the_waiting_one_are_used(models, clock):
    tiny, small, large = model_of(100), model_of(300), model_of(800, "AUTH_b")
    upload(models, tiny)
    upload(models, small)
    running = models.acquire(small, 1)
    for _ in range(3):
        assert asked(models, large) == "queue_full"
        clock.now += LOAD_GRACE_SECONDS / 2
    running.release()
    models.acquire(tiny, 1)
    assert refusal(models.acquire, small, 1).code == "queue_full"
    assert asked(models, large) == "model_needed"


def test_model_that_never_fits_blocks_no_other(models, clock):
    small, huge = model_of(300), model_of(1200, "AUTH_b")
    upload(models, small)
    assert asked(models, huge) == "model_needed"
    clock.now += LOAD_GRACE_SECONDS
    models.acquire(small, 1).release()
    assert refusal(models.check_length, huge).code == "does_not_fit"


def test_next_load_includes_the_working_memory_of_a_sample(models):
    """The package's length says nothing about working memory."""
    small, other = model_of(3, "AUTH_b"), model_of(985)
    upload(models, other)
    models.acquire(other, 1).release()
    upload(models, small)
    models.acquire(small, 1)
    # 985 and 10 of working memory do not fit next to the 13 of the other.
    assert asked(models, other) == "queue_full"


def test_loaded_model_stays_until_its_job_comes(models):
    """Other models need its memory for their passes."""
    small, large = model_of(50), model_of(945, "AUTH_b")
    upload(models, small)
    assert asked(models, large) == "model_needed"
    upload(models, large)
    assert refusal(models.acquire, small, 1).code == "queue_full"
    models.acquire(large, 1).release()
    upload(models, small)
    models.acquire(small, 1)


def test_load_grows_to_the_needs_of_a_sample(models, clock):
    room = MemoryQueue(lambda digest: models.devices, clock)
    model = model_of(300)
    for needed in (300, 700, 500, 1300):
        room.request(model, "", needed)
    [device_models] = models.devices
    other = QueuedLoad("AUTH_b", 10, clock.now, clock.now + 1, "")
    device_models.load_queue.add(other)
    assert len(device_models.load_queue) == 2
    assert (
        device_models.load_queue.bytes_ahead(other)
        == device_models.limit_bytes
    )


def test_account_that_was_served_is_behind_all_others(clock):
    load_queue = LoadQueue(clock)
    clock.now = float(MAX_LOADS_PER_ACCOUNT)
    for since in range(MAX_LOADS_PER_ACCOUNT):
        assert load_queue.add(QueuedLoad("greedy", 10, since, 9999.0, ""))
    assert not load_queue.add(QueuedLoad("greedy", 10, clock.now, 9999.0, ""))
    modest = QueuedLoad("modest", 10, clock.now - 1, 9999.0, "")
    load_queue.add(modest)
    first = load_queue.blocking()
    assert first is not None
    load_queue.remove(first, served=True)
    clock.now += LOAD_GRACE_SECONDS
    assert load_queue.blocking() is modest


def test_head_is_not_delayed_by_a_load_served_before_it(clock):
    load_queue = LoadQueue(clock)
    first = QueuedLoad("a", 600, clock.now, 9999.0, "")
    second = QueuedLoad("b", 300, clock.now + 1, 9999.0, "")
    load_queue.add(first)
    load_queue.add(second)
    clock.now += LOAD_GRACE_SECONDS
    load_queue.remove(second, served=True)
    assert load_queue.blocking() is first


def test_head_pauses_if_long_jobs_hold_its_memory(clock):
    load_queue = LoadQueue(clock)
    stuck = QueuedLoad("a", 600, clock.now, 9999.0, "")
    load_queue.add(stuck)
    clock.now += LOAD_GRACE_SECONDS
    assert load_queue.blocking() is stuck
    clock.now += HEAD_SECONDS
    assert load_queue.blocking() is None
    clock.now += HEAD_SECONDS
    assert load_queue.blocking() is None
    clock.now += LOAD_GRACE_SECONDS
    assert load_queue.blocking() is stuck


def test_package_that_grows_is_uploaded_in_vain_only_once(
    models, clock, monkeypatch
):
    small, large = model_of(400), model_of(200, "AUTH_b")

    class Folded(FakeFrozen):
        def __init__(self, package):
            super().__init__(package)
            if self.parameter_bytes == large.length_bytes:
                self.parameter_bytes = 700

    monkeypatch.setattr(models, "_load", Folded)
    upload(models, small)
    running = models.acquire(small, 1)
    assert asked(models, large) == "model_needed"
    assert refusal(upload, models, large).code == "queue_full"
    models.end_upload(large)
    for _ in range(3):
        assert asked(models, large) == "queue_full"
        clock.now += LOAD_GRACE_SECONDS / 2
    assert refusal(models.acquire, small, 1).code == "queue_full"
    running.release()
    assert asked(models, large) == "model_needed"
    upload(models, large)


def test_refused_package_is_not_queued(models):
    model = model_of(300)
    assert asked(models, model) == "model_needed"
    assert models.num_queued_loads() == 1
    models.begin_upload(model)
    models.end_upload(model, PackageError("bad_package", "hostile"))
    assert models.num_queued_loads() == 0


def test_model_keeps_its_memory_while_its_job_waits(models, clock):
    small, large = model_of(300), model_of(800, "AUTH_b")
    upload(models, small)
    assert asked(models, large) == "model_needed"
    upload(models, large)
    models.await_model(large, memory_seconds=20.0)
    clock.now += 20
    assert asked(models, small) == "queue_full"
    models.acquire(large, 1)


def test_cut_that_never_fits_does_not_change_the_needed_memory(
    models, monkeypatch
):
    def needs(frozen, cut, dtype):
        return MemoryRequirement(
            frozen.parameter_bytes, ((5000 * (cut - 1), 0),)
        )

    monkeypatch.setattr(device_models_module, "memory_requirement", needs)
    monkeypatch.setattr(FakeFrozen, "cuts", (None, None))
    model, other = model_of(300, "AUTH_b"), model_of(695)
    upload(models, model)
    assert refusal(models.acquire, model, 2).code == "does_not_fit"
    upload(models, other)
    assert asked(models, model_of(900)) == "model_needed"
    models.acquire(model, 1)


@pytest.fixture
def pair(monkeypatch, clock):
    """Two devices with room for 1,000 bytes each."""
    monkeypatch.setattr(
        device_models_module, "memory_requirement", simple_needs
    )
    return models_on(2, clock)


def in_use(pair):
    """Leases of two models, which leave no room for a third one."""
    leases = []
    for model in (model_of(600), model_of(601, "AUTH_b")):
        upload(pair, model)
        leases.append(pair.acquire(model, 1))
    return leases


def test_load_moves_to_the_device_with_memory(pair):
    third = model_of(602, "AUTH_c")
    leases = in_use(pair)
    assert leases[0].device_models is not leases[1].device_models
    assert asked(pair, third) == "queue_full"
    claimed = [r for r in pair.devices if len(r.load_queue)]
    [free] = [lease for lease in leases if lease.device_models not in claimed]
    free.release()
    assert asked(pair, third) == "model_needed"
    assert [len(r.load_queue) for r in pair.devices] == [
        int(r is free.device_models) for r in pair.devices
    ]
    # It is kept for it there.
    upload(pair, third)
    assert pair.acquire(third, 1).device_models is free.device_models


def test_load_leaves_a_failed_device(pair):
    third = model_of(602, "AUTH_c")
    assert len(in_use(pair)) == 2
    assert asked(pair, third) == "queue_full"
    [claimed] = [r for r in pair.devices if len(r.load_queue)]
    [other] = [r for r in pair.devices if r is not claimed]
    claimed.leave_service()
    assert asked(pair, third) == "queue_full"
    assert len(other.load_queue) == 1


def test_caller_is_asked_to_upload_once_there_is_memory(models):
    small, large = model_of(300), model_of(800, "AUTH_b")
    upload(models, small)
    running = models.acquire(small, 1)
    timer = threading.Timer(0.2, running.release)
    timer.start()
    with pytest.raises(ConflictError) as needed:
        models.await_model(large, memory_seconds=30.0)
    assert needed.value.code == "model_needed"
    timer.join()
