"""Models in memory: one upload, one load, least recently used out first."""

import gc
import hashlib
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from hapi_protocol.errors import (
    AnnotationError,
    ConflictError,
    DoesNotFitError,
    HapiError,
    PackageError,
    UnavailableError,
)
from hapi_protocol.job_messages import ModelIdentity
from hapi_splitter.profiling.memory_model import MemoryRequirement
from hapi_worker.models import device_models as device_models_module
from hapi_worker.models import uploads as uploads_module
from hapi_worker.models.device_models import (
    MAX_PREFIXES,
    DeviceModels,
)
from hapi_worker.models.loaded_model import LoadedModel
from hapi_worker.models.memory_queue import MemoryQueue
from hapi_worker.models.registry import KnownModel, Models
from hapi_worker.models.working_memory import CAP_SECONDS
from waiting import until
from worker_under_test import refusal

WORKING_BYTES = 10
JUNK = PackageError("bad_package", "junk")


class FakeFrozen:
    """A package ``b"<parameter bytes>:<anything>"``."""

    def __init__(self, package):
        if not package[:1].isdigit():
            raise PackageError("bad_package", "not a package")
        self.parameter_bytes = int(bytes(package).partition(b":")[0])
        self.cuts = (None,) * (2 + package.count(b"+"))
        self.num_prefixes = 0

    def to(self, device):
        return self

    def prefix(self, cut):
        self.num_prefixes += 1
        return nn.Identity()


def identity(name, package=b""):
    return ModelIdentity("AUTH_a", "models", name, "etag", len(package))


def asked(models, model, cut=1, **options):
    """The code with which a request for a model is refused."""
    return refusal(models.acquire, model, cut, **options).code


def simple_needs(frozen, cut, dtype):
    return MemoryRequirement(
        frozen.parameter_bytes, ((0, cut * WORKING_BYTES),)
    )


@pytest.fixture(autouse=True)
def simple_memory(monkeypatch):
    monkeypatch.setattr(
        device_models_module, "memory_requirement", simple_needs
    )


def make(
    limit_bytes=1000,
    *,
    load=FakeFrozen,
    wait_seconds=5.0,
    max_waiting=8,
    max_identities=100,
    num_devices=1,
    num_forwards=1,
    largest_batch=1,
    clock=time.monotonic,
):
    queue = MemoryQueue(clock)
    return Models(
        [
            DeviceModels(
                torch.device("cpu"),
                limit_bytes,
                num_forwards=num_forwards,
                largest_batch=largest_batch,
                wait_seconds=wait_seconds,
                queue=queue,
            )
            for _ in range(num_devices)
        ],
        queue,
        max_identities=max_identities,
        wait_seconds=wait_seconds,
        max_waiting=max_waiting,
        load=load,
    )


def put(models, name, package):
    model = identity(name, package)
    models.put(model, bytearray(package))
    models.uploads.end(model)
    return model


def in_threads(count, work):
    """Results, or the errors raised, of ``work`` in ``count`` threads."""
    results = []

    def run():
        try:
            results.append(work())
        except HapiError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return results


def test_identity_leads_to_a_digest_only_through_an_upload():
    models = make()
    model = identity("m", b"10:x")
    assert models.known(model) is None
    assert asked(models, model) == "model_needed"
    put(models, "m", b"10:x")
    lease = models.acquire(model, 2)
    assert lease.digest == hashlib.sha256(b"10:x").hexdigest()
    assert models.known(replace(model, etag="other")) is None


def test_only_one_of_many_askers_uploads_and_all_get_the_model():
    models = make()
    model = identity("m", b"10:x")

    def ask():
        try:
            return models.acquire(model, 1)
        except ConflictError:
            time.sleep(0.1)
            models.uploads.begin(model)
            put(models, "m", b"10:x")
            return "uploaded"

    results = in_threads(6, ask)
    assert results.count("uploaded") == 1
    assert len({r.digest for r in results if r != "uploaded"}) == 1


