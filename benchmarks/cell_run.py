"""One cell: calibration, warm-up, interleaved rounds, runs from cold."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell
from benchmarks.contenders import Outlook, Static, who_measures
from benchmarks.regret import (
    AUTO,
    STREAM,
    Regret,
    best_static,
    judge,
    medians,
    regret_of,
)
from benchmarks.remote import Remote
from benchmarks.shards import write_shards
from benchmarks.testbed import Testbed

CLIENT = "benchmarks.client_tier"
AGAIN = "again"
"""The second pass of one contender in each round: the noise floor."""

CALIBRATION_PASSES = 2
OUT_OF_REACH = 0.75
"""A static cut slower than this part of the best is measured once."""
STREAM_OUT_OF_REACH = 0.5
"""Streaming slower than this part of the best is measured twice."""

SETTLED_SECONDS = 12.0
"""A plan that stayed this long, two looks at it, is taken to stay."""
QUESTION_SECONDS = 1800.0


@dataclass(frozen=True)
class Settings:
    """What all cells of one result have in common.

    Attributes:
        rounds: measured passes of each contender.
        floor: of the encodings.
        scale: of the number of samples of a pass.
        cold_epochs: of a run from cold; 0 leaves these out.
        cold_upload_seconds: a static cut whose package takes longer to
            send is not run from cold.
        most_settling_seconds: for the plan, before the first round.
        thorough: whether more fixed cuts are looked for than the planner
            takes, and one contender has a second pass in each round (but
            for slow links, where passes are long and even).
        tars: names of the files that the samples come from.
    """

    rounds: int
    floor: str
    scale: float
    cold_epochs: int
    cold_upload_seconds: float
    most_settling_seconds: float
    thorough: bool
    tars: Sequence[str]


@dataclass
class CellRun:
    """Measures one cell.

    Args:
        bed: the testbed.
        cell: what to measure.
        settings: how.
        tars: files to make the data set from.
        note: told of the progress, a line at a time.
        save: told the cell's entry after each round.
    """

    bed: Testbed
    cell: Cell
    settings: Settings
    tars: Sequence[Any]
    note: Callable[[str], None]
    save: Callable[[dict[str, Any]], None]
    entry: dict[str, Any] = field(default_factory=dict)
    _link: float | None = None
    _package_bytes: int = 0

    def run(self) -> dict[str, Any]:
        """The cell's entry in the results."""
        started = time.monotonic()
        self.entry = {
            "name": self.cell.name,
            "model": self.cell.model,
            "freeze": self.cell.freeze,
            "freeze_module": self.cell.freeze_module,
            "link": self.cell.link,
            "samples": self._num_samples,
            "complete": False,
        }
        with self.bed.client.remote(CLIENT) as client:
            self._prepare(client)
            found = self._calibrate(client)
            names = self._warm_up(client, found)
            self._measure(client, names)
        self._judge()
        if self.settings.cold_epochs:
            self.entry["cold"] = self._cold_runs()
            self.entry["cold_regret"] = cold_regret(self.entry["cold"])
        self.entry["complete"] = True
        self.entry["seconds"] = time.monotonic() - started
        return self.entry

    @property
    def _num_samples(self) -> int:
        network = self.cell.network
        shards = math.ceil(
            self.cell.samples * self.settings.scale / network.shard_samples
        )
        return shards * network.shard_samples

    @property
    def _container(self) -> str:
        return f"{self.cell.model}-{self._num_samples}"

    # -- before the rounds ------------------------------------------------

    def _prepare(self, client: Remote) -> None:
        """Stores the data, before the link is shaped."""
        if self.bed.shaped:
            self.bed.set_link(None)
        store_data(
            self.bed.folder,
            client,
            self.tars,
            self._container,
            self._num_samples,
            self.cell.network.shard_samples,
        )
        self._choose_model(client, None)
        _ask(client, "open", name=STREAM, cut=STREAM)

    def _choose_model(self, client: Remote, epochs: int | None) -> None:
        _ask(
            client,
            "prepare",
            model=self.cell.model,
            freeze=self.cell.freeze_module,
            container=self._container,
            floor=self.settings.floor,
            epochs=epochs,
        )

    def _calibrate(self, client: Remote) -> Outlook:
        """Streams without a limit, asks the planner, then sets the link."""
        passes = [
            _ask(client, "run", name=STREAM, epoch=0)
            for _ in range(CALIBRATION_PASSES)
        ]
        # The first pass warms up.
        rate = max(each["samples_per_second"] for each in passes[1:])
        raw_bytes = passes[-1]["bytes_per_sample"]
        self.entry["calibration"] = {
            "samples_per_second": rate,
            "bytes_per_sample": raw_bytes,
            "saturating_bytes_per_second": rate * raw_bytes,
        }
        if self.cell.link is not None:
            self._link = self.cell.link * rate * raw_bytes
        self.entry["link_bytes_per_second"] = self._link
        shown = f"{self._link / 1e6:.2f} MB/s" if self._link else "unshaped"
        self.note(
            f"streaming saturates the client at {rate:.1f} samples/s,"
            f" {rate * raw_bytes / 1e6:.2f} MB/s; link: {shown}"
        )
        answer = _ask(
            client,
            "outlook",
            link=self._link,
            container=self._container,
            thorough=self.settings.thorough,
        )
        self._package_bytes = answer["package_bytes"]
        self.entry["problem"] = answer["problem"]
        self.entry["more_cuts"] = answer["more_cuts"]
        if self._link is not None:
            self.bed.set_link(self._link)
        return Outlook.from_json(answer)

    def _warm_up(self, client: Remote, found: Outlook) -> list[str]:
        """Opens every contender, unmeasured passes of each; their names."""
        jobs, shared = who_measures(found)
        self.entry |= {
            "predicted": dict(found.predicted),
            "shared": shared,
            "encodings": {},
            "ruled_out": {},
        }
        warm = {STREAM: self._pass(client, STREAM, 0)}
        _ask(client, "open", name=AUTO, cut=AUTO)
        warm[AUTO] = self._settle(client)
        for job in sorted(jobs, key=lambda job: job.link_bytes):
            # Only what one cut alone reached; a mix may go further.
            reached = max(rate for n, rate in warm.items() if n != AUTO)
            bound = self._link_bound(job, reached)
            if bound is not None:
                self.entry["ruled_out"][job.name] = bound
                continue
            _ask(
                client,
                "open",
                name=job.name,
                cut=job.cut,
                encoding=job.encoding,
            )
            self.entry["encodings"][job.name] = job.encoding
            warm[job.name] = self._pass(client, job.name, 0)
        self.note(
            "warm: "
            + ", ".join(f"{name} {rate:.1f}" for name, rate in warm.items())
            + "; ruled out: "
            + (", ".join(self.entry["ruled_out"]) or "none")
        )
        if self.cell.slow or not self.settings.thorough:
            return list(warm)
        statics = [name for name in warm if name != AUTO]
        self.entry["again"] = max(statics, key=lambda name: warm[name])
        return [*warm, AGAIN]

    def _settle(self, client: Remote) -> float:
        """Passes of ``auto`` until its plan stays; the last one's rate."""
        plans: list[str | None] = []
        began = changed = time.monotonic()
        while True:
            rate = self._pass(client, AUTO, 0)
            now = time.monotonic()
            plans.append(_ask(client, "plan", name=AUTO)["label"])
            if plans[-1] is None or plans[-2:-1] != plans[-1:]:
                changed = now
            steady = now - changed >= SETTLED_SECONDS
            if steady or now - began >= self.settings.most_settling_seconds:
                self.entry["settling"] = plans
                return rate

    def _link_bound(self, job: Static, best: float) -> str | None:
        """Why a cut cannot win, if the link alone says so.

        ``best`` is a rate that was reached while still warming up.
        """
        if self._link is None:
            return None
        most = self._link / job.link_bytes
        if most >= best:
            return None
        return (
            f"at {job.link_bytes:.0f} bytes a sample the link allows"
            f" {most:.2f} samples/s; {best:.2f} were reached"
        )

    # -- the rounds -------------------------------------------------------

    def _measure(self, client: Remote, names: Sequence[str]) -> None:
        rounds: dict[str, list[float]] = {name: [] for name in names}
        self.entry["rounds"] = rounds
        self.entry["bytes_per_sample"] = {}
        self.entry["fallbacks"] = {}
        self.entry["stages"] = {}
        self.entry["out_of_reach"] = []
        active = list(names)
        for number in range(self.settings.rounds):
            for name in rotated(active, number):
                rounds[name].append(self._pass(client, name, number + 1))
            slow = out_of_reach(rounds, self._statics)
            self.entry["out_of_reach"] = slow
            active = [name for name in active if name not in slow]
            self.save(self.entry)
            self.note(
                f"round {number + 1}/{self.settings.rounds}: "
                + ", ".join(
                    f"{name} {rounds[name][-1]:.1f}" for name in active
                )
            )
        plan = _ask(client, "plan", name=AUTO)
        self.entry["plan"] = plan["label"]
        self.entry["plan_samples_per_second"] = plan["samples_per_second"]

    @property
    def _statics(self) -> list[str]:
        return [STREAM, *self.entry["encodings"]]

    def _pass(self, client: Remote, name: str, epoch: int) -> float:
        job = self.entry.get("again", name) if name == AGAIN else name
        before = self.bed.storage_seconds()
        done = _ask(client, "run", name=job, epoch=epoch)
        stages = self.entry.setdefault("stages", {}).setdefault(name, [])
        stages.append(stage_of(done, self.bed.storage_seconds() - before))
        if done["fallbacks"]:
            counts = self.entry.setdefault("fallbacks", {})
            counts[name] = counts.get(name, 0) + done["fallbacks"]
            self.note(
                f"{name}: {done['fallbacks']} spans fell back to streaming;"
                " this pass does not measure what its name says"
            )
        self.entry.setdefault("bytes_per_sample", {})[name] = done[
            "bytes_per_sample"
        ]
        return float(done["samples_per_second"])

    # -- after the rounds -------------------------------------------------

    def _judge(self) -> None:
        """Completes the entry with what follows from its rounds."""
        entry = self.entry
        rounds = entry["rounds"]
        entry["noise"] = self._noise() if AGAIN in rounds else None
        for name, measured in entry["shared"].items():
            for key in ("rounds", "bytes_per_sample", "stages"):
                if measured in entry[key]:
                    entry[key][name] = entry[key][measured]
        best = best_static(rounds, self._statics)
        entry["best_static"] = best
        rates = medians(rounds)
        # A rule whose cut was ruled out has no figure, and the reason there.
        entry["samples_per_second"] = {
            **dict.fromkeys(entry["shared"]),
            **rates,
            "best_static": rates[best],
        }
        entry["predicted"]["best_static"] = entry["predicted"][best]
        verdict = judge(rounds, self._statics)
        if verdict is None:
            entry.update(regret=None, interval=None, against_stream=None)
            entry.update(missed=None, above_best_static=None)
            return
        entry.update(_regret_json(verdict.against_best))
        entry["against_stream"] = _regret_json(verdict.against_stream)
        entry["missed"] = verdict.missed
        entry["above_best_static"] = verdict.above_best_static

    def _noise(self) -> dict[str, Any]:
        """Takes the second passes out of the entry, into one of their own."""
        again = self.entry["rounds"].pop(AGAIN)
        for key in ("bytes_per_sample", "stages"):
            self.entry[key].pop(AGAIN, None)
        name = self.entry.pop("again")
        regret = regret_of(again, self.entry["rounds"][name])
        return {"contender": name, "rounds": again, **_regret_json(regret)}

    def _cold_runs(self) -> dict[str, Any]:
        """Whole runs, each with a new worker and no package in the store."""
        contenders: dict[str, tuple[int | str, str | None]] = {
            STREAM: (STREAM, None)
        }
        best = self.entry["best_static"]
        if best != STREAM:
            number = int(best.removeprefix("cut-"))
            contenders[best] = (number, self.entry["encodings"][best])
        contenders[AUTO] = (AUTO, None)
        runs: dict[str, Any] = {}
        for name, (cut, encoding) in contenders.items():
            runs[name] = self._cold_run(name, cut, encoding)
            took = runs[name]["seconds"]
            self.note(
                f"from cold: {name} "
                + (f"{took:.1f} s" if took else runs[name]["reason"])
            )
        return runs

    def _cold_run(
        self, name: str, cut: int | str, encoding: str | None
    ) -> dict[str, Any]:
        upload = self._package_bytes / self._link if self._link else 0.0
        too_long = upload > self.settings.cold_upload_seconds
        if isinstance(cut, int) and too_long:
            return {
                "seconds": None,
                "reason": f"{upload:.0f} s to send its package alone",
                "at_least_seconds": upload,
            }
        self.bed.restart_worker()
        with self.bed.client.remote(CLIENT) as client:
            self._choose_model(client, self.settings.cold_epochs)
            done = _ask(
                client,
                "cold",
                cut=cut,
                encoding=encoding,
                epochs=self.settings.cold_epochs,
                models_container=f"cold-{self.cell.name}-{name}".replace(
                    "/", "-"
                ),
            )
        return dict(done)


