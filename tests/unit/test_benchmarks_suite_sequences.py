"""Experiments from start to end, with processes that answer at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from benchmarks.network import Traffic
from benchmarks.storage_tier import BATCH_SAMPLES, BATCHES
from benchmarks.suite import (
    ablations,
    cell,
    grid,
    lineup,
    many_tenants,
    runs,
    scaling,
)
from benchmarks.suite.contenders import (
    EXTERNALS,
    RESIZED,
    TAR_STREAM,
    Opponent,
    start,
)
from benchmarks.suite.entries import complete
from benchmarks.suite.experiment import Experiment
from benchmarks.suite.lineup import Lineup
from benchmarks.suite.together import Span
from benchmarks.suite.verdict import AGAIN
from benchmarks.suite.workloads import WORKLOADS
from benchmarks.testbed import Testbed, Tier

from photos import shard
from suite_contexts import context_of

WINDOW = {
    "seconds": 1.0,
    "samples_per_second": 10.0,
    "samples": 128,
    "batches": 8,
    "down_bytes": 100.0,
    "up_bytes": 10.0,
    "client_seconds": 0.1,
    "storage_seconds": 0.1,
}
LINK_BYTES = 0.25 * 10.0 * 100.0
LP_BATCH = 48
SAMPLES = 256
"""Of the quick data set of ablations, all kept."""


class FakeRemote:
    """A process that knows the answers.

    Args:
        world: which is told of all questions.
        module: that it runs.
        environment: its own.
    """

    def __init__(
        self, world: World, module: str, environment: dict[str, str]
    ) -> None:
        self._world = world
        self._module = module
        self._environment = environment
        # No process has such a number.
        self.pid = -1 - len(world.environments)

    def ask(self, do: str, *, seconds: float, **arguments: Any) -> Any:
        self._world.asked.append((self._module, do, arguments))
        answer = getattr(self, f"_{do}", None)
        return answer(**arguments) if answer is not None else None

    def _about(self) -> Any:
        return {
            "versions": {},
            "grid": [{"channels_last": True}],
            "keeps": False,
        }

    def _package_bytes(self, name: str) -> int:
        return 7 if name.startswith("freeze") else 0

    def _plan(self, name: str) -> Any:
        return {"label": "a plan", "is_decided": True}

    def _window(self, **_: Any) -> Any:
        return WINDOW

    def _epochs(self, first: int, count: int, **_: Any) -> Any:
        samples = self._world.samples
        cached = samples if self._world.keeps else 0
        return [{**WINDOW, "samples": samples, "cached": cached}] * count

    def _fallbacks(self, name: str) -> Any:
        self._world.fallbacks += name == "freeze"
        return self._world.fallbacks

    def _kept(self) -> Any:
        return {"entries": SAMPLES}

    def _diary(self, epoch: int, until: float, **_: Any) -> Any:
        return [(until - 1.0, 0), (until + 1.0, 10)]

    def _worker_counters(self) -> Any:
        return self._world.counters()

    def _start(self) -> Any:
        return {"port": 1, "sessions": [os.getsid(0)]}

    def _images(self, container: str, **_: Any) -> Any:
        return {"place": {"images": container}}

    def _mds(self, container: str, **_: Any) -> Any:
        return {"place": {"mds": container}}

    def _resized(self, container: str, **_: Any) -> Any:
        return {"place": {"resized": container}}

    def __enter__(self) -> FakeRemote:
        self._world.running += 1
        self._world.most_running = max(
            self._world.most_running, self._world.running
        )
        self._world.environments.append(self._environment)
        return self

    def __exit__(self, *_: object) -> None:
        self._world.running -= 1


@dataclass
class World:
    """What was done.

    Attributes:
        samples: of an epoch.
        keeps: whether the store has kept the features that are asked for.
        asked: module, question and arguments of all.
        links: that were set.
        restarts: of the worker.
        fallbacks: of all jobs, one more whenever a fixed cut is asked.
        passes: of a worker's model, two more whenever they are asked.
    """

    samples: int = 0
    keeps: bool = True
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    links: list[float | None] = field(default_factory=list)
    restarts: int = 0
    fallbacks: int = 0
    passes: int = 0
    running: int = 0
    most_running: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    proxies: list[tuple[str, ...]] = field(default_factory=list)

    def counters(self) -> dict[str, float]:
        self.passes += 2
        return {BATCHES: self.passes, BATCH_SAMPLES: 8.0 * self.passes}

    def questions(self, module: str, do: str) -> list[dict[str, Any]]:
        return [
            arguments
            for asked, question, arguments in self.asked
            if asked.endswith(module) and question == do
        ]


@dataclass(frozen=True)
class FakeTier(Tier):
    """Starts such processes."""

    world: World = field(default_factory=World)

    def remote(self, module: str, *arguments: str) -> Any:
        environment = dict(self.environment)
        if module.endswith("second_proxy"):
            self.world.proxies.append(arguments)
        return FakeRemote(self.world, module, environment)


class FakeLink:
    """No byte passes."""

    def traffic(self) -> Traffic:
        return Traffic(0, 0)


class FakeBed(Testbed):
    """Told of what is done to it."""

    def __init__(self, world: World, folder: Path) -> None:
        credentials = {
            "ST_AUTH": "http://swift/auth/v1.0",
            "ST_USER": "test:tester",
            "ST_KEY": "testing",
        }
        self.world = world
        super().__init__(
            FakeTier("storage", (0,), None, {}, world),
            FakeTier("client", (1,), None, credentials, world),
            folder,
            FakeLink(),  # type: ignore[arg-type]
        )

    def set_link(self, bytes_per_second: float | None) -> None:
        self.world.links.append(bytes_per_second)
        self.world.asked.append(("bed", "link", {"limit": bytes_per_second}))

    def restart_worker(self) -> None:
        self.world.restarts += 1

    def storage_sessions(self) -> list[int]:
        return []

    def worker_counters(self) -> dict[str, float]:
        return self.world.counters()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    span = Span(0.0, 0.01)
    for module in (many_tenants, scaling, ablations):
        monkeypatch.setattr(module, "QUICK_SPAN", span)
    for module in (many_tenants, scaling, ablations, cell):
        monkeypatch.setattr(module, "QUICK_SETTLING_SECONDS", 0.0)
    for module in (runs, lineup):
        monkeypatch.setattr(module, "absent", lambda name: None)
    # Tracing takes seconds.
    monkeypatch.setattr(ablations, "lp_batch", lambda *_: LP_BATCH)
    return World()


@pytest.fixture
def measure(
    world: World, tmp_path: Path
) -> Callable[[Experiment, dict[str, Any]], None]:
    """Measures, on a testbed of its own."""
    tar = tmp_path / "photos.tar"
    tar.write_bytes(shard(2))

    @contextlib.contextmanager
    def testbed(**options: Any) -> Iterator[Testbed]:
        world.options = options
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        yield FakeBed(world, folder)
        assert world.running == 0

    def act(
        experiment: Experiment, section: dict[str, Any], **more: Any
    ) -> None:
        options = {"quick": True, "rounds": 2, "only": [], **more}
        experiment.measure(
            context_of(
                section, sources=[tar], tars=[tar], testbed=testbed, **options
            )
        )
        assert experiment.table(section)

    return act


def test_a_cell_has_all_contenders_and_then_the_best(
    world: World, measure: Any
) -> None:
    world.samples = 1
    section: dict[str, Any] = {}
    measure(grid.EXPERIMENT, section)
    slow, fast = section["cells"]
    assert (slow["name"], fast["name"]) == (
        "mobilenet_v3_small/backbone/0.25",
        "mobilenet_v3_small/backbone/10",
    )
    ours = ["stream", "freeze", "auto", "freeze-float16", "auto-resized"]
    everybody = {*EXTERNALS, RESIZED, *ours}
    assert slow["rounds"].keys() == {*everybody, AGAIN}
    assert fast["rounds"].keys() == slow["rounds"].keys() - {"freeze-float16"}
    # All are as fast: one goes on where the link is slow, else two.
    for found, count in ((slow, 1), (fast, 2)):
        again = [n for n in EXTERNALS if len(found["rounds"][n]) == 2]
        assert len(again) == count
        assert found["again"] in again
        assert found["calibration"]["beside"] == [10.0, 10.0]
        assert found["settling"].keys() == {"auto", "auto-resized"}
    opened = world.questions("client_tier", "open")
    assert [each["name"] for each in opened[: len(ours)]] == ours
    # Plans settle in windows, not in epochs that a slow link makes long.
    windows = world.questions("client_tier", "diary")
    assert {each["name"] for each in windows} == {"auto", "auto-resized"}
    assert opened[3]["encoding"] == "float16"
    # Tuned without a limit, and at others; a cell is calibrated without one,
    # and so is each round.
    rate = LINK_BYTES / 0.25
    assert world.links[-6:] == [None, 10 * rate] * 3
    assert {rate, 0.25 * rate} < {*world.links}


@pytest.mark.parametrize("link", [0.1, 0.25, 1.0])
def test_nothing_is_stored_or_sent_once_the_link_is_set(
    link: float, world: World, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "MOST_SETTLING_SECONDS", 0.0)
    world.samples = 1
    name = f"resnet18/inner/{link:g}"
    section: dict[str, Any] = {}
    measure(grid.EXPERIMENT, section, quick=False, rounds=5, only=[name])
    # Calibrated without a limit, and so is each round.
    limit = link * 10.0 * 100.0
    assert world.links[-12:] == [None, limit] * 6
    kinds = [question for _, question, _ in world.asked]
    opened = len(kinds) - kinds[::-1].index("open")
    limits = [
        place
        for place, (_, question, found) in enumerate(world.asked)
        if question == "link" and found["limit"] == limit
    ]
    assert opened < limits[-6]


@pytest.mark.parametrize("name", [TAR_STREAM, "local-features"])
def test_settings_that_the_grid_found_are_not_looked_for_again(
    name: str, world: World, tmp_path: Path
) -> None:
    bed = FakeBed(world, tmp_path)
    [workload] = [w for w in WORKLOADS if w.name == "resnet18/inner"]
    found = {"options": {"decode": "loop"}, "versions": {}, "grid": {}}
    section: dict[str, Any] = {"opponents": {}}
    context = context_of(section, tuned={workload.model: {TAR_STREAM: found}})
    with start(bed, name) as remote:
        opponents = {name: Opponent(bed, name, remote)}
        Lineup(bed, context, workload, opponents).enter(workload)
    assert section["opponents"] == {workload.model: {name: found}}
    assert [question for _, question, _ in world.asked] == ["about"]


def test_each_run_is_from_cold(world: World, measure: Any) -> None:
    world.samples = runs.QUICK_VOLUME.samples
    section: dict[str, Any] = {}
    measure(runs.EXPERIMENT, section)
    [entry] = complete(section)
    names = list(entry["runs"])
    assert names == [*runs.ours_of(runs.CELLS[0][0]), *runs.OPPONENTS]
    assert world.restarts == len(names)
    assert len(world.questions("client_tier", "purge")) == len(names)
    assert len(world.questions("client_tier", "forget_packages")) == len(names)
    assert world.options == {"filter_options": {"cache": "true"}}
    # Stored without a limit; the link is that of the tar stream.
    assert world.links == [None, None, LINK_BYTES]
    told = {x["epochs"] for x in world.questions("client_tier", "prepare")}
    assert told == {1, runs.QUICK_EPOCHS}
    [kept] = entry["runs"]["freeze-cache"]
    assert kept["before"]["package_bytes"] == 7
    assert entry["one_offs"].keys() == {"index", "mds", "resized"}
    # What it imports is no cost of the conversion.
    [ready] = world.questions("convert", "ready")
    assert ready == {"libraries": ["streaming"]}
    assert entry["runs"]["auto"][0]["plan"] == "a plan"
    assert entry["auto_over_best"]["1"]["best"] in runs.OPPONENTS
    # The link is measured too: shards are read from Swift, not from files.
    once = world.questions("convert", "mds")[-1]
    assert "paths" not in once
    assert once["container"].endswith("-again")
    assert set(runs.met(section).values()) == {True, False}


def test_runs_have_as_many_samples_as_the_machine_is_fast(
    world: World, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_tune", lambda *_: None)
    volume = runs.lasting(WINDOW["samples_per_second"], 0.25, 8)
    world.samples = volume.samples
    section: dict[str, Any] = {}
    measure(
        runs.EXPERIMENT,
        section,
        quick=False,
        only=["resnet18/backbone/0.25"],
    )
    [entry] = complete(section)
    assert entry["samples"] == volume.samples
    stored = [x["container"] for x in world.questions("tier", "upload")]
    assert stored == ["resnet18-probe-0", "resnet18-runs-0"]
    trained = [x["place"] for x in world.questions("serve", "prepare")]
    probed, *others = [each["container"] for each in trained]
    assert probed == stored[0]
    assert {*others} == {stored[1]}


def test_opponents_that_are_not_installed_are_left_out(
    world: World, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.samples = runs.QUICK_VOLUME.samples
    reasons = {"mosaic": "no mosaic", "webdataset": "no webdataset"}
    monkeypatch.setattr(runs, "absent", reasons.get)
    section: dict[str, Any] = {}
    measure(runs.EXPERIMENT, section)
    [entry] = complete(section)
    assert section["absent"] == reasons
    assert not {*entry["runs"]} & {*reasons}
    assert entry["one_offs"].keys() == {"index", "resized"}


def test_an_epoch_that_lost_samples_is_an_error(
    world: World, measure: Any
) -> None:
    world.samples = runs.QUICK_VOLUME.samples - 1
    section: dict[str, Any] = {}
    with pytest.raises(ValueError, match="127 samples in an epoch of 128"):
        measure(runs.EXPERIMENT, section)
    assert not complete(section)
    assert world.running == 0


def test_a_store_that_keeps_nothing_is_an_error(
    world: World, measure: Any
) -> None:
    world.samples = runs.QUICK_VOLUME.samples
    world.keeps = False
    with pytest.raises(ValueError, match=r"freeze-cache.* found nothing kept"):
        measure(runs.EXPERIMENT, {})
    assert world.running == 0


def test_tenants_have_data_and_processes_of_their_own(
    world: World, measure: Any
) -> None:
    world.samples = 1
    section: dict[str, Any] = {}
    measure(many_tenants.EXPERIMENT, section)
    found = complete(section)
    assert [each["name"] for each in found] == ["same/1", "same/2", "mix/2"]
    assert "alone" not in found[1]
    assert found[2]["relative"].keys() == set(many_tenants.CONTENDERS)
    users = {each["ST_USER"] for each in world.environments if each}
    assert {"tenant0:trainer", "tenant1:trainer"} <= users
    places = world.questions("serve", "prepare")
    assert {x["place"]["user"] for x in places[1:]} == {
        "tenant0:trainer",
        "tenant1:trainer",
    }
    [phase, _] = found[1]["rounds"]["freeze"]
    # Two clients answer twice, each time one more.
    assert phase["fallbacks"] == 4
    [phase, _] = found[1]["rounds"]["auto"]
    assert phase["fallbacks"] == 0
    epochs = [x["epoch"] for x in world.questions("serve", "diary")]
    assert len(set(epochs)) > 1


def test_second_proxy_and_ranks(world: World, measure: Any) -> None:
    section: dict[str, Any] = {}
    measure(scaling.EXPERIMENT, section)
    found = complete(section)
    assert [each["name"] for each in found] == [
        "proxies/freeze",
        "ranks/stream",
    ]
    assert len(found[0]["rounds"]["two"]) == 2
    assert found[1]["rounds"].keys() == {"one", "two", "halved"}
    assert [each["halved_ratio"]["median"] for each in found[1:]] == [1.0]
    assert found[0]["rounds"]["one"][0]["worker_batch"] == 8.0
    urls = {each.get("ST_AUTH") for each in world.environments}
    assert len(urls - {None}) == 2
    parts = [x["parts"] for x in world.questions("client_tier", "open")]
    assert parts == [1] * 3 + [2] * 4
    prepared = world.questions("client_tier", "prepare")
    batch_sizes = [each["batch_size"] for each in prepared]
    assert sorted(batch_sizes)[:2] == [scaling.BATCH // 2, scaling.BATCH]
    world_sizes = [x.get("WORLD_SIZE") for x in world.environments]
    assert world_sizes.count("2") == 2


def test_parts_are_left_out_one_by_one(world: World, measure: Any) -> None:
    world.samples = 1
    section: dict[str, Any] = {}
    measure(ablations.EXPERIMENT, section)
    found, coalescing = complete(section)
    assert found["parts"].keys() == ablations.PARTS.keys()
    assert found["settling"].keys() == {"auto", "auto-float32"}
    options = [more for _, _, *more in world.proxies]
    assert options == [[], ["max_batch=1"], [f"max_batch={LP_BATCH}"]]
    assert all(len(each) == 2 for each in found["rounds"].values())
    assert coalescing["parts"].keys() == {ablations.COALESCING}
    assert list(section["lp_batch"].values()) == [LP_BATCH]
    opened = world.questions("client_tier", "open")
    assert {"encoding": "float32"}.items() <= opened[1].items()
    seeds = [
        each["seed"]
        for each in world.questions("client_tier", "prepare")
        if "seed" in each
    ]
    assert len(set(seeds[: ablations.STREAMS])) == ablations.STREAMS
    assert len(set(seeds[ablations.STREAMS :])) == 1


@pytest.mark.parametrize(
    "experiment",
    [
        grid.EXPERIMENT,
        runs.EXPERIMENT,
        many_tenants.EXPERIMENT,
        scaling.EXPERIMENT,
        ablations.EXPERIMENT,
    ],
    ids=lambda each: each.name,
)
def test_complete_entries_are_kept(
    world: World, measure: Any, experiment: Experiment
) -> None:
    world.samples = runs.QUICK_VOLUME.samples
    section: dict[str, Any] = {}
    measure(experiment, section)
    again, asked = complete(section), len(world.asked)
    measure(experiment, section)
    assert complete(section) == again
    assert len(world.asked) == asked
    assert world.most_running > 0