def test_waiting_askers_get_the_error_of_a_refused_upload():
    models = make()
    model = identity("m", b"junk")
    assert asked(models, model) == "model_needed"

    def refuse():
        time.sleep(0.1)
        error = refusal(models.put, model, bytearray(b"junk"))
        models.uploads.end(model, error)

    thread = threading.Thread(target=refuse)
    thread.start()
    results = in_threads(3, lambda: models.acquire(model, 1))
    thread.join()
    assert [r.code for r in results] == ["bad_package"] * 3
    assert len({id(r) for r in results}) == 3
    assert models.known(model) is None
    assert models.loaded_totals() == (0, 0)


def test_wait_for_an_upload_is_bounded_in_time_and_number():
    models = make(wait_seconds=0.5, max_waiting=2)
    model = identity("m", b"10:x")
    assert asked(models, model) == "model_needed"
    models.uploads.begin(model)
    results = in_threads(5, lambda: models.acquire(model, 1))
    codes = sorted(r.code for r in results)
    assert codes == ["queue_full"] * 3 + ["worker_unavailable"] * 2
    assert all(r.retry_after for r in results)


def test_account_with_most_waiting_jobs_is_turned_away_first():
    models = make(wait_seconds=30.0, max_waiting=3)
    model = identity("m", b"10:x")
    assert asked(models, model) == "model_needed"
    models.uploads.begin(model)

    def ask(account):
        return models.acquire(model, 1, account=account)

    with ThreadPoolExecutor(6) as pool:
        greedy = [pool.submit(ask, "AUTH_greedy") for _ in range(3)]
        until(lambda: models.waiting.num_waiting() == 3)
        modest = [pool.submit(ask, f"AUTH_modest{n}") for n in range(2)]
        until(lambda: sum(each.done() for each in greedy) == 2)
        models.put(model, bytearray(b"10:x"))
        models.uploads.end(model)
        refused = [each.exception() for each in greedy]
        assert [each.result().digest for each in modest]
    assert [each.code for each in refused if each] == ["queue_full"] * 2


def test_same_bytes_under_two_names_are_loaded_once():
    loads = []

    def load(package):
        loads.append(bytes(package))
        time.sleep(0.1)
        return FakeFrozen(package)

    models = make(load=load)
    names = iter("abcd")
    in_threads(4, lambda: put(models, next(names), b"10:x"))
    assert loads == [b"10:x"]
    assert models.loaded_totals() == (1, 10)
    assert models.known(identity("a", b"10:x")) == models.known(
        identity("d", b"10:x")
    )


def test_digest_in_a_name_must_be_the_digest_of_the_bytes():
    models = make()
    good = hashlib.sha256(b"10:x").hexdigest()
    put(models, f"sha256-{good.upper()}.hapi", b"10:x")
    bad = identity("0" * 64, b"10:x")
    mismatch = refusal(models.put, bad, bytearray(b"10:x"))
    assert mismatch.code == "digest_mismatch"
    assert mismatch.details["digest"] == good
    assert models.known(bad) is None
    assert models.loaded_totals() == (1, 10)


def test_least_recently_used_idle_model_leaves_first():
    models = make(1000)
    first = put(models, "a", b"400:a")
    second = put(models, "b", b"400:b")
    models.acquire(first, 1).release()
    third = put(models, "c", b"400:c")
    models.acquire(first, 1).release()
    models.acquire(third, 1).release()
    assert models.known(second) is not None
    assert asked(models, second) == "model_needed"


def test_model_in_use_stays_and_a_new_one_must_come_back_later():
    models = make(1000)
    lease = models.acquire(put(models, "a", b"600:a"), 1)
    busy = refusal(put, models, "b", b"600:b")
    assert busy.code == "queue_full"
    assert busy.details == {
        "needed_bytes": 600 + WORKING_BYTES,
        "available_bytes": 400,
    }
    lease.release()
    lease.release()
    put(models, "b", b"600:b")
    assert models.loaded_totals() == (1, 600)