def store_data(
    folder: Path,
    client: Remote,
    tars: Sequence[Any],
    container: str,
    samples: int,
    shard_samples: int,
) -> None:
    """Makes a data set and stores it, unless that was done.

    Args:
        folder: of the testbed.
        client: stores it.
        tars: where the samples come from.
        container: to store it in.
        samples, shard_samples: of the whole, of each shard.
    """
    place = folder / "data" / container
    if place.exists():
        return
    place.mkdir(parents=True)
    shards = write_shards(tars, place, samples, shard_samples)
    _ask(
        client,
        "upload",
        shards=[str(shard) for shard in shards],
        container=container,
    )


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: each contender begins in turn."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def out_of_reach(
    rounds: Mapping[str, Sequence[float]], statics: Sequence[str]
) -> list[str]:
    """Cuts that the first round shows far behind.

    Also ``stream``, when the first two rounds show it further behind.
    """
    best = max(rounds[name][0] for name in statics)
    slow = [
        name
        for name in statics
        if name != STREAM and rounds[name][0] < OUT_OF_REACH * best
    ]
    seen = rounds[STREAM][:2]
    if len(seen) == 2 and max(seen) < STREAM_OUT_OF_REACH * best:
        slow.append(STREAM)
    return slow


def stage_of(
    done: Mapping[str, Any], storage_seconds: float
) -> dict[str, float]:
    """What one sample took of each resource, mean of a pass.

    Args:
        done: the client tier's answer to ``run``.
        storage_seconds: CPU seconds of the storage tier meanwhile.
    """
    return {
        "link_bytes": done["bytes_per_sample"],
        "storage_seconds": storage_seconds / done["samples"],
        "client_seconds": done["cpu_seconds"] / done["samples"],
    }


def cold_regret(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """By how much of its time ``auto`` took longer than each other one.

    Of one run each: 0.03 is three per cent more time, -0.03 less.
    """
    took = runs[AUTO]["seconds"]
    return {
        name: took / run["seconds"] - 1
        for name, run in runs.items()
        if name != AUTO and run["seconds"] is not None
    }


def _ask(client: Remote, do: str, **arguments: Any) -> Any:
    return client.ask(do, seconds=QUESTION_SECONDS, **arguments)


def _regret_json(regret: Regret) -> dict[str, Any]:
    return {"regret": regret.regret, "interval": list(regret.interval)}
