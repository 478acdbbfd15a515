"""Checkpoints: their writes, their uploads, and what they cost a loop.

    python -m benchmarks.checkpoints --json checkpoints.json

Contenders of a part take turns in each round; ratios are those of rounds.

  writers  a save by 1, 2 and 4 ranks (of which one writes for two cores)
           until it is whole, over dd with direct
           I/O, and over the fastest of torch.save and of
           torch.distributed.checkpoint, whose files and folders are synced;
           files before it are deleted between the measurements
  overlap  steps with a save each, over steps without.  A step lasts five
           writes, with one thread on one core; the manager's threads inherit
           another core from the first save.  Controls save before they go on
  swift    upload and restore over swiftclient with the fastest of a few
           settings, and torch.load; each upload replaces the one before
  torn     checkpoints whose tensors have other digests; the control does not
           wait before the optimizer's step

Keys of the JSON: ratios (name, median, interval, least, most),
dd_mib_per_second, direct (writes bypass the cache; null without strace),
step_over_write, saves, torn (with the wait, without), goals.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from math import ceil, inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from swiftclient.service import SwiftService, SwiftUploadObject
from torch import nn

from benchmarks import command_line as cli
from benchmarks.micro.filter_cost import pinned
from benchmarks.nodes import SIZES, Tail, accumulated, batch_of
from benchmarks.ratios import ratio, rotated
from benchmarks.record import write_results
from benchmarks.testbed.remote import Remote, serve
from hapi_client import Connection, Credentials
from hapi_cluster import Cluster
from hapi_training import CheckpointManager
from hapi_training.checkpoints.content import _digests
from hapi_training.checkpoints.folder import _sync_folder
from hapi_training.state_transfer import load_values, values_of

MEBIBYTES, SWIFT_MEBIBYTES, TORN_MEBIBYTES = 512, 128, 64
ROUNDS, STEPS, STEP_WRITES, SAVES = 7, 30, 5, 20
COUNTS = (1, 2, 4)
"""Writers, and threads of torch.distributed.checkpoint."""
PASS = 16
"""Samples of a pass; a step has as many as it takes."""
SEGMENTS = tuple(product((16, 32, 64), (4, 10)))
"""MiB of swiftclient's segments, and its threads."""
MIN_DISK = 200.0
"""MiB/s of dd below which writers have no goals: the disk alone counts."""
ANSWER_SECONDS = 600.0
CONTROL = {"least": 1.15}

Run = Callable[[], object]
Save = Callable[[Path], object]


def row(name: str, above: Any, below: Any, **goal: float | None) -> Any:
    """The ratio of two lists, and its goal, ``least`` or ``most``."""
    found = {"name": name, **ratio(above, below), "least": None, "most": None}
    print(f"{found['median']:.2f} {name}", flush=True)
    return {**found, **goal}


def state_of(mebibytes: int) -> dict[str, Any]:
    """Layers of 16 MiB, and as much momenta, equal on all ranks."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Linear(2048, 2048, bias=False) for _ in range(mebibytes // 32))
    )
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, momentum=0.9)
    for weight in layers.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return {"layers": layers, "optimizer": optimizer}


def timed(run: Run) -> float:
    began = time.monotonic()
    run()
    return time.monotonic() - began


def in_turn(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, part: str
) -> dict[str, list[Any]]:
    """Returns what contenders return in each round; their order rotates."""
    found: dict[str, list[Any]] = {name: [] for name in contenders}
    note = cli.clock(f"{part} ")
    for number in range(-1, rounds):
        for name in rotated(list(contenders), number):
            os.sync()
            value = contenders[name]()
            if number >= 0:  # The first round warms up.
                found[name].append(value)
        note(f"round {number + 1} of {rounds}")
    return found


def save_whole(checkpoints: CheckpointManager) -> None:
    checkpoints.save()
    checkpoints.wait()


def save_stock(values: Any, path: Path, *, checksums: bool = False) -> None:
    torch.serialization.set_crc32_options(checksums)
    torch.save(values, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_distributed(values: Any, path: Path, threads: int) -> None:
    torch.serialization.set_crc32_options(False)
    writer = dcp.FileSystemWriter(path, thread_count=threads, sync_files=True)
    dcp.save(values, storage_writer=writer, no_dist=True)
    _sync_folder(path)


def dd(path: Path, mebibytes: int) -> None:
    command = ["dd", "if=/dev/zero", f"of={path}", f"count={mebibytes // 16}"]
    command += ["bs=16M", "oflag=direct", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)


def seconds_anew(save: Save, folder: Path) -> float:
    """Seconds of a save to where there is nothing."""
    with TemporaryDirectory(dir=folder) as new:
        path = Path(new) / "checkpoint"
        return timed(lambda: (save(path), _sync_folder(path.parent)))


def rank_command(*words: object) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--rank"]
    return [*command, *map(str, words)]


def rank_of(*words: object) -> Remote:
    """Starts one of some processes that save together."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return Remote(subprocess.Popen(rank_command(*words), **pipes), "a writer")