def test_what_can_never_fit_is_refused_with_the_numbers():
    models = make(1000)
    refused = refusal(put, models, "a", b"1001:a")
    assert refused.code == "does_not_fit"
    assert refused.details == {"needed_bytes": 1001, "available_bytes": 1000}
    model = put(models, "b", b"985:b")
    models.acquire(model, 1).release()
    refused = refusal(models.acquire, model, 2)
    assert refused.code == "does_not_fit"
    assert refused.details["needed_bytes"] == 985 + 2 * WORKING_BYTES
    too_long = replace(model, length_bytes=1001)
    assert refusal(models.check_length, too_long).code == "does_not_fit"


def test_running_jobs_keep_room_for_one_sample():
    models = make(1000)
    models.acquire(put(models, "a", b"400:a"), 2)
    assert refusal(put, models, "b", b"590:b").code == "queue_full"
    put(models, "c", b"580:c")


@pytest.mark.parametrize("cut", [0, 3, 99])
def test_unknown_cut_is_refused_with_those_there_are(cut):
    models = make()
    model = put(models, "m", b"10:x")
    refused = refusal(models.acquire, model, cut)
    assert refused.code == "cut_out_of_range"
    assert refused.details == {"cut": cut, "allowed": [1, 2]}


def test_batches_shrink_when_other_models_take_the_memory():
    models = make(1000)
    lease = models.acquire(put(models, "a", b"100:a"), 1)
    assert lease.batch_limit(32) == 32
    models.acquire(put(models, "b", b"850:b"), 1)
    assert lease.batch_limit(32) == 5


def test_prefixes_are_shared_and_bounded_and_a_job_keeps_its_own():
    models = make()
    model = put(models, "m", b"10:" + b"+" * 8)
    leases = [models.acquire(model, cut) for cut in (1, *range(1, 11))]
    kept = [lease.prefix() for lease in leases]
    assert kept[0] is kept[1]
    [loaded] = models.devices[0]._loaded.values()
    assert len(loaded.prefixes) == MAX_PREFIXES
    assert [lease.prefix() for lease in leases] == kept
    assert leases[0].frozen.num_prefixes == 10


def test_needs_are_computed_once_per_cut_and_dtype_outside_the_lock(
    monkeypatch,
):
    models = make()
    model = put(models, "m", b"10:" + b"+" * 80)
    computed = []

    def memory_requirement(frozen, cut, dtype):
        others = in_threads(1, models.loaded_totals)
        assert others == [(1, 10)], "the lock is held"
        computed.append((cut, dtype))
        return simple_needs(frozen, cut, dtype)

    monkeypatch.setattr(
        device_models_module, "memory_requirement", memory_requirement
    )
    for encoding in ("float32", "float32;zstd", "uint8;lz4", "uint8"):
        lease = models.acquire(model, 2, encoding)
        assert lease.batch_limit(8) == 8
        lease.release()
    assert computed == [(2, "float32"), (2, "uint8")]
    for cut in range(1, 83):
        models.acquire(model, cut).release()
    kept = models.devices[0]._loaded[lease.digest].needs
    assert list(kept) == [(cut, "float32") for cut in range(19, 83)]


def refused(models, name, error):
    """The code that a caller is given after an upload was refused."""
    model = identity(name)
    models.uploads.begin(model)
    models.uploads.end(model, error)
    code = asked(models, model)
    models.uploads.end(model)
    return code


def test_refusal_is_remembered_for_a_while(clock):
    models = make(clock=clock)
    assert refused(models, "m", JUNK) == "bad_package"
    clock.now += uploads_module.REFUSAL_SECONDS - 1
    assert refusal(models.uploads.check, identity("m")).message == "junk"
    models.uploads.check(identity("other"))
    clock.now += 1
    models.uploads.check(identity("m"))
    assert asked(models, identity("m")) == "model_needed"
    # Lack of memory may pass.
    too_big = DoesNotFitError("does_not_fit", "too big")
    assert refused(models, "big", too_big) == "model_needed"


