"""Accounts that use one worker at the same time, and their fair shares.

In each round every kind of account works alone, which gives its demand, and
then all work at once.  Costs are the CPU seconds of decoding and of forward
passes in the streams' timings.  The fair share of an account is its max-min
share of the worker's capacity, by its weight.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.micro.fair_shares import jain_index, max_min_shares
from benchmarks.ratios import rate_between, summary
from benchmarks.testbed.remote import Remote
from benchmarks.testbed.worker_process import (
    ask_all,
    package_model,
    running_worker,
    stream_client,
)
from hapi_protocol.job_messages import UNAUTHENTICATED_ACCOUNT

OWNER = "AUTH_owner"
"""Account of the model and the photographs."""
MODEL, FREEZE = "resnet18", "avgpool"
MIN_RATIO = 0.90
MIN_JAIN = 0.95
WARM_SECONDS = 3.0
QUESTION_SECONDS = 300.0
GREEDY_STREAMS, MODEST_STREAMS = 16, 2

Rates = dict[str, dict[str, float]]
"""``samples``, ``cost`` and ``refused`` of each account, per second."""


@dataclass(frozen=True)
class Account:
    """An account that keeps a number of streams busy.

    The goal applies to ``guarded`` ones.
    """

    name: str
    streams: int
    weight: float = 1.0
    guarded: bool = True


@dataclass(frozen=True)
class Scenario:
    """Accounts that compete; options of their worker follow from weights."""

    name: str
    accounts: tuple[Account, ...]

    @property
    def options(self) -> tuple[str, ...]:
        """Lines of the worker's configuration."""
        weights = ", ".join(
            f"{account.name}={account.weight:g}"
            for account in self.accounts
            if account.weight != 1.0
        )
        return (f"account_weights = {weights}",) if weights else ()


def _modest(*weights: float) -> list[Account]:
    names = ("AUTH_a", "AUTH_b", "AUTH_c")
    return [
        Account(name, MODEST_STREAMS, weight)
        for name, weight in zip(names, weights, strict=True)
    ]


def _crowd(name: str, weight: float = 1.0) -> Account:
    return Account(name, GREEDY_STREAMS, weight, guarded=False)


SCENARIOS = (
    Scenario("greedy", (_crowd("AUTH_greedy"), *_modest(1.0, 1.0, 1.0))),
    Scenario("weights", (_crowd("AUTH_greedy"), *_modest(4.0, 2.0, 1.0))),
    Scenario(
        "anonymous",
        (
            Account(OWNER, MODEST_STREAMS),
            _crowd(UNAUTHENTICATED_ACCOUNT, 0.25),
        ),
    ),
)


@dataclass
class Contention:
    """Measures a scenario with a worker of its own.

    ``seconds`` of each phase are counted, after some for warming up.
    """

    scenario: Scenario
    folder: Path
    shard: Path
    rounds: int
    seconds: float

    def run(self) -> dict[str, Any]:
        """The scenario's entry in the results."""
        package, cut = package_model(self.folder, MODEL, FREEZE)
        with ExitStack() as stack:
            path = stack.enter_context(
                running_worker(self.folder, "cpu", self.scenario.options)
            )
            clients = {
                account.name: stack.enter_context(stream_client(account.name))
                for account in self.scenario.accounts
            }
            for name, client in clients.items():
                client.ask(
                    "open",
                    seconds=QUESTION_SECONDS,
                    path=str(path),
                    account=name,
                    package=str(package),
                    shard=str(self.shard),
                    cut=cut,
                    encoding="float32",
                    owner=OWNER,
                )
            rounds = [self._round(n, clients) for n in range(self.rounds)]
        return judge(self.scenario, rounds)

    def _round(
        self, number: int, clients: Mapping[str, Remote]
    ) -> dict[str, Any]:
        accounts = self.scenario.accounts
        kinds = {account.streams: account for account in reversed(accounts)}
        phases: list[tuple[Account, ...]] = [
            *((kind,) for kind in kinds.values()),
            accounts,
        ]
        if number % 2:
            phases.reverse()
        rates = {phase: self._phase(phase, clients) for phase in phases}
        alone = {
            account.name: rates[(kinds[account.streams],)][
                kinds[account.streams].name
            ]
            for account in accounts
        }
        return {"alone": alone, "together": rates[accounts]}

    def _phase(
        self, accounts: tuple[Account, ...], clients: Mapping[str, Remote]
    ) -> Rates:
        begin = time.monotonic() + 0.5
        counted = begin + WARM_SECONDS
        end = counted + self.seconds
        asked = {clients[tenant.name]: tenant for tenant in accounts}

        def run(client: Remote) -> Any:
            return client.ask(
                "run",
                seconds=QUESTION_SECONDS,
                begin=begin,
                end=end,
                streams=asked[client].streams,
            )

        rates = {
            account.name: {
                "samples": rate_between([done["progress"]], counted, end),
                "cost": rate_between([done["costs"]], counted, end),
                "refused": done["refused"],
            }
            for account, done in zip(
                accounts, ask_all(list(asked), run), strict=True
            )
        }
        shown = ", ".join(f"{k} {v['samples']:.1f}" for k, v in rates.items())
        print(f"{self.scenario.name}: {shown} samples/s", flush=True)
        return rates


def shares_of(
    accounts: Sequence[Account], trial: Mapping[str, Rates]
) -> tuple[float, dict[str, float]]:
    """Capacity of the worker in a round, and each account's fair share.

    The capacity is what all had together, or one alone if that was more, so
    that losses between accounts count against the worker.
    """
    demands = {a.name: trial["alone"][a.name]["cost"] for a in accounts}
    together = sum(rates["cost"] for rates in trial["together"].values())
    capacity = max(together, *demands.values())
    weights = {a.name: a.weight for a in accounts}
    return capacity, max_min_shares(demands, capacity, weights)


def judge(
    scenario: Scenario, rounds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Ratios of each account's cost to its share, and Jain's index."""
    by_trial = [shares_of(scenario.accounts, trial) for trial in rounds]
    entries = []
    for account in scenario.accounts:
        together = [trial["together"][account.name] for trial in rounds]
        shares = [share[account.name] for _, share in by_trial]
        ratios = [
            had["cost"] / share
            for had, share in zip(together, shares, strict=True)
        ]
        entries.append(
            {
                "account": account.name,
                "streams": account.streams,
                "weight": account.weight,
                "guarded": account.guarded,
                "samples_per_second": statistics.median(
                    had["samples"] for had in together
                ),
                "share": statistics.median(shares),
                "ratio": summary(ratios),
                "ratios": ratios,
                "refused": sum(int(had["refused"]) for had in together),
            }
        )
    jain = summary(
        [
            jain_index([entry["ratios"][number] for entry in entries])
            for number in range(len(rounds))
        ]
    )
    return {
        "scenario": scenario.name,
        "capacity": statistics.median(capacity for capacity, _ in by_trial),
        "jain": jain,
        "accounts": entries,
        "met": jain["median"] >= MIN_JAIN
        and all(
            entry["ratio"]["median"] >= MIN_RATIO
            for entry in entries
            if entry["guarded"]
        ),
        "rounds": list(rounds),
    }
