"""Tenants of their own accounts, and a second proxy, on one testbed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from benchmarks.remote import Remote
from benchmarks.storage_tier import BATCH_SAMPLES, BATCHES
from benchmarks.suite.data_sets import SECONDS, store
from benchmarks.suite.many_tenants import (
    Tenant,
    tenants_of,
    upload,
    with_accounts,
)
from benchmarks.suite.second_proxy import second_proxy
from benchmarks.suite.together import (
    Span,
    Trainer,
    client_process,
    phase,
)
from benchmarks.testbed import Testbed, two_tiers

from hapi_client.model.frozen_region import FREEZE
from photos import shard

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two tiers need two cores"
)
SAMPLES = 12


@pytest.fixture(scope="module")
def tenants() -> list[Tenant]:
    return tenants_of(2)


@pytest.fixture(scope="module")
def bed(tenants: list[Tenant]) -> Iterator[Testbed]:
    with two_tiers(netns=False, **with_accounts(tenants)) as running:
        yield running


def ask(client: Remote, do: str, **arguments: Any) -> Any:
    return client.ask(do, seconds=SECONDS, **arguments)


def computed(bed: Testbed) -> float:
    """Samples so far, by the worker of the first proxy."""
    return sum(
        value
        for name, value in bed.worker_counters().items()
        if name.startswith("hapi_worker_samples_total")
    )


@pytest.mark.timeout(300)
def test_tenants_train_at_proxies_of_their_own(
    bed: Testbed, tenants: list[Tenant], tmp_path: Path
) -> None:
    tar = tmp_path / "photos.tar"
    tar.write_bytes(shard(SAMPLES // 2))
    place = store(bed, [tar], "photos", SAMPLES, SAMPLES // 2)
    with ExitStack() as stack:
        proxy = stack.enter_context(
            second_proxy(bed, bed.storage, {"max_batch": "4"})
        )
        clients = [
            stack.enter_context(
                client_process(bed.client, {**each.environment, **more})
            )
            for each, more in zip(
                tenants, ({}, proxy.environment), strict=True
            )
        ]
        for client in clients:
            upload(client, bed, place)
            ask(client, "index", container=place.container)
            ask(
                client,
                "prepare",
                model="resnet18",
                freeze="layer2",
                container=place.container,
                floor="lossless",
                epochs=None,
            )
            ask(client, "open", name="job", cut=FREEZE)
            assert ask(client, "package_bytes", name="job") > 0
        found = phase(
            bed,
            [Trainer(each, {"name": "job"}) for each in clients],
            epoch=0,
            span=Span(0.0, 1.5),
            storage=proxy.sessions,
            workers=[proxy.worker_counters],
        )
        assert len(found["each"]) == 2
        assert found["samples_per_second"] > 0
        assert found["storage_cores"] > 0
        # None where a busy machine has computed nothing meanwhile.
        assert found["worker_batch"] is None or found["worker_batch"] <= 4
        for client, of_first_worker in zip(clients, (SAMPLES, 0), strict=True):
            before = computed(bed)
            done = ask(client, "run", name="job", epoch=1)
            assert done["fallbacks"] == 0
            assert computed(bed) == before + of_first_worker
        passes = proxy.worker_counters()
        assert passes[BATCHES] >= SAMPLES / 4
        assert passes[BATCH_SAMPLES] <= 4 * passes[BATCHES]
        ask(clients[0], "forget_packages")
        ask(clients[0], "open", name="again", cut=FREEZE)
        assert ask(clients[0], "package_bytes", name="again") > 0