def test_remembered_refusals_and_identities_are_bounded():
    models = make(max_identities=2)
    for number in range(uploads_module.MAX_REFUSALS + 1):
        models.uploads.end(identity(str(number)), JUNK)
    models.uploads.check(identity("0"))
    assert refusal(models.uploads.check, identity("1")).code == "bad_package"
    first, _, last = [put(models, name, b"10:x") for name in "abc"]
    assert models.known(first) is None
    assert models.known(last) is not None


def test_request_waits_for_memory_that_running_jobs_hold():
    models = make(1000)
    first = put(models, "a", b"400:a")
    second = put(models, "b", b"580:+++")
    lease = models.acquire(first, 2)
    assert asked(models, second, 3) == "queue_full"
    threading.Timer(0.1, lease.release).start()
    lease = models.acquire(second, 3, wait_seconds=5.0)
    assert asked(models, first) == "queue_full"
    lease.release()
    assert asked(models, first) == "model_needed"


def test_who_has_gone_waits_for_no_model_and_no_memory():
    models = make(1000)
    first = put(models, "a", b"400:a")
    second = put(models, "b", b"580:+++")
    models.acquire(first, 2)
    other = identity("c")
    models.uploads.begin(other)
    for model in (second, other):
        gone = refusal(
            models.acquire,
            model,
            3,
            wait_seconds=60.0,
            is_disconnected=lambda: True,
        )
        assert isinstance(gone, AnnotationError)
        assert "closed the connection" in gone.message


def test_model_that_is_used_is_copied_to_an_idle_device():
    models = make(num_devices=2)
    model = put(models, "a", b"100:a")
    leases = [models.acquire(model, 1) for _ in range(6)]
    places = [models.devices.index(lease.device_models) for lease in leases]
    assert places[:2] == [0, 0]
    assert sorted(places) == [0, 0, 0, 1, 1, 1]
    assert models.loaded_totals() == (2, 200)


def test_device_that_a_pass_does_not_return_from_is_not_idle(clock):
    models = make(num_devices=2, clock=clock)
    for each in models.devices:
        each.pass_seconds = 60.0
    model = put(models, "a", b"100:a")
    lease = models.acquire(model, 1)
    late = lease.device_models
    assert late.working_memory.longest_pass_seconds() == 0
    assert reserve(lease, 8) is not None
    lease.release()
    clock.now += 60.0
    assert not late.working_memory.has_late_pass
    clock.now += 1.0
    assert late.working_memory.longest_pass_seconds() == 61.0
    other = models.acquire(put(models, "b", b"100:b"), 1)
    assert other.device_models is not late
    # It would not come off the device.
    assert models.acquire(model, 1).device_models is late


def test_job_goes_to_the_device_that_has_room():
    models = make(num_devices=2)
    first = models.acquire(put(models, "a", b"900:a"), 1)
    second = models.acquire(put(models, "b", b"900:b"), 1)
    assert first.device_models is not second.device_models
    assert refusal(put, models, "c", b"900:c").code == "queue_full"


def test_device_that_left_service_takes_no_jobs():
    models = make(num_devices=2)
    model = put(models, "a", b"100:a")
    lease = models.acquire(model, 1)
    lease.device_models.leave_service()
    lease.release()
    assert asked(models, model) == "model_needed"
    put(models, "a", b"100:a")
    assert models.acquire(model, 1).device_models is models.devices[1]
    models.devices[1].leave_service()
    assert "in service" in refusal(put, models, "a", b"100:a").message


def test_cache_of_a_gpu_is_emptied_outside_the_lock(monkeypatch):
    models = make(1000)
    [device_models] = models.devices
    device_models.device = torch.device("cuda")
    emptied = []

    def empty_cache():
        # Hangs in the other thread where the lock is held.
        emptied.append(in_threads(1, models.loaded_totals))

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    put(models, "a", b"600:a")
    put(models, "b", b"600:b")
    assert emptied == [[(0, 600)]]
    device_models.largest_batch = 45
    put(models, "c", b"300:c")
    models.acquire(identity("c", b"300:c"), 1)
    assert emptied[1:] == [[(1, 300)]]


