"""One cell of the whole runs: contenders that start from cold, in turn."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.experiments.run_summary import (
    AUTO_CACHED,
    AUTO_DISK,
    CACHED,
    LOCAL_FEATURES,
    auto_for,
    repeated,
    summarise,
)
from benchmarks.opponents.training import Place
from benchmarks.ratios import rotated
from benchmarks.suite.calibration import calibrate
from benchmarks.suite.contenders import (
    AUTO,
    FREEZE,
    RESIZED,
    STREAM,
    TAR_STREAM,
    Opponent,
    Ours,
    ask,
    start,
)
from benchmarks.suite.experiment import Context
from benchmarks.suite.together import client_processes
from benchmarks.suite.workloads import Link, Workload, cell_name
from benchmarks.testbed.remote import Remote
from benchmarks.testbed.two_tiers import Testbed
from hapi_protocol.headers import CACHE_OFF, CACHE_READWRITE

COUNTS = (1, 5, 20)
"""Epochs of a whole run."""
EPOCH_SECONDS = 15.0
"""Length of an epoch of streaming over the cell's link; a shorter run would
stream without a plan."""
MAX_ROUNDS, QUICK_ROUNDS = 3, 1
EPOCHS: Mapping[str, int] = MappingProxyType(
    {
        TAR_STREAM: 3,
        "webdataset": 3,
        "mosaic": 5,
        LOCAL_FEATURES: 5,
        RESIZED: 3,
    }
)
"""Measured epochs of the opponents; few if all read from the network."""


@dataclass(frozen=True)
class OurRun:
    """Options of a job that plans for some epochs, and runs them.

    It caches features in memory, as jobs do by default, if ``is_local``.
    """

    cut: str
    epochs: int
    cache: str = CACHE_OFF
    is_local: bool = False


TIERS: Mapping[str, OurRun] = MappingProxyType(
    {
        STREAM: OurRun(STREAM, 3),
        AUTO_DISK: OurRun(AUTO, 3),
        AUTO_CACHED: OurRun(AUTO, 3, CACHE_READWRITE),
        CACHED: OurRun(FREEZE, 3, CACHE_READWRITE),
    }
)


@dataclass(frozen=True)
class Cell:
    """Definition of one cell.

    Attributes:
        link: a multiple of the saturating rate.
        epoch_seconds: of streaming.
        samples: of the data set, instead of ``epoch_seconds``.
        ranks: processes of each contender; they share the client's core.
        has_tiers: streaming and caches on disk and in the store are measured.
    """

    workload: Workload
    link: float
    counts: Sequence[int] = COUNTS
    rounds: int = MAX_ROUNDS
    opponents: Sequence[str] = tuple(EPOCHS)
    epoch_seconds: float = EPOCH_SECONDS
    samples: int | None = None
    ranks: int = 1
    has_tiers: bool = False

    def name(self, link: Link) -> str:
        name = cell_name(self.workload, link)
        if self.samples is not None:
            name += f"/{self.samples}-samples"
        return name if self.ranks == 1 else f"{name}/{self.ranks}-ranks"

    @property
    def ours(self) -> Mapping[str, OurRun]:
        """Jobs of HAPI."""
        whole = {
            auto_for(count): OurRun(AUTO, count, is_local=True)
            for count in self.counts
        }
        return {**whole, **(TIERS if self.has_tiers else {})}


@dataclass
class RunsCell:
    """Measures one cell.

    ``cleaner`` is a client process that does not train.
    """

    bed: Testbed
    context: Context
    cell: Cell
    place: Place
    cleaner: Remote

    def run(self, entry: dict[str, Any]) -> None:
        """Fills the cell's entry."""
        absent = self.context.section["absent"]
        planned = {
            name: rival.epochs for name, rival in self.cell.ours.items()
        }
        for name in self.cell.opponents:
            if name not in absent:
                planned[name] = EPOCHS[name]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in planned}
        entry["runs"] = runs
        rounds = min(self.context.rounds, self.cell.rounds)
        for number in range(QUICK_ROUNDS if self.context.quick else rounds):
            names = [name for name, epochs in planned.items() if epochs]
            for name in rotated(names, number):
                runs[name].append(self._cold_run(name, planned[name]))
                self.context.save()
            if not number:
                planned = repeated(runs, self.cell.counts)
        entry |= summarise(runs, self.cell.counts)
        entry["complete"] = True

    def calibrate(self, link: Link) -> dict[str, Any]:
        """Sets the link; see :mod:`benchmarks.suite.calibration`."""
        with start(self.bed, TAR_STREAM) as remote:
            opponent = Opponent(self.bed, TAR_STREAM, remote)
            self._prepare(opponent)
            return calibrate(self.bed, opponent, link)

    def _cold_run(self, name: str, epochs: int) -> dict[str, Any]:
        """A run from its start, without anything of an earlier one."""
        self.bed.restart_worker()
        ask(self.cleaner, "clear_store")
        shutil.rmtree(self.place.cache_folder, ignore_errors=True)
        if name == AUTO_DISK:
            run = self._run(name, 1)
            run["epochs"] += self._run(name, epochs - 1)["epochs"]
        else:
            run = self._run(name, epochs)
        seconds = [epoch["seconds"] for epoch in run["epochs"]]
        self.context.note(
            f"{self.cell.workload.name}: {name}:"
            f" {run['before']['seconds']:.1f} + "
            + " ".join(f"{value:.1f}" for value in seconds)
            + " s"
        )
        for epoch in run["epochs"]:
            if epoch["samples"] != self.place.num_samples:
                raise ValueError(
                    f"{name}: {epoch['samples']} samples in an epoch of"
                    f" {self.place.num_samples}"
                )
        if name == CACHED and not run["epochs"][-1]["cached"]:
            raise ValueError(f"{name}: its last epoch found no cached sample")
        return run

    def _run(self, name: str, epochs: int) -> dict[str, Any]:
        """A run in new processes, one for each rank."""
        with contextlib.ExitStack() as stack:
            is_ours = name in self.cell.ours
            start_ranks = self._ours if is_ours else self._theirs
            ranks, opens = zip(*start_ranks(stack, name), strict=True)
            began = time.monotonic()
            together(opens)
            run: dict[str, Any] = {
                "before": {"seconds": time.monotonic() - began},
                "epochs": [],
            }
            if is_ours:
                run["before"]["package_bytes"] = ask(
                    ranks[0].client, "package_bytes", name=name
                )
            for epoch in range(epochs):
                measured = together(
                    [partial(x.epochs, epoch, 1) for x in ranks]
                )
                run["epochs"].append(merged([epoch for [epoch] in measured]))
            if is_ours:
                plan = ask(ranks[0].client, "plan", name=name)
                run["plan"] = plan["label"]
            return run

    def _ours(self, stack: contextlib.ExitStack, name: str) -> Iterator[Any]:
        """A job in each rank, and what opens it."""
        count = self.cell.ranks
        environments = [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "TORCHELASTIC_RUN_ID": name,
            }
            for rank in range(count)
        ]
        for client in stack.enter_context(
            client_processes(self.bed, environments)
        ):
            ask(client, "ready")
            yield (
                Ours(self.bed, client, name),
                partial(self._open, client, name),
            )

    def _open(self, client: Remote, name: str) -> None:
        options, workload = self.cell.ours[name], self.cell.workload
        settings = self._options(TAR_STREAM)
        ask(
            client,
            "prepare",
            model=workload.model,
            freeze=workload.freeze_module,
            container=self.place.container,
            floor="lossless",
            epochs=options.epochs,
            channels_last=settings.get("channels_last", False),
        )
        ask(
            client,
            "open",
            name=name,
            cut=options.cut,
            store_cache=options.cache,
            cache_memory_bytes=None if options.is_local else 0,
            cache_directory=f"{self.place.cache_folder}/features"
            if name == AUTO_DISK
            else None,
            # Empty before each run; ranks share what the first one splits.
            split_directory=f"{self.place.cache_folder}/splits",
        )

    def _theirs(self, stack: contextlib.ExitStack, name: str) -> Iterator[Any]:
        """An opponent in each rank, and what prepares it."""
        for rank in range(self.cell.ranks):
            remote = stack.enter_context(start(self.bed, name))
            opponent = Opponent(self.bed, name, remote)
            yield opponent, partial(self._prepare, opponent, rank)

    def _prepare(self, opponent: Opponent, rank: int = 0) -> None:
        """Gives an opponent its part of the shards and of each batch."""
        options = self._options(opponent.name) or opponent.grid[0]
        task, place = self.cell.workload.task, self.place
        shards = place.shards[rank :: self.cell.ranks]
        size = place.num_samples // len(place.shards)
        opponent.prepare(
            replace(task, batch_size=task.batch_size // self.cell.ranks),
            replace(place, shards=shards, num_samples=len(shards) * size),
            options,
        )

    def _options(self, name: str) -> Mapping[str, Any]:
        """Settings of an opponent; empty if it was not tuned."""
        settings = self.context.section["opponents"]
        tuned = settings.get(self.cell.workload.model, {}).get(name, {})
        options: Mapping[str, Any] = tuned.get("options", {})
        return options


def together(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls all at the same time; returns their results in order."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(lambda act: act(), acts))


def merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An epoch of all ranks: it ends with the slowest."""
    if len(ranks) == 1:
        return ranks[0]
    return {
        "seconds": max(rank["seconds"] for rank in ranks),
        "samples": sum(rank["samples"] for rank in ranks),
        "ranks": list(ranks),
    }