def serve_rank(folder: str, size: str, rank: str, num_ranks: str) -> None:
    numbers = {"rank": int(rank), "world_size": int(num_ranks)}
    dist.init_process_group("gloo", f"file://{folder}.group", **numbers)
    # It is not closed: ranks end one after the other.
    checkpoints = CheckpointManager(
        state_of(int(size)), local=folder, keep=SAVES
    )
    save_whole(checkpoints)
    serve({"save": partial(save_whole, checkpoints)})


def seconds_together(
    threads: ThreadPoolExecutor, ranks: list[Remote], folder: Path
) -> float:
    ask = partial(Remote.ask, do="save", seconds=ANSWER_SECONDS)
    seconds = timed(lambda: list(threads.map(ask, ranks)))
    for path in folder.glob("*.pt"):
        path.unlink()
    return seconds


def writes_directly(folder: Path) -> bool | None:
    """True if a file is opened with O_DIRECT, and keeps it."""
    trace = folder / "trace"
    command = ["strace", "-f", "-y", "-e", "openat,fcntl", "-o", str(trace)]
    command += rank_command(folder / "traced", TORN_MEBIBYTES, 0, 1)
    if shutil.which("strace") is None:
        return None
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        return None  # It may not trace.
    lines = [x for x in trace.read_text().splitlines() if ".part" in x]
    is_direct = any("openat" in x and "O_DIRECT" in x for x in lines)
    return is_direct and not any("F_SETFL" in x for x in lines)


def measure_writers(folder: Path, rounds: int, size: int) -> dict[str, Any]:
    values = values_of(state_of(size), "it")
    stock: dict[str, Save] = {
        "torch.save": partial(save_stock, values, checksums=True),
        "torch.save, no checksums": partial(save_stock, values),
    }
    for count in COUNTS:
        name = f"distributed.checkpoint, no checksums, threads: {count}"
        stock[name] = partial(save_distributed, values, threads=count)
    contenders = {
        name: partial(seconds_anew, save, folder)
        for name, save in {"dd": partial(dd, mebibytes=size), **stock}.items()
    }
    ours = {f"save, writers: {count}": count for count in COUNTS}
    with ExitStack() as stack:
        for name, count in ours.items():
            place = folder / str(count)
            ranks = [rank_of(place, size, n, count) for n in range(count)]
            for rank in ranks:
                stack.enter_context(rank)
            threads = stack.enter_context(ThreadPoolExecutor(count))
            contenders[name] = partial(seconds_together, threads, ranks, place)
        seconds = in_turn(contenders, rounds, "writers")
    disk = size / median(seconds["dd"])
    best = min(stock, key=lambda name: median(seconds[name]))
    goals = (0.70, 0.90) if disk >= MIN_DISK else (None, None)
    parts = (stock, "dd", None), (ours, "dd", goals[0]), (ours, best, goals[1])
    ratios = [
        row(f"rate of {n} / {over}", seconds[over], seconds[n], least=goal)
        for names, over, goal in parts
        for n in names
    ]
    direct = writes_directly(folder)
    return {"ratios": ratios, "dd_mib_per_second": disk, "direct": direct}