def test_refusal_holds_no_model_in_memory():
    models = make(1000)
    [device_models] = models.devices
    idle = put(models, "idle", b"300:idle")
    models.acquire(idle, 1).release()
    digest = hashlib.sha256(b"300:idle").hexdigest()
    with device_models._changed:
        held = weakref.ref(device_models._loaded[digest])
    models.acquire(put(models, "held", b"685:held"), 1)
    gc.disable()
    try:
        # Not by refusal(), whose error and frame hold each other.
        with pytest.raises(UnavailableError):
            models.acquire(idle, 2, wait_seconds=0.0)
        with device_models._changed:
            device_models._loaded.pop(digest, None)
        assert held() is None
    finally:
        gc.enable()


def test_cycles_that_hold_evicted_models_are_collected():
    models = make(1000)
    model = FakeFrozen(bytearray(b"600:a"))
    model.itself = model
    held = weakref.ref(model)
    [device_models] = models.devices
    gc.disable()
    try:
        device_models.add("a", model, 0.0)
        del model
        assert held() is not None
        put(models, "b", b"600:b")
        assert held() is None
    finally:
        gc.enable()


def reserve(lease, maximum, starved=Mock()):  # noqa: B008
    return lease.device_models.working_memory.reserve(lease, maximum, starved)


def test_passes_share_the_working_memory_evenly():
    models = make(260, num_forwards=2)
    lease = models.acquire(put(models, "a", b"100:a"), 1)
    assert [reserve(lease, 32).batch for _ in range(2)] == [8, 8]
    assert lease.device_models.working_memory.reserved_bytes() == 160


def test_pass_that_needs_little_leaves_the_rest_to_others():
    models = make(260, num_forwards=2)
    model = put(models, "a", b"100:a")
    small, large = models.acquire(model, 1), models.acquire(model, 2)
    assert reserve(small, 2).batch == 2
    # Half of it: a small pass may want its half as well.
    assert reserve(large, 32).batch == 4


def test_pass_waits_if_not_one_sample_fits_next_to_others():
    models = make(115, num_forwards=2)
    lease = models.acquire(put(models, "a", b"100:a"), 1)
    first = reserve(lease, 8)
    assert first.batch == 1
    retry = Mock()
    assert reserve(lease, 8, retry) is None
    lease.device_models.working_memory.free(first)
    retry.assert_called_once_with()
    assert reserve(lease, 8, retry).batch == 1


def test_large_images_take_at_most_half_and_passes_get_the_rest():
    models = make(260, num_forwards=1)
    model = put(models, "a", b"100:a")
    lease = models.acquire(model, 1)
    devices = lease.device_models
    with pytest.raises(DoesNotFitError, match="decoding an image needs 131"):
        devices.working_memory.decoding(131).__enter__()
    retry = Mock()
    with devices.working_memory.decoding(130):
        assert devices.loaded_totals() == (1, 100)
        made = reserve(lease, 32, retry)
        assert made.batch == 3
        assert devices.working_memory.batch_limit(lease, 32) == 16
        # A pass that finds no memory is called when the image is done.
        assert reserve(lease, 32, retry) is None
        devices.working_memory.free(made)
    assert retry.call_count == 2
    assert reserve(lease, 32, retry).batch == 16


def test_large_image_waits_for_others_and_for_passes():
    models = make(260, num_forwards=1)
    lease = models.acquire(put(models, "a", b"100:a"), 1)
    devices = lease.device_models
    made = reserve(lease, 10)
    order = []

    def decode(name, num_bytes):
        with devices.working_memory.decoding(num_bytes):
            order.append(name)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(decode, "first", 80)
        until(lambda: devices.working_memory.decoding_bytes)
        second = threads.submit(decode, "second", 80)
        assert not order
        order.append("pass")
        devices.working_memory.free(made)
        first.result()
        second.result()
    assert order == ["pass", "first", "second"]


