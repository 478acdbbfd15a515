"""How long tenants with different models take together, and one by one.

All have their models in the same warm worker.  In each round each tenant does
its piece of work alone, one after the other, and then all do it at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contention import ENCODING
from benchmarks.regret import interval_of
from benchmarks.remote import Remote
from benchmarks.worker_process import (
    at_once,
    client_process,
    package_model,
    running_worker,
)

MODELS = {
    "mobilenet_v3_small": "avgpool",
    "resnet18": "avgpool",
    "squeezenet1_1": "features",
    "shufflenet_v2_x0_5": "conv5",
    "mnasnet0_5": "layers",
    "regnet_y_400mf": "avgpool",
}
"""Names of torchvision's, and the module after which the features are."""
NUM_TENANTS = 10
STREAMS = 2
MAX_RATIO = 1.05
LIMIT_SECONDS = 900.0
"""For what one tenant has to do, alone or beside others."""
GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Tenant:
    name: str
    model: str


def tenants() -> list[Tenant]:
    """Ten accounts; some have the same model as another."""
    names = list(MODELS)
    return [
        Tenant(f"AUTH_tenant{number}", names[number % len(names)])
        for number in range(NUM_TENANTS)
    ]


@dataclass
class Makespan:
    """Measures it.

    Args:
        folder: of packages, shard and worker.
        shard: tar of photographs.
        options: of the worker.
        rounds: two or more.
        shards: that each tenant reads, in each round, twice.
    """

    folder: Path
    shard: Path
    options: Sequence[str]
    rounds: int
    shards: int

    def run(self) -> dict[str, Any]:
        """The entry in the results."""
        packages = {
            name: package_model(self.folder, name, freeze)
            for name, freeze in MODELS.items()
        }
        every = tenants()
        with ExitStack() as stack:
            path = stack.enter_context(
                running_worker(self.folder, "cpu", self.options)
            )
            clients = open_tenants(stack, every, packages, path, self.shard)
            for client in clients:
                _work([client], 1)
            rounds = [self._round(n, clients) for n in range(self.rounds)]
        return judge(every, rounds)

    def _round(self, number: int, clients: Sequence[Remote]) -> dict[str, Any]:
        if number % 2:
            together = _work(clients, self.shards)
            solos = [_work([each], self.shards) for each in clients]
        else:
            solos = [_work([each], self.shards) for each in clients]
            together = _work(clients, self.shards)
        found = {
            "solo": [each["seconds"] for each in solos],
            "together": together["seconds"],
            "samples": [each["samples"][0] for each in solos],
            "refused": together["refused"],
        }
        print(
            f"makespan: {found['together']:.1f} s together,"
            f" {sum(found['solo']):.1f} s one by one",
            flush=True,
        )
        return found


def open_tenants(
    stack: ExitStack,
    every: Sequence[Tenant],
    packages: Mapping[str, tuple[Path, int]],
    path: Path,
    shard: Path,
) -> list[Remote]:
    """A client for each tenant, its model uploaded.

    Args:
        stack: ends the clients.
        every: tenants.
        packages: file and number of cuts of each model.
        path: of the worker's socket.
        shard: tar of photographs.
    """
    clients = []
    for tenant in every:
        client = stack.enter_context(client_process(tenant.name))
        package, cut = packages[tenant.model]
        client.ask(
            "open",
            seconds=LIMIT_SECONDS,
            path=str(path),
            account=tenant.name,
            package=str(package),
            shard=str(shard),
            cut=cut,
            encoding=ENCODING,
        )
        clients.append(client)
    return clients


def _work(clients: Sequence[Remote], shards: int) -> dict[str, Any]:
    """Seconds from the common begin to the last sample of all."""
    begin = time.monotonic() + 0.2

    def work(client: Remote) -> Any:
        return client.ask(
            "work",
            seconds=LIMIT_SECONDS + GRACE_SECONDS,
            begin=begin,
            streams=STREAMS,
            shards=shards,
            limit=LIMIT_SECONDS,
        )

    done = at_once(clients, work)
    return {
        "seconds": max(each["progress"][-1][0] for each in done) - begin,
        "samples": [each["progress"][-1][1] for each in done],
        "refused": sum(each["refused"] for each in done),
    }


def judge(
    every: Sequence[Tenant], rounds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What the rounds say."""
    ratios = [each["together"] / sum(each["solo"]) for each in rounds]
    ratio = statistics.median(ratios)
    return {
        "scenario": "makespan",
        "makespan_seconds": statistics.median(r["together"] for r in rounds),
        "solo_seconds": statistics.median(sum(r["solo"]) for r in rounds),
        "ratio": ratio,
        "interval": interval_of(ratios, np.median),
        "refused": sum(each["refused"] for each in rounds),
        "tenants": [
            {
                "account": tenant.name,
                "model": tenant.model,
                "samples": rounds[0]["samples"][number],
                "solo_seconds": statistics.median(
                    each["solo"][number] for each in rounds
                ),
            }
            for number, tenant in enumerate(every)
        ],
        "goal": {"ratio": MAX_RATIO},
        "met": ratio <= MAX_RATIO,
        "rounds": list(rounds),
    }


def report(entry: Mapping[str, Any]) -> str:
    """One line."""
    low, high = entry["interval"]
    return (
        f"makespan: {len(entry['tenants'])} tenants take"
        f" {entry['makespan_seconds']:.1f} s together and"
        f" {entry['solo_seconds']:.1f} s one by one: {entry['ratio']:.3f}"
        f" ({low:.3f} to {high:.3f}), goal at most {entry['goal']['ratio']};"
        f" {'met' if entry['met'] else 'missed'};"
        f" {entry['refused']} refused"
    )
