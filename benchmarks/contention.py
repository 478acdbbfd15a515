"""What accounts get of one worker together, and what each is due.

In each round every kind of account works alone, which is its demand, and then
all work at once.  Cost is what the worker is busy with: CPU seconds of
decoding and of forward passes, as the timings of the streams have them.  One
is due its max-min fair share of the worker's capacity, by its weight.
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
from benchmarks.regret import interval_of
from benchmarks.remote import Remote
from benchmarks.shares import jain_index, max_min_shares
from benchmarks.tenants import rate_of
from benchmarks.worker_process import (
    at_once,
    client_process,
    package_model,
    running_worker,
)

from hapi_protocol.job_messages import UNAUTHENTICATED_ACCOUNT

OWNER = "AUTH_owner"
"""Of the model and the photographs."""
MIN_RATIO = 0.90
MIN_JAIN = 0.95
WARM_SECONDS = 3.0
ASK_SECONDS = 300.0
ENCODING = "float32"
FREEZE = "avgpool"

Rates = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Account:
    """One that keeps streams busy.

    Attributes:
        name: that is charged.
        streams: that it asks for, always as many.
        weight: of its share.
        guarded: whether the goal is about it.
    """

    name: str
    streams: int
    weight: float = 1.0
    guarded: bool = True


@dataclass(frozen=True)
class Scenario:
    """Accounts that meet.

    Attributes:
        options: of the worker, beside those of the command.
    """

    name: str
    accounts: tuple[Account, ...]
    options: tuple[str, ...] = ()


def scenarios(greedy: int, modest: int) -> dict[str, Scenario]:
    """All there are.

    Args:
        greedy, modest: streams of an account.
    """
    flood = Account(UNAUTHENTICATED_ACCOUNT, greedy, guarded=False)
    light = Account(UNAUTHENTICATED_ACCOUNT, greedy, 0.25, guarded=False)
    crowd = Account("AUTH_greedy", greedy, guarded=False)
    equal = (crowd, *_modest(modest, (1.0, 1.0, 1.0)))
    weighted = (crowd, *_modest(modest, (4.0, 2.0, 1.0)))
    found = [
        Scenario("greedy", equal),
        Scenario("weights", weighted, (weights_option(weighted),)),
        Scenario("anonymous", (Account(OWNER, modest), flood)),
        Scenario(
            "anonymous-weighted",
            (Account(OWNER, modest), light),
            (weights_option([light]),),
        ),
    ]
    return {each.name: each for each in found}


def _modest(streams: int, weights: Sequence[float]) -> list[Account]:
    names = ("AUTH_a", "AUTH_b", "AUTH_c")
    return [
        Account(name, streams, weight)
        for name, weight in zip(names, weights, strict=True)
    ]


def weights_option(accounts: Sequence[Account]) -> str:
    """The worker's option for the weights that are not the usual one."""
    weights = ", ".join(
        f"{each.name}={each.weight:g}"
        for each in accounts
        if each.weight != 1.0
    )
    return f"account_weights = {weights}"


@dataclass
class Contention:
    """Measures one scenario.

    Args:
        scenario: the accounts.
        folder: of package, shard and worker.
        shard: tar of photographs.
        model: a name of torchvision's.
        options: of the worker.
        rounds: two or more.
        seconds: that are counted of each phase.
    """

    scenario: Scenario
    folder: Path
    shard: Path
    model: str
    options: Sequence[str]
    rounds: int
    seconds: float

    def run(self) -> dict[str, Any]:
        """The scenario's entry in the results."""
        package, cut = package_model(self.folder, self.model, FREEZE)
        accounts = self.scenario.accounts
        options = [*self.scenario.options, *self.options]
        with ExitStack() as stack:
            path = stack.enter_context(
                running_worker(self.folder, "cpu", options)
            )
            clients = {
                each.name: stack.enter_context(client_process(each.name))
                for each in accounts
            }
            for name, client in clients.items():
                client.ask(
                    "open",
                    seconds=ASK_SECONDS,
                    path=str(path),
                    account=name,
                    package=str(package),
                    shard=str(self.shard),
                    cut=cut,
                    encoding=ENCODING,
                    owner=OWNER,
                )
            rounds = [self._round(n, clients) for n in range(self.rounds)]
        return judge(self.scenario, rounds)

    def _round(
        self, number: int, clients: Mapping[str, Remote]
    ) -> dict[str, Any]:
        accounts = self.scenario.accounts
        kinds = {each.streams: each for each in reversed(accounts)}
        phases: list[tuple[Account, ...]] = [
            *((each,) for each in kinds.values()),
            accounts,
        ]
        if number % 2:
            phases.reverse()
        found = {each: self._phase(each, clients) for each in phases}
        alone = {
            each.name: found[(kinds[each.streams],)][kinds[each.streams].name]
            for each in accounts
        }
        return {"alone": alone, "together": found[accounts]}

    def _phase(
        self, accounts: tuple[Account, ...], clients: Mapping[str, Remote]
    ) -> Rates:
        begin = time.monotonic() + 0.5
        counted = begin + WARM_SECONDS
        end = counted + self.seconds
        asked = {clients[each.name]: each for each in accounts}

        def run(client: Remote) -> Any:
            return client.ask(
                "run",
                seconds=ASK_SECONDS,
                begin=begin,
                end=end,
                streams=asked[client].streams,
            )

        found = {
            account.name: {
                "samples": rate_of([done["progress"]], counted, end),
                "work": rate_of([done["costs"]], counted, end),
                "refused": done["refused"],
            }
            for account, done in zip(
                accounts, at_once(list(asked), run), strict=True
            )
        }
        self._note(found)
        return found

    def _note(self, found: Rates) -> None:
        shown = ", ".join(
            f"{name} {rates['samples']:.1f} samples/s"
            f" ({rates['work']:.2f} s of work/s)"
            for name, rates in found.items()
        )
        print(f"{self.scenario.name}: {shown}", flush=True)