class Loading:
    """A model that is put in a thread, and what is taken when it moves."""

    def __init__(self, models, name, package):
        [self.device_models] = models.devices
        self.models = models
        self.taken = []
        self.error = None
        models.load = self._load
        self._thread = threading.Thread(target=self._put, args=[name, package])
        self._thread.start()
        until(lambda: bool(self.device_models._loading) or self.ended)

    @property
    def ended(self):
        return not self._thread.is_alive()

    def join(self):
        self._thread.join(60)
        assert self.ended

    def _load(self, package):
        loading = self

        class Moving(FakeFrozen):
            def to(self, device):
                _, used_bytes = loading.device_models.loaded_totals()
                reserved_bytes = (
                    loading.device_models.working_memory.reserved_bytes()
                )
                loading.taken.append(used_bytes + reserved_bytes)
                return self

        return Moving(package)

    def _put(self, name, package):
        try:
            put(self.models, name, package)
        except HapiError as error:
            self.error = error


def test_model_is_copied_once_the_passes_leave_room_for_it():
    models = make(1000, num_forwards=2)
    lease = models.acquire(put(models, "a", b"400:a"), 1)
    device_models = lease.device_models
    passes = [reserve(lease, 30), reserve(lease, 30)]
    assert device_models.working_memory.reserved_bytes() == 600
    loading = Loading(models, "b", b"500:b")
    for each in passes:
        assert not loading.taken
        device_models.working_memory.free(each)
        # What begins meanwhile finds the less, and does not wait for it.
        began = reserve(lease, 30)
        assert began is None or began.batch <= 10
    loading.join()
    assert loading.error is None
    assert max(loading.taken) <= 1000


def test_pass_that_starves_goes_on_while_a_model_waits():
    models = make(1000, num_forwards=2)
    lease = models.acquire(put(models, "a", b"400:a"), 1)
    device_models = lease.device_models
    first, second = reserve(lease, 60), reserve(lease, 60)
    loading = Loading(models, "b", b"580:b")
    woken = threading.Event()
    assert reserve(lease, 60, woken.set) is None
    device_models.working_memory.free(first)
    assert woken.is_set()
    assert reserve(lease, 60, woken.set) is None
    device_models.working_memory.free(second)
    loading.join()
    assert reserve(lease, 60, woken.set) is not None
    assert loading.taken == [980]


def test_model_counts_while_its_last_pass_runs_though_it_has_left():
    models = make(1000)
    lease = models.acquire(put(models, "a", b"600:a"), 1)
    last = reserve(lease, 10)
    lease.release()
    loading = Loading(models, "b", b"500:b")
    assert models.loaded_totals()[1] == 500
    assert not loading.taken
    lease.device_models.working_memory.free(last)
    loading.join()
    assert loading.taken == [500]


@pytest.mark.parametrize(("fails", "seconds"), [(False, 0.1), (True, 60.0)])
def test_model_waits_in_vain_for_passes_that_do_not_end(fails, seconds):
    models = make(1000, wait_seconds=seconds)
    lease = models.acquire(put(models, "a", b"400:a"), 1)
    assert reserve(lease, 60) is not None
    loading = Loading(models, "b", b"500:b")
    if fails:
        lease.device_models.leave_service()
    loading.join()
    assert loading.error.code == "queue_full"
    assert not loading.taken
    assert models.loaded_totals() == ((0, 0) if fails else (1, 400))


def test_who_is_alone_has_all_of_the_working_memory():
    models = make(260, num_forwards=2)
    lease = models.acquire(put(models, "a", b"100:a"), 1)
    with lease.device_models.working_memory.reserve_alone(
        lease, 32
    ) as largest:
        assert largest == 16
        assert lease.device_models.working_memory.reserved_bytes() == 160
    assert lease.device_models.working_memory.reserved_bytes() == 0


