"""Models take turns where the memory does not suffice for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hapi_protocol.errors import (
    ConflictError,
    HapiError,
    UnavailableError,
)
from hapi_protocol.messages import ModelIdentity
from hapi_splitter.memory import Needs
from hapi_worker import residency as residency_module
from hapi_worker.claims import CLAIM_SECONDS, Claim, Claims
from hapi_worker.models import Models
from hapi_worker.residency import Residency
from hapi_worker.room import SEEN_SECONDS, Room
from hapi_worker.uploads import GRACE_SECONDS

WORKING_BYTES = 10


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeFrozen:
    """Of as many parameter bytes as its package has bytes."""

    cuts = (None,)

    def __init__(self, package: bytearray) -> None:
        self.parameter_bytes = len(package)

    def to(self, device: torch.device) -> FakeFrozen:
        return self


def simple_needs(frozen: Any, cut: int, dtype: str) -> Needs:
    return Needs(frozen.parameter_bytes, ((WORKING_BYTES, 0),))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Models:
    """With room for 1,000 bytes."""
    monkeypatch.setattr(residency_module, "needs_of", simple_needs)
    changed = threading.Condition()
    device = torch.device("cpu")
    residency = Residency(device, 1000, changed=changed, clock=clock)
    return Models(
        [residency],
        changed,
        max_identities=10,
        wait_seconds=60.0,
        max_waiting=8,
        load=FakeFrozen,  # type: ignore[arg-type]
        clock=clock,
    )


def package_of(model: ModelIdentity) -> bytearray:
    return bytearray(model.object.encode().ljust(model.length_bytes))


def model_of(num_bytes: int, account: str = "AUTH_a") -> ModelIdentity:
    name = f"model of {account} with {num_bytes}"
    return ModelIdentity(account, "models", name, "etag", num_bytes)


def refusal(ask: Callable[[], object]) -> HapiError:
    with pytest.raises(HapiError) as refused:
        ask()
    return refused.value


def asked(models: Models, model: ModelIdentity) -> str:
    """What who asks for a model that is not there is told."""
    return refusal(lambda: models.acquire(model, 1)).code


def upload(models: Models, model: ModelIdentity) -> None:
    models.begin_upload(model)
    models.put(model, package_of(model))
    models.end_upload(model)


def test_account_with_many_claims_has_one_turn_like_others(
    clock: Clock,
) -> None:
    claims = Claims(clock)
    made = [
        Claim(account, 10, since, 1000.0, "")
        for since, account in enumerate(["a", "a", "a", "b", "c", "b"])
    ]
    for claim in reversed(made):
        claims.add(claim)
    order = sorted(made, key=claims.bytes_ahead)
    assert order == [made[n] for n in (0, 3, 4, 1, 5, 2)]
    assert claims.due() is made[0]
    claims.drop(made[0])
    claims.drop(made[0])
    # The account's next one is its first.
    assert claims.due() is made[1]


def test_claim_is_due_some_time_after_it_or_the_one_before(
    clock: Clock,
) -> None:
    claims = Claims(clock)
    first, second = (Claim(a, 10, clock.now, 1000.0, "") for a in "ab")
    claims.add(first)
    claims.add(second)
    clock.now += CLAIM_SECONDS - 0.1
    assert claims.due() is None
    clock.now += 0.1
    assert claims.due() is first
    claims.drop(first, met=True)
    assert claims.due() is None
    clock.now += CLAIM_SECONDS
    assert claims.due() is second


def test_claim_that_nobody_sees_to_lapses(clock: Clock) -> None:
    claims = Claims(clock)
    claims.add(Claim("a", 10, 0.0, clock.now + 1, ""))
    assert len(claims) == 1
    clock.now += 1
    assert len(claims) == 0
    assert claims.due() is None


def test_model_that_waits_is_not_passed_for_ever(
    models: Models, clock: Clock
) -> None:
    small, large = model_of(300), model_of(800, "AUTH_b")
    upload(models, small)
    running = models.acquire(small, 1)
    assert asked(models, large) == "queue_full"
    # Jobs of the model that is there still begin.
    models.acquire(small, 1).release()
    for _ in range(int(2 * CLAIM_SECONDS)):
        clock.now += SEEN_SECONDS / 2
        assert asked(models, large) == "queue_full"
    passed = refusal(lambda: models.acquire(small, 1))
    assert isinstance(passed, UnavailableError)
    assert "waited longer" in passed.message
    assert models.num_claims() == 1
    running.release()
    assert asked(models, large) == "model_needed"
    upload(models, large)
    models.acquire(large, 1).release()
    # It is used for a while; then it is the other one's turn.
    assert asked(models, small) == "model_needed"


def test_upload_that_is_late_gives_its_room_back(
    models: Models, clock: Clock
) -> None:
    small, large = model_of(300), model_of(800, "AUTH_b")
    upload(models, small)
    assert asked(models, large) == "model_needed"
    clock.now += CLAIM_SECONDS
    assert refusal(lambda: models.acquire(small, 1)).code == "queue_full"
    clock.now += GRACE_SECONDS - CLAIM_SECONDS
    models.acquire(small, 1).release()


def test_models_that_fit_beside_the_waiting_one_go_on(
    models: Models, clock: Clock
) -> None:
    tiny, small, large = model_of(100), model_of(300), model_of(800, "AUTH_b")
    upload(models, tiny)
    upload(models, small)
    running = models.acquire(small, 1)
    for _ in range(int(2 * CLAIM_SECONDS) + 1):
        assert asked(models, large) == "queue_full"
        clock.now += SEEN_SECONDS / 2
    running.release()
    models.acquire(tiny, 1)
    assert refusal(lambda: models.acquire(small, 1)).code == "queue_full"
    assert asked(models, large) == "model_needed"


def test_model_that_can_never_come_stops_nobody(
    models: Models, clock: Clock
) -> None:
    small, huge = model_of(300), model_of(1200, "AUTH_b")
    upload(models, small)
    assert asked(models, huge) == "model_needed"
    clock.now += CLAIM_SECONDS
    models.acquire(small, 1).release()
    assert refusal(lambda: models.check_length(huge)).code == "does_not_fit"


def test_next_claim_knows_what_a_sample_needed(models: Models) -> None:
    """The package's length says nothing about working memory."""
    small, other = model_of(3, "AUTH_b"), model_of(985)
    upload(models, other)
    models.acquire(other, 1).release()
    upload(models, small)
    models.acquire(small, 1)
    # 985 and 10 of working memory do not fit beside the 13 of the other.
    assert asked(models, other) == "queue_full"