def due(
    accounts: Sequence[Account], each: Mapping[str, Rates]
) -> tuple[float, dict[str, float]]:
    """Capacity of the worker in a round, and each account's share.

    The capacity is what all together had, or one alone if that was more: what
    is lost between the accounts is no excuse.

    Args:
        accounts: of the scenario.
        each: the round.
    """
    demands = {a.name: each["alone"][a.name]["work"] for a in accounts}
    capacity = max(_used(each), *demands.values())
    weights = {a.name: a.weight for a in accounts}
    return capacity, max_min_shares(demands, capacity, weights)


def _used(each: Mapping[str, Rates]) -> float:
    return sum(rates["work"] for rates in each["together"].values())


def judge(
    scenario: Scenario, rounds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What the rounds say."""
    accounts = scenario.accounts
    dues = [due(accounts, each) for each in rounds]
    entries = [
        _entry(account, rounds, [share[account.name] for _, share in dues])
        for account in accounts
    ]
    jains = [
        jain_index([entry["ratios"][number] for entry in entries])
        for number in range(len(rounds))
    ]
    jain = statistics.median(jains)
    return {
        "scenario": scenario.name,
        "capacity": statistics.median(capacity for capacity, _ in dues),
        "used": statistics.median(map(_used, rounds)),
        "jain": jain,
        "jain_interval": interval_of(jains, np.median),
        "accounts": entries,
        "goal": {"ratio": MIN_RATIO, "jain": MIN_JAIN},
        "met": jain >= MIN_JAIN
        and all(
            entry["ratio"] >= MIN_RATIO
            for entry in entries
            if entry["guarded"]
        ),
        "rounds": list(rounds),
    }


def _entry(
    account: Account,
    rounds: Sequence[Mapping[str, Rates]],
    shares: Sequence[float],
) -> dict[str, Any]:
    alone = [each["alone"][account.name] for each in rounds]
    together = [each["together"][account.name] for each in rounds]
    ratios = [
        had["work"] / share
        for had, share in zip(together, shares, strict=True)
    ]
    return {
        "account": account.name,
        "streams": account.streams,
        "weight": account.weight,
        "guarded": account.guarded,
        "samples_per_second": _median(together, "samples"),
        "work_per_second": _median(together, "work"),
        "demand": _median(alone, "work"),
        "demand_samples_per_second": _median(alone, "samples"),
        "share": statistics.median(shares),
        "ratio": statistics.median(ratios),
        "interval": interval_of(ratios, np.median),
        "ratios": ratios,
        "refused": sum(int(had["refused"]) for had in together),
    }


def _median(found: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(each[key] for each in found)


def report(entry: Mapping[str, Any]) -> str:
    """A line for the scenario, and one for each account."""
    low, high = entry["jain_interval"]
    goal = entry["goal"]
    lines = [
        f"{entry['scenario']}: capacity {entry['capacity']:.2f} s of work/s,"
        f" {entry['used']:.2f} used; Jain's index {entry['jain']:.3f}"
        f" ({low:.3f} to {high:.3f}), goal {goal['jain']};"
        f" {'met' if entry['met'] else 'missed'}"
    ]
    for each in entry["accounts"]:
        low, high = each["interval"]
        wanted = f", goal {goal['ratio']}" if each["guarded"] else ""
        lines.append(
            f"  {each['account']} ({each['streams']} streams, weight"
            f" {each['weight']:g}): {each['samples_per_second']:.1f}"
            f" samples/s (alone {each['demand_samples_per_second']:.1f}),"
            f" {each['work_per_second']:.2f} s of work/s, due"
            f" {each['share']:.2f}: {each['ratio']:.3f} ({low:.3f} to"
            f" {high:.3f}){wanted}; {each['refused']} refused"
        )
    return "\n".join(lines)