def test_batch_that_did_not_fit_is_not_tried_again_for_a_while(clock):
    models = make(10_000, clock=clock)
    model = put(models, "a", b"100:a")
    lease, other = models.acquire(model, 1), models.acquire(model, 2)
    lease.device_models.working_memory.record_out_of_memory(lease, 16)
    assert lease.batch_limit(32) == 8
    assert other.batch_limit(32) == 32
    assert models.acquire(model, 1).batch_limit(32) == 8
    clock.now += CAP_SECONDS
    assert lease.batch_limit(32) == 32


def test_pass_that_needs_much_is_not_passed_by_small_ones():
    models = make(1_000, num_forwards=4)
    model = put(models, "a", b"100:" + b"+" * 40)
    small, large = models.acquire(model, 2), models.acquire(model, 40)
    taken = [reserve(small, 12) for _ in range(3)]
    assert all(taken)
    asked = []
    retry_large = partial(asked.append, "large")
    retry_small = partial(asked.append, "small")
    assert reserve(large, 1, retry_large) is None
    # There is room for it, but not before the one that waits.
    assert reserve(small, 12, retry_small) is None
    for each in taken:
        small.device_models.working_memory.free(each)
    assert set(asked) == {"large"}
    assert reserve(large, 1, retry_large) is not None
    assert asked[-1] == "small"
    assert reserve(small, 12, retry_small) is not None


def test_who_waits_for_memory_no_more_lets_the_next_one_try():
    models = make(115, num_forwards=2)
    lease = models.acquire(put(models, "a", b"100:a"), 1)
    assert reserve(lease, 8) is not None
    first, second = Mock(), Mock()
    assert reserve(lease, 8, first) is None
    assert reserve(lease, 8, second) is None
    lease.device_models.working_memory.cancel_wait(first)
    first.assert_not_called()
    second.assert_called_once_with()


# 160 bytes for a pass of 8: one idle model has to go; but half of the memory
# may be idle models.
@pytest.mark.parametrize(("batch", "left"), [(8, (8, 800)), (64, (5, 500))])
def test_idle_models_leave_room_for_usual_passes(batch, left):
    models = make(1_000, largest_batch=batch)
    for number in range(9):
        put(models, str(number), f"100:{number}".encode())
    lease = models.acquire(identity("8", b"100:8"), 2)
    assert lease.batch_limit(8) == 8
    assert models.loaded_totals() == left


def test_requests_that_wait_for_memory_do_not_wake_each_other(monkeypatch):
    models = make(1000, num_devices=2)
    leases = [
        models.acquire(put(models, name, b"900:" + name.encode()), 1)
        for name in "ab"
    ]
    tries = Mock(side_effect=models.copies.lease)
    monkeypatch.setattr(models.copies, "lease", tries)
    # A model in memory that no device has room to run.
    big = identity("c", b"950:c")
    models.devices[0]._loaded["c"] = LoadedModel("c", FakeFrozen(b"950:c"), 10)
    models._known[big] = KnownModel("c", 2)
    refusals = in_threads(3, lambda: models.acquire(big, 1, wait_seconds=0.3))
    assert len(refusals) == 3
    assert tries.call_count <= 9
    assert len(leases) == 2


def test_refusal_that_may_pass_is_told_rather_than_a_lasting_one():
    models = make(1000, num_devices=2)
    models.devices[1].limit_bytes = 100
    models.acquire(put(models, "a", b"700:a"), 1)
    assert refusal(put, models, "b", b"700:b").code == "queue_full"


def test_model_is_not_put_on_a_device_that_has_left_meanwhile():
    models = make()
    [device_models] = models.devices

    class Leaving(FakeFrozen):
        def to(self, device):
            device_models.leave_service()
            return self

    models.load = Leaving
    assert refusal(put, models, "a", b"100:a").code == "queue_full"
    assert models.loaded_totals() == (0, 0)