def measure_overlap(folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    tail, (features, labels) = Tail(), (x[:PASS] for x in batch_of(SIZES[-1]))
    optimizer = torch.optim.SGD(tail.parameters(), lr=1e-4, momentum=0.9)
    state = {"tail": tail, "optimizer": optimizer}
    first, second = sorted(os.sched_getaffinity(0))[:2]

    compute = partial(accumulated, tail, (features, labels), 1)

    def train(passes: int) -> None:
        for _ in range(passes):
            compute()
        optimizer.step()
        optimizer.zero_grad()

    def loop(passes: int, save: Run) -> None:
        for _ in range(steps):
            train(passes)
            save()
        checkpoints.wait()

    def seconds_of_write() -> float:
        before = checkpoints.stats.seconds_written
        save_whole(checkpoints)
        return checkpoints.stats.seconds_written - before

    train(1)
    with CheckpointManager(state, local=folder, keep=1) as checkpoints:
        with pinned([second]):
            save_whole(checkpoints)
        with pinned([first]):
            write = median(seconds_of_write() for _ in range(9))
            one = median(timed(compute) for _ in range(9))
            saves: dict[str, Run] = {
                "no saves": lambda: None,
                "saves": checkpoints.save,
                "synchronous saves": partial(save_whole, checkpoints),
                "torch.save, no checksums": lambda: save_stock(
                    values_of(state, "it"), folder / "stock"
                ),
            }
            run = partial(loop, ceil(STEP_WRITES * write / one))
            contenders = {
                name: partial(timed, partial(run, save))
                for name, save in saves.items()
            }
            seconds = in_turn(contenders, rounds, "overlap")
    none = seconds.pop("no saves")
    goals: dict[str, Any] = {"saves": {"most": 1.10}}
    ratios = [
        row(f"seconds with {n} / without", x, none, **goals.get(n, CONTROL))
        for n, x in seconds.items()
    ]
    return {"ratios": ratios, "step_over_write": median(none) / steps / write}


def measure_swift(folder: Path, rounds: int, size: int) -> dict[str, Any]:
    state, path = state_of(size), folder / "checkpoint"
    save_stock(values_of(state, "it"), path)
    plain = {"processes": True, "worker": False, "hapi_filter": False}
    with Cluster.temporary(**plain) as cluster:
        login = cluster.auth_url, cluster.user, cluster.key
        connection = Connection(Credentials.v1(*login))
        place = {"remote": "swift://ours/run", "connection": connection}

        def ours() -> tuple[float, float]:
            with CheckpointManager(state, keep=1, **place) as checkpoints:
                restore = timed(checkpoints.restore)
                save_whole(checkpoints)
            return checkpoints.stats.seconds_uploaded, restore

        stock = {
            f"swiftclient, {segment} MiB, {threads} threads": partial(
                swiftclient, login, state, path, segment << 20, threads
            )
            for segment, threads in SEGMENTS
        }
        found = in_turn({"ours": ours, **stock}, rounds, "swift")
    ratios = []
    for number, part in enumerate(("upload", "restore")):
        seconds = {k: [x[number] for x in rows] for k, rows in found.items()}
        best = min(stock, key=lambda name: median(seconds[name]))
        name = f"rate of {part} / {best}"
        ratios.append(row(name, seconds[best], seconds["ours"], least=0.80))
    return {"ratios": ratios}


def swiftclient(
    login: tuple[str, ...], state: Any, path: Path, segment: int, threads: int
) -> tuple[float, float]:
    """Seconds of an upload and of a restore."""
    options = dict(zip(("auth", "user", "key"), login, strict=True))
    options |= {"segment_threads": threads, "segment_size": segment}
    container, to = f"stock-{segment}-{threads}", path.with_name("download")
    path.touch()  # Segments of an earlier time are deleted.
    source = SwiftUploadObject(str(path), object_name="file")
    with SwiftService({**options, "auth_version": "1.0"}) as swift:
        began = time.monotonic()
        assert all(x["success"] for x in swift.upload(container, [source]))
        uploaded = time.monotonic()
        found = swift.download(container, ["file"], {"out_file": str(to)})
        assert all(x["success"] for x in found)
        values = torch.load(to, weights_only=True, mmap=True)
        load_values(state, values, "it")
        restored = time.monotonic()
    to.unlink()
    return uploaded - began, restored - uploaded


def count_torn(folder: Path, saves: int) -> int:
    state, options = state_of(TORN_MEBIBYTES), {"keep": saves, "verify": True}
    with CheckpointManager(state, local=folder, **options) as checkpoints:
        for _ in range(saves):
            checkpoints.save()
            state["optimizer"].step()
    files = [torch.load(x, weights_only=True) for x in folder.glob("*.pt")]
    assert len(files) == saves
    return sum(file["digests"] != _digests(file["state"]) for file in files)


def main() -> int:
    parser = cli.parser_of("checkpoints", __doc__)
    cli.add_rounds(parser, ROUNDS)
    add = parser.add_argument
    add("--mebibytes", type=int, help=f"size of a save (default {MEBIBYTES})")
    add("--folder", type=Path, help="on the disk to write to (TMPDIR)")
    add("--rank", nargs=4, help="internal")
    options = cli.parse(parser, None)
    torch.set_num_threads(1)
    if options.rank:
        serve_rank(*options.rank)
        return 0
    return cli.exit_status("checkpoints", lambda: _run(options))


def _run(options: Namespace) -> int:
    quick, rounds = options.quick, options.rounds
    size = options.mebibytes or (64 if quick else MEBIBYTES)
    steps, saves = (3, 4) if quick else (STEPS, SAVES)
    with TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        parts = [
            measure_writers(folder, rounds, size),
            measure_overlap(folder / "overlap", rounds, steps),
            measure_swift(folder, rounds, 32 if quick else SWIFT_MEBIBYTES),
        ]
        torn = [count_torn(folder / "torn", saves)]
        with patch.object(CheckpointManager, "_before_step", lambda *_: None):
            torn.append(count_torn(folder / "control", saves))
    results = {key: value for part in parts for key, value in part.items()}
    ratios = [cell for part in parts for cell in part["ratios"]]
    goals = {
        x["name"]: (x["least"] or 0) <= x["median"] <= (x["most"] or inf)
        for x in ratios
        if x["least"] or x["most"]
    }
    goals["direct writes"] = results["direct"]
    goals["torn checkpoints in the control only"] = torn[0] == 0 < torn[1]
    print(f"dd: {results['dd_mib_per_second']:.0f} MiB/s; torn: {torn}")
    cli.print_goals(goals)
    results |= {"ratios": ratios, "saves": saves, "torn": torn, "goals": goals}
    settings = {"quick": quick, "rounds": rounds, "mebibytes": size}
    write_results(options.json, "checkpoints", settings, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
