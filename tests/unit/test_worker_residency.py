"""Models in memory: one upload, one load, least recently used out first."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hapi_protocol.errors import (
    ConflictError,
    DoesNotFitError,
    HapiError,
    PackageError,
    UnavailableError,
    UnsupportedError,
)
from hapi_protocol.messages import ModelIdentity
from hapi_splitter.memory import Needs
from hapi_worker import residency as residency_module
from hapi_worker import uploads as uploads_module
from hapi_worker.residency import MAX_PREFIXES, Residency

WORKING_BYTES = 10


@dataclass
class FakeCut:
    shape: tuple[int, ...] = (4,)


class FakeFrozen:
    """A package ``b"<parameter bytes>:<anything>"``."""

    def __init__(self, package: bytearray) -> None:
        if not package[:1].isdigit():
            raise PackageError("bad_package", "not a package")
        self.parameter_bytes = int(bytes(package).partition(b":")[0])
        self.cuts: tuple[FakeCut, ...] = (FakeCut(), FakeCut())
        self.cuts += (FakeCut(),) * package.count(b"+")
        self.num_prefixes = 0

    def to(self, device: torch.device) -> FakeFrozen:
        return self

    def prefix(self, cut: int) -> nn.Module:
        self.num_prefixes += 1
        return nn.Identity()


def identity(name: str, package: bytes = b"") -> ModelIdentity:
    return ModelIdentity("AUTH_a", "models", name, "etag", len(package))


def simple_needs(frozen: Any, cut: int, dtype: str) -> Needs:
    return Needs(frozen.parameter_bytes, ((0, cut * WORKING_BYTES),))


@pytest.fixture(autouse=True)
def simple_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "needs_of", simple_needs)


def make(
    limit_bytes: int = 1000,
    *,
    load: Callable[[bytearray], Any] = FakeFrozen,
    wait_seconds: float = 5.0,
    max_waiting: int = 8,
    max_identities: int = 100,
    clock: Callable[[], float] = time.monotonic,
) -> Residency:
    return Residency(
        torch.device("cpu"),
        limit_bytes,
        max_identities=max_identities,
        wait_seconds=wait_seconds,
        max_waiting=max_waiting,
        load=load,
        clock=clock,
    )


def put(residency: Residency, name: str, package: bytes) -> ModelIdentity:
    model = identity(name, package)
    residency.put(model, bytearray(package))
    residency.uploads.end(model)
    return model


def in_threads(count: int, work: Callable[[], Any]) -> list[Any]:
    """Results, or the errors raised, of ``work`` in ``count`` threads."""
    results: list[Any] = []

    def run() -> None:
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


def test_identity_leads_to_a_digest_only_through_an_upload() -> None:
    residency = make()
    model = identity("m", b"10:x")
    assert residency.known(model) is None
    with pytest.raises(ConflictError) as needed:
        residency.acquire(model, 1)
    assert needed.value.code == "model_needed"
    put(residency, "m", b"10:x")
    lease = residency.acquire(model, 2)
    assert lease.digest == hashlib.sha256(b"10:x").hexdigest()
    other_etag = ModelIdentity("AUTH_a", "models", "m", "other", 4)
    assert residency.known(other_etag) is None


def test_only_one_of_many_askers_uploads_and_all_get_the_model() -> None:
    residency = make()
    model = identity("m", b"10:x")

    def ask() -> Any:
        try:
            return residency.acquire(model, 1)
        except ConflictError:
            time.sleep(0.1)
            residency.uploads.begin(model)
            put(residency, "m", b"10:x")
            return "uploaded"

    results = in_threads(6, ask)
    assert results.count("uploaded") == 1
    assert len({r.digest for r in results if r != "uploaded"}) == 1


def test_waiting_askers_get_the_error_of_a_refused_upload() -> None:
    residency = make()
    model = identity("m", b"junk")
    with pytest.raises(ConflictError):
        residency.acquire(model, 1)

    def refuse() -> None:
        time.sleep(0.1)
        with pytest.raises(PackageError) as refused:
            residency.put(model, bytearray(b"junk"))
        residency.uploads.end(model, refused.value)

    thread = threading.Thread(target=refuse)
    thread.start()
    results = in_threads(3, lambda: residency.acquire(model, 1))
    thread.join()
    assert [r.code for r in results] == ["bad_package"] * 3
    assert len({id(r) for r in results}) == 3
    assert residency.known(model) is None
    assert residency.resident() == (0, 0)


def test_next_asker_uploads_when_an_upload_was_broken_off() -> None:
    residency = make()
    model = identity("m", b"10:x")
    with pytest.raises(ConflictError):
        residency.acquire(model, 1)
    residency.uploads.begin(model)
    threading.Timer(0.1, residency.uploads.end, [model]).start()
    with pytest.raises(ConflictError) as needed:
        residency.acquire(model, 1)
    assert needed.value.code == "model_needed"


def test_waiting_for_an_upload_ends_in_time() -> None:
    residency = make(wait_seconds=0.2)
    model = identity("m", b"10:x")
    with pytest.raises(ConflictError):
        residency.acquire(model, 1)
    residency.uploads.begin(model)
    with pytest.raises(UnavailableError, match=r"0\.2 s") as late:
        residency.acquire(model, 1)
    assert late.value.retry_after


def test_number_of_waiting_askers_is_bounded() -> None:
    residency = make(wait_seconds=0.5, max_waiting=2)
    model = identity("m", b"10:x")
    with pytest.raises(ConflictError):
        residency.acquire(model, 1)
    residency.uploads.begin(model)
    results = in_threads(5, lambda: residency.acquire(model, 1))
    codes = sorted(r.code for r in results)
    assert codes == ["queue_full"] * 3 + ["worker_unavailable"] * 2


def test_same_bytes_under_two_names_are_loaded_once() -> None:
    loads = []

    def load(package: bytearray) -> FakeFrozen:
        loads.append(bytes(package))
        time.sleep(0.1)
        return FakeFrozen(package)

    residency = make(load=load)
    names = iter("abcd")
    in_threads(4, lambda: put(residency, next(names), b"10:x"))
    assert loads == [b"10:x"]
    assert residency.resident() == (1, 10)
    assert residency.known(identity("a", b"10:x")) == residency.known(
        identity("d", b"10:x")
    )


def test_digest_in_a_name_must_be_the_digest_of_the_bytes() -> None:
    residency = make()
    good = hashlib.sha256(b"10:x").hexdigest()
    put(residency, f"sha256-{good.upper()}.hapi", b"10:x")
    bad = identity("0" * 64, b"10:x")
    with pytest.raises(ConflictError) as mismatch:
        residency.put(bad, bytearray(b"10:x"))
    assert mismatch.value.code == "digest_mismatch"
    assert mismatch.value.details["digest"] == good
    assert residency.known(bad) is None


def test_least_recently_used_idle_model_leaves_first() -> None:
    residency = make(1000)
    first = put(residency, "a", b"400:a")
    second = put(residency, "b", b"400:b")
    residency.acquire(first, 1).release()
    third = put(residency, "c", b"400:c")
    residency.acquire(first, 1).release()
    residency.acquire(third, 1).release()
    assert residency.known(second) is not None
    with pytest.raises(ConflictError) as needed:
        residency.acquire(second, 1)
    assert needed.value.code == "model_needed"


def test_model_in_use_stays_and_a_new_one_must_come_back_later() -> None:
    residency = make(1000)
    lease = residency.acquire(put(residency, "a", b"600:a"), 1)
    with pytest.raises(UnavailableError) as busy:
        put(residency, "b", b"600:b")
    assert busy.value.code == "queue_full"
    assert busy.value.details == {
        "needed_bytes": 600 + WORKING_BYTES,
        "available_bytes": 400,
    }
    lease.release()
    lease.release()
    put(residency, "b", b"600:b")
    assert residency.resident() == (1, 600)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    residency = make(1000)
    with pytest.raises(DoesNotFitError) as refused:
        put(residency, "a", b"1001:a")
    assert refused.value.details == {
        "needed_bytes": 1001,
        "available_bytes": 1000,
    }
    model = put(residency, "b", b"985:b")
    residency.acquire(model, 1).release()
    with pytest.raises(DoesNotFitError) as refused:
        residency.acquire(model, 2)
    assert refused.value.details["needed_bytes"] == 985 + 2 * WORKING_BYTES
    with pytest.raises(DoesNotFitError):
        residency.check_length(
            ModelIdentity("AUTH_a", "models", "big", "etag", 1001)
        )


def test_running_jobs_keep_room_for_one_sample() -> None:
    residency = make(1000)
    residency.acquire(put(residency, "a", b"400:a"), 2)
    with pytest.raises(UnavailableError):
        put(residency, "b", b"590:b")
    put(residency, "c", b"580:c")


@pytest.mark.parametrize("cut", [0, 3, 99])
def test_unknown_cut_is_refused_with_those_there_are(cut: int) -> None:
    residency = make()
    model = put(residency, "m", b"10:x")
    with pytest.raises(UnsupportedError) as refused:
        residency.acquire(model, cut)
    assert refused.value.code == "cut_out_of_range"
    assert refused.value.details == {"cut": cut, "allowed": [1, 2]}


def test_batches_shrink_when_other_models_take_the_memory() -> None:
    residency = make(1000)
    lease = residency.acquire(put(residency, "a", b"100:a"), 1)
    assert lease.batch_limit(32) == 32
    residency.acquire(put(residency, "b", b"850:b"), 1)
    assert lease.batch_limit(32) == 5


def test_prefix_is_built_once_per_cut() -> None:
    residency = make()
    model = put(residency, "m", b"10:x")
    leases = [residency.acquire(model, cut) for cut in (1, 1, 2)]
    assert leases[0].prefix() is leases[1].prefix()
    leases[2].prefix()
    assert leases[0].frozen.num_prefixes == 2  # type: ignore[attr-defined]


def test_prefixes_that_are_kept_are_bounded_and_a_job_keeps_its_own() -> None:
    residency = make()
    model = put(residency, "m", b"10:" + b"+" * 8)
    leases = [residency.acquire(model, cut) for cut in range(1, 11)]
    kept = [lease.prefix() for lease in leases]
    assert len(residency._residents[leases[0].digest].prefixes) == MAX_PREFIXES
    assert [lease.prefix() for lease in leases] == kept
    assert leases[0].frozen.num_prefixes == 10  # type: ignore[attr-defined]


def test_needs_are_computed_once_per_cut_and_dtype_outside_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    residency = make()
    model = put(residency, "m", b"10:" + b"+" * 80)
    computed: list[tuple[int, str]] = []

    def needs_of(frozen: Any, cut: int, dtype: str) -> Needs:
        others = in_threads(1, residency.resident)
        assert others == [(1, 10)], "the lock is held"
        computed.append((cut, dtype))
        return simple_needs(frozen, cut, dtype)

    monkeypatch.setattr(residency_module, "needs_of", needs_of)
    for encoding in ("float32", "float32;zstd", "uint8;lz4", "uint8"):
        lease = residency.acquire(model, 2, encoding)
        assert lease.batch_limit(8) == 8
        lease.release()
    assert computed == [(2, "float32"), (2, "uint8")]
    for cut in range(1, 83):
        residency.acquire(model, cut).release()
    kept = residency._residents[lease.digest].needs
    assert list(kept) == [(cut, "float32") for cut in range(19, 83)]


def refused(residency: Residency, name: str, error: HapiError) -> HapiError:
    """What an asker is told after an upload was refused."""
    model = identity(name)
    residency.uploads.begin(model)
    residency.uploads.end(model, error)
    with pytest.raises(HapiError) as told:
        residency.acquire(model, 1)
    residency.uploads.end(model)
    return told.value


def test_refusal_is_remembered_for_a_while() -> None:
    now = [0.0]
    residency = make(clock=lambda: now[0])
    error = PackageError("bad_package", "junk")
    assert refused(residency, "m", error).code == "bad_package"
    now[0] = uploads_module.REFUSAL_SECONDS - 1
    with pytest.raises(PackageError, match="junk"):
        residency.uploads.check(identity("m"))
    residency.uploads.check(identity("other"))
    now[0] += 1
    residency.uploads.check(identity("m"))
    with pytest.raises(ConflictError) as needed:
        residency.acquire(identity("m"), 1)
    assert needed.value.code == "model_needed"


def test_lack_of_memory_is_no_refusal_to_remember() -> None:
    residency = make()
    error = DoesNotFitError("does_not_fit", "too big")
    assert refused(residency, "m", error).code == "model_needed"


def test_remembered_refusals_are_bounded() -> None:
    residency = make()
    error = PackageError("bad_package", "junk")
    for number in range(uploads_module.MAX_REFUSALS + 1):
        residency.uploads.end(identity(str(number)), error)
    residency.uploads.check(identity("0"))
    with pytest.raises(PackageError):
        residency.uploads.check(identity("1"))


def test_remembered_identities_are_bounded() -> None:
    residency = make(max_identities=2)
    models = [put(residency, name, b"10:x") for name in "abc"]
    assert residency.known(models[0]) is None
    assert residency.known(models[2]) is not None
