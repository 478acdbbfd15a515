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
from hapi_worker.models.memory_queue import (
    HEAD_SECONDS,
    LOAD_GRACE_SECONDS,
    MAX_LOADS_PER_ACCOUNT,
    QUEUED_LOAD_SECONDS,
    MemoryQueue,
)
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
    queue = MemoryQueue(clock)
    device = torch.device("cpu")
    return Models(
        [DeviceModels(device, 1000, queue=queue) for _ in range(num_devices)],
        queue,
        max_identities=10,
        wait_seconds=60.0,
        max_waiting=8,
        load=FakeFrozen,
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


class Loads:
    """Queued loads of one device, by account and number."""

    def __init__(self, models):
        self.devices = models.devices
        self.queue = self.devices[0].queue

    def request(self, name, num_bytes=10):
        self.queue.request(self._identity(name), "", num_bytes, self.devices)

    def end(self, name, *, served=True):
        with self.queue.changed:
            self.queue.end(self._identity(name), served=served)

    def names(self):
        return {model.object for model in self.queue.loads()}

    def head(self):
        return self._name(self.queue.head(self.devices[0]))

    def blocking(self):
        return self._name(self.queue.blocking(self.devices[0]))

    def _name(self, load):
        loads = self.queue.loads().items()
        return next((m.object for m, each in loads if each is load), None)

    def _identity(self, name):
        return ModelIdentity(name[0], "models", name, "etag", 10)


@pytest.fixture
def loads(models):
    return Loads(models)


def test_account_with_many_loads_has_one_turn_like_others(loads, clock):
    names = ["a0", "a1", "a2", "b3", "c4", "b5"]
    for name in names:
        clock.now += 0.1
        loads.request(name)
    order = []
    while head := loads.head():
        clock.now += 0.1
        order.append(head)
        loads.end(head)
    assert order == ["a0", "b3", "c4", "a1", "b5", "a2"]


def test_load_blocks_others_after_its_grace_period(loads, clock):
    loads.request("a")
    loads.request("b")
    clock.now += LOAD_GRACE_SECONDS - 0.1
    assert loads.blocking() is None
    clock.now += 0.1
    assert loads.blocking() == "a"
    loads.end("a")
    assert loads.blocking() is None
    loads.request("b")
    clock.now += LOAD_GRACE_SECONDS
    assert loads.blocking() == "b"


def test_load_that_is_not_requested_again_expires(loads, clock):
    loads.request("a")
    assert loads.names() == {"a"}
    clock.now += QUEUED_LOAD_SECONDS
    assert not loads.names()
    assert loads.blocking() is None


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


def test_load_grows_to_the_needs_of_a_sample(loads, models):
    for needed in (300, 700, 500, 1300):
        loads.request("a", needed)
    [load] = loads.queue.loads().values()
    assert load.num_bytes == models.devices[0].limit_bytes


def test_loads_of_an_account_are_bounded(loads):
    for number in range(MAX_LOADS_PER_ACCOUNT + 1):
        loads.request(f"a{number}")
    loads.request("b")
    assert len(loads.names()) == MAX_LOADS_PER_ACCOUNT + 1
    assert "b" in loads.names()


def test_head_is_not_delayed_by_a_load_served_before_it(loads, clock):
    loads.request("a")
    clock.now += 1
    loads.request("b")
    clock.now += LOAD_GRACE_SECONDS - 1
    loads.end("b")
    assert loads.blocking() == "a"


def test_head_pauses_if_long_jobs_hold_its_memory(loads, clock):
    def pass_time(seconds):
        for _ in range(2):
            loads.request("a")
            clock.now += seconds / 2
        loads.request("a")

    pass_time(LOAD_GRACE_SECONDS)
    assert loads.blocking() == "a"
    for _ in range(int(HEAD_SECONDS / 10)):
        pass_time(10)
    assert loads.blocking() is None
    for _ in range(int(HEAD_SECONDS / 10)):
        pass_time(10)
        assert loads.blocking() is None
    pass_time(LOAD_GRACE_SECONDS)
    assert loads.blocking() == "a"


def test_package_that_grows_is_uploaded_in_vain_only_once(
    models, clock, monkeypatch
):
    small, large = model_of(400), model_of(200, "AUTH_b")

    class Folded(FakeFrozen):
        def __init__(self, package):
            super().__init__(package)
            if self.parameter_bytes == large.length_bytes:
                self.parameter_bytes = 700

    monkeypatch.setattr(models, "load", Folded)
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


def waiting_for(pair):
    """The device for whose memory the only load waits."""
    [load] = pair.devices[0].queue.loads().values()
    return load.device


def test_load_moves_to_the_device_with_memory(pair):
    third = model_of(602, "AUTH_c")
    leases = in_use(pair)
    assert leases[0].device_models is not leases[1].device_models
    assert asked(pair, third) == "queue_full"
    claimed = waiting_for(pair)
    [free] = [lease for lease in leases if lease.device_models is not claimed]
    free.release()
    assert asked(pair, third) == "model_needed"
    assert waiting_for(pair) is free.device_models
    # It is kept for it there.
    upload(pair, third)
    assert pair.acquire(third, 1).device_models is free.device_models


def test_load_leaves_a_failed_device(pair):
    third = model_of(602, "AUTH_c")
    assert len(in_use(pair)) == 2
    assert asked(pair, third) == "queue_full"
    claimed = waiting_for(pair)
    claimed.leave_service()
    assert asked(pair, third) == "queue_full"
    assert waiting_for(pair) is not claimed


def test_second_model_is_not_uploaded_in_vain(models):
    """The memory is free until the first one is loaded."""
    running, first, second, third = (
        model_of(size, f"AUTH_{size}") for size in (300, 400, 200, 201)
    )
    upload(models, running)
    models.acquire(running, 1)
    assert asked(models, first) == "model_needed"
    assert asked(models, second) == "model_needed"
    assert asked(models, third) == "queue_full"


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