def test_model_that_came_is_there_when_its_job_comes(
    models: Models,
) -> None:
    """Though others want its room as working memory."""
    small, large = model_of(50), model_of(945, "AUTH_b")
    upload(models, small)
    assert asked(models, large) == "model_needed"
    upload(models, large)
    assert refusal(lambda: models.acquire(small, 1)).code == "queue_full"
    models.acquire(large, 1).release()
    upload(models, small)
    models.acquire(small, 1)


def test_claim_grows_to_what_a_sample_is_found_to_need(
    models: Models, clock: Clock
) -> None:
    room = Room(lambda digest: models.residencies, clock)
    model = model_of(300)
    for needed in (300, 700, 500, 1300):
        room.claim(model, "", needed)
    [residency] = models.residencies
    other = Claim("AUTH_b", 10, clock.now, clock.now + 1, "")
    residency.claims.add(other)
    assert len(residency.claims) == 2
    assert residency.claims.bytes_ahead(other) == residency.limit_bytes


def test_who_waits_for_room_is_told_to_upload_when_there_is_some(
    models: Models,
) -> None:
    small, large = model_of(300), model_of(800, "AUTH_b")
    upload(models, small)
    running = models.acquire(small, 1)
    timer = threading.Timer(0.2, running.release)
    timer.start()
    with pytest.raises(ConflictError) as needed:
        models.await_model(large, room_seconds=30.0)
    assert needed.value.code == "model_needed"
    timer.join()
