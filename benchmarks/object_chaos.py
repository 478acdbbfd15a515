"""Faults at random under training jobs whose object servers compute.

    python -m benchmarks object_chaos --data DIR --seconds 1800 --json PATH

Needs root: six hosts in network namespaces, four of them with an object
server, two devices and a worker, make a Swift with the policies "replicated"
(3) and "ec21".  Four jobs of two accounts read epoch after epoch: each sample
must come exactly once, with the features computed beforehand.  Plain requests
run at the same time; with --without-filter they meet the same faults of the
same Swift without HAPI, whose objects the jobs read whole.  The exit status is
1 if an epoch failed or a sample was wrong, missing or double.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import requests
from swiftclient.client import Connection, get_auth

from benchmarks.command_line import (
    PHOTOGRAPHS,
    clock,
    exit_status,
    parse,
    parser_of,
    print_table,
)
from benchmarks.record import write_results
from benchmarks.testbed.faults import LEFT_OUT, Fault, Faults, schedule
from benchmarks.testbed.remote import Remote, RemoteError
from benchmarks.testbed.shards import find_tars, write_shards
from benchmarks.testbed.storage_hosts import (
    CODED,
    FOLDER,
    PROXIES,
    REPLICATED,
    StorageHosts,
    enter,
)
from benchmarks.testbed.two_tiers import ROOT
from hapi_cluster.configs import USERS
from hapi_protocol.shards import iter_samples

SECONDS, QUICK_SECONDS = 1800.0, 60.0
GAP_SECONDS = (10.0, 20.0)
PASS_SECONDS = 20.0
"""Pause between two passes of Swift's daemons."""
HEALING_PASSES = 8
SAMPLES, SHARD_SAMPLES = 120, 30
EPOCH_SECONDS, PREPARE_SECONDS, JOIN_SECONDS = 1500.0, 300.0, 30.0
RECENT_SECONDS = 60.0
"""Faults that ended this long before an error are recorded with it."""
PLAIN_SECONDS, PLAIN_TIMEOUT_SECONDS = 0.2, 60.0
PLAIN_OBJECTS, PLAIN_BYTES, PLAIN_THREADS = 16, 20_000, 32
USER, OTHER_USER = "test:tester", "test2:tester2"
PARTS = "parts"
JOBS: Mapping[str, tuple[str, str, str, str]] = {
    "shards-1": (USER, "p1", REPLICATED, "avgpool"),
    "shards-2": (OTHER_USER, "p2", REPLICATED, "layer2"),
    "coded": (USER, "p2", CODED, "avgpool"),
    PARTS: (OTHER_USER, "p1", REPLICATED, "layer2"),
}
"""User, proxy, policy and freeze point.  ``parts`` reads large objects of two
segments, and loose photographs."""
COUNTS = ("failed", "wrong", "missing", "double")
"""Counts of each job that are 0 if all is well."""

Entry = dict[str, Any]


class PlainTraffic:
    """Small requests without HAPI headers, counted by method and status."""

    def __init__(self, swift: StorageHosts) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []
        self._data = os.urandom(PLAIN_BYTES)
        self._stored: list[str] = []
        self._stop = threading.Event()
        auth = f"{swift.url('p1')}/auth/v1.0"
        url, token = get_auth(auth, USER, USERS[USER][0])
        self._headers = {"X-Auth-Token": token}
        account = url.removeprefix(swift.url("p1"))
        self._urls = [f"{swift.url(name)}{account}" for name in PROXIES]
        for policy in (REPLICATED, CODED):
            self._headers["X-Storage-Policy"] = policy
            self._send("PUT", f"/{policy}").raise_for_status()
        self._names = [
            f"/{(REPLICATED, CODED)[number % 2]}/{number}"
            for number in range(PLAIN_OBJECTS)
        ]
        for name in self._names:
            self._send("PUT", name, data=self._data).raise_for_status()
        self._thread = threading.Thread(target=self._run)

    def _send(
        self, method: str, name: str, number: int = 0, data: bytes = b""
    ) -> requests.Response:
        return requests.request(
            method,
            self._urls[number % len(self._urls)] + name,
            data=data,
            headers=self._headers,
            timeout=PLAIN_TIMEOUT_SECONDS,
        )

    def _run(self) -> None:
        methods = ("GET", "PUT", "HEAD", "GET", "DELETE")
        with ThreadPoolExecutor(PLAIN_THREADS) as pool:
            for number in itertools.count():
                if self._stop.wait(PLAIN_SECONDS):
                    return
                name = self._names[number // 5 % PLAIN_OBJECTS]
                pool.submit(self._count, methods[number % 5], name, number)

    def _count(self, method: str, name: str, number: int) -> None:
        data = b""
        if method == "PUT":
            name, data = f"{name}-{number}", self._data
        elif method == "DELETE":
            if not self._stored:
                return
            name = self._stored.pop(0)
        begun = time.monotonic()
        try:
            answer = self._send(method, name, number, data)
            outcome = str(answer.status_code)
            if method == "GET" and answer.ok and answer.content != self._data:
                outcome = "wrong body"
            if method == "PUT" and answer.ok:
                self._stored.append(name)
        except requests.RequestException as error:
            outcome = type(error).__name__
        self.counts[f"{method} {outcome}"] += 1
        self.seconds.append(time.monotonic() - begun)

    def __enter__(self) -> PlainTraffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Run:
    """One run: data, jobs, faults, daemons, and their records."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._note = clock()
        self._stop = threading.Event()
        self._begun = time.monotonic()
        self._swift = StorageHosts()
        self._puts: dict[str, Callable[[], object]] = {}
        self._faults = Faults(self._swift, self._puts, FOLDER / "old")
        self._entries: list[Entry] = []
        self._epochs: dict[str, list[Entry]] = {}
        self._num_passes = 0

    def run(self) -> dict[str, Any]:
        """Runs everything; returns the results."""
        self._note("the hosts serve")
        with ExitStack() as stack:
            stack.callback(self._swift.stop)
            tars = {name: self._tars(name) for name in JOBS}
            self._store_all(tars)
            jobs = {
                name: stack.enter_context(self._started(name)) for name in JOBS
            }
            with ThreadPoolExecutor(len(JOBS)) as pool:
                list(pool.map(partial(self._prepare, jobs, tars), JOBS))
            if self._options.without_filter:
                self._swift.remove_filter()
            with PlainTraffic(self._swift) as traffic:
                self._begun = time.monotonic()
                self._note("faults begin")
                self._harm(jobs)
            for _ in range(HEALING_PASSES):
                if self._faults.unhealed():
                    self._pass()
            unhealed = self._faults.unhealed()
        epochs = [epoch for name in jobs for epoch in self._epochs[name]]
        return {
            "jobs": {name: _sums(self._epochs[name]) for name in jobs},
            "failures": [epoch for epoch in epochs if _is_bad(epoch)],
            "epochs": epochs,
            "faults": self._entries,
            "plain": dict(sorted(traffic.counts.items())),
            "plain_seconds": {
                f"p{percent}": float(np.percentile(traffic.seconds, percent))
                for percent in (50, 99)
            },
            "passes": self._num_passes,
            "unhealed": unhealed,
            "tracebacks": _tracebacks(self._swift.logs),
            "leftovers": _leftovers(),
        }

    # -- data and jobs ----------------------------------------------------

    def _tars(self, name: str) -> list[Path]:
        folder = FOLDER / "data" / name
        folder.mkdir(parents=True)
        tars = find_tars(self._options.data)
        return write_shards(tars, folder, SAMPLES, SHARD_SAMPLES)

    def _store_all(self, tars: Mapping[str, Sequence[Path]]) -> None:
        """Stores all data twice; the first host misses the second time."""
        contents = {name: _contents(name, tars[name]) for name in JOBS}
        for name in JOBS:
            self._store(name, contents[name], turned=1)
        self._faults.keep_old()
        server = self._swift.servers["o1-object"]
        server.end(signal.SIGKILL)
        for name in JOBS:
            self._store(name, contents[name], turned=0)
        server.start()
        server.await_answer()

    def _store(
        self, name: str, contents: Mapping[str, bytes], turned: int
    ) -> None:
        """Stores objects, each with the content of a later one."""
        user, proxy, policy, _ = JOBS[name]
        auth = f"{self._swift.url(proxy)}/auth/v1.0"
        swift = Connection(auth, user, USERS[user][0])
        account = f"AUTH_{user.partition(':')[0]}"
        for container in (name, f"{name}-loose", f"{name}-segments"):
            swift.put_container(container, {"X-Storage-Policy": policy})
        data = [*contents.values()]
        for path, content in zip(
            contents, data[turned:] + data[:turned], strict=True
        ):
            put = partial(swift.put_object, *path.split("/"), content)
            put()
            self._puts[f"{account}/{path}"] = put
        segments = [body for body in contents if "segments" in body]
        for pair in zip(segments[::2], segments[1::2], strict=True):
            manifest = json.dumps([{"path": f"/{tar}"} for tar in pair])
            key = pair[0].partition("/")[2].removesuffix("-0")
            query = "multipart-manifest=put"
            swift.put_object(name, key, manifest, query_string=query)

    def _started(self, name: str) -> Remote:
        with (self._swift.logs / f"job-{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.testbed.checked_job"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )
        return Remote(process, name)

    def _prepare(
        self,
        jobs: Mapping[str, Remote],
        tars: Mapping[str, Sequence[Path]],
        name: str,
    ) -> None:
        user, proxy, _, freeze = JOBS[name]
        places = [name, f"{name}-loose"] if name == PARTS else [name]
        samples = jobs[name].ask(
            "prepare",
            seconds=PREPARE_SECONDS,
            login=(
                f"{self._swift.url(proxy)}/auth/v1.0",
                user,
                USERS[user][0],
            ),
            data=[f"swift://{place}" for place in places],
            tars=[str(tar) for tar in tars[name]],
            freeze=freeze,
            cut=0 if self._options.without_filter else "freeze",
            seed=len(freeze),
        )
        self._note(f"{name}: {samples} samples")

    # -- while it runs ----------------------------------------------------

    def _harm(self, jobs: Mapping[str, Remote]) -> None:
        """Runs jobs, faults and daemons until the time is over."""
        seconds, seed = self._options.seconds, self._options.seed
        planned = schedule(seed, seconds, GAP_SECONDS)
        with ThreadPoolExecutor(len(planned) + len(jobs) + 1) as pool:
            daemons = pool.submit(self._run_daemons)
            running = [pool.submit(self._fault, epoch) for epoch in planned]
            for name, job in jobs.items():
                running.append(pool.submit(self._read, name, job))
            try:
                for process in running:
                    process.result()
            finally:
                self._stop.set()
            daemons.result()

    @property
    def _now(self) -> float:
        return round(time.monotonic() - self._begun, 1)

    def _read(self, name: str, job: Remote) -> None:
        epochs = self._epochs.setdefault(name, [])
        while self._now < self._options.seconds and not self._stop.is_set():
            entry = {"job": name, "number": len(epochs), "begun": self._now}
            try:
                entry |= job.ask(
                    "epoch", seconds=EPOCH_SECONDS, number=len(epochs)
                )
            except RemoteError as error:
                entry["error"] = str(error)
            entry["ended"] = self._now
            epochs.append(entry)
            if _is_bad(entry):
                entry["faults"] = self._recent()
                sick = self._faults.unhealed()
                entry["sick"] = [row for row in sick if f"/{name}" in row]
                self._note(f"{name}: {entry}")
            if "samples" not in entry:
                return  # the process has ended or hangs

    def _recent(self) -> list[str]:
        since = self._now - RECENT_SECONDS
        return [
            f"{entry['kind']} {entry['target']} {entry['at']:.0f}-"
            f"{entry['ended']}"
            for entry in self._entries
            if LEFT_OUT not in entry["details"]
            and (entry["ended"] is None or entry["ended"] > since)
        ]

    def _fault(self, fault: Fault) -> None:
        if self._stop.wait(max(0.0, fault.at - self._now)):
            return
        entry = {**asdict(fault), "ended": None, "details": "", "error": ""}
        self._entries.append(entry)
        try:
            with self._faults.of(fault) as details:
                entry["details"] = details
                self._note(f"{fault.kind} {fault.target} {details}")
                if LEFT_OUT not in details:
                    self._stop.wait(fault.seconds)
        except Exception as error:  # recorded: a defect of this program
            traceback.print_exc()
            entry["error"] = repr(error)
        entry["ended"] = self._now

    def _run_daemons(self) -> None:
        while not self._stop.wait(PASS_SECONDS):
            self._pass()

    def _pass(self) -> None:
        self._swift.replicate()
        self._num_passes += 1


def _contents(name: str, tars: Sequence[Path]) -> dict[str, bytes]:
    """Content of a job's objects, by ``container/object``."""
    if name != PARTS:
        return {f"{name}/{path.name}": path.read_bytes() for path in tars}
    *large, loose = tars
    digests = {}
    for tar in large:
        data = tar.read_bytes()
        for number, part in enumerate(
            (data[: len(data) // 2], data[len(data) // 2 :])
        ):
            digests[f"{name}-segments/{tar.name}-{number}"] = part
    with loose.open("rb") as file:
        for sample in iter_samples(file, name=loose.name):
            key = f"{name}-loose/{sample.key}.jpg"
            digests[key] = sample.members["jpg"]
    return digests


def _is_bad(epoch: Mapping[str, Any]) -> bool:
    return bool(epoch["error"]) or any(epoch.get(key) for key in COUNTS)


def _sums(epochs: Sequence[Entry]) -> dict[str, Any]:
    total: Counter[str] = Counter(epochs=len(epochs))
    for epoch in epochs:
        numbers = {k: v for k, v in epoch.items() if isinstance(v, int)}
        total.update({**numbers, "failed": bool(epoch["error"])})
    del total["number"]
    longest = max(
        (epoch["ended"] - epoch["begun"] for epoch in epochs), default=0
    )
    return {**total, "longest_seconds": round(longest, 1)}


def _tracebacks(logs: Path) -> dict[str, dict[str, int]]:
    """Numbers of tracebacks in each log, by their last lines."""
    outcomes: dict[str, Counter[str]] = {}
    pattern = (
        r"(?m)^Traceback \(most recent call last\):.*\n(?:[ \t].*\n|\n)*(.*)"
    )
    for path in sorted(logs.glob("*.log")):
        text = path.read_text(errors="replace").replace("#012", "\n")
        for last_line in re.findall(pattern, text):
            outcomes.setdefault(path.name, Counter())[last_line[:200]] += 1
    return {name: dict(counts) for name, counts in outcomes.items()}


def _leftovers() -> list[str]:
    """Commands of the other processes of our namespace, once they are old."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):
                # Zombies have no command.
                if path.parent.name != "1" and (text := path.read_text()):
                    lines.append(text.replace("\0", " "))
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(1)


def _report(report: Mapping[str, Any]) -> int:
    """Prints the tables; returns the exit status."""
    more = ("samples", "pushed", "retries", "fallbacks", "longest_seconds")
    keys = ("epochs", *COUNTS, *more)
    rows = [
        (name, *(str(sums.get(key, 0)) for key in keys))
        for name, sums in report["jobs"].items()
    ]
    print_table("Jobs", ("job", *(k.replace("_", " ") for k in keys)), rows)
    left_out = [
        fault for fault in report["faults"] if LEFT_OUT in fault["details"]
    ]
    for title, counts in (
        ("Faults", Counter(fault["kind"] for fault in report["faults"])),
        ("Faults left out", Counter(node["kind"] for node in left_out)),
        ("Plain requests", report["plain"]),
        *((f"Tracebacks, {k}", v) for k, v in report["tracebacks"].items()),
    ):
        lines = [(key, str(count)) for key, count in sorted(counts.items())]
        print_table(title, ("", "number"), lines)
    for failure in report["failures"]:
        print(json.dumps(failure))
    for key in ("unhealed", "leftovers"):
        print(f"{key}: {report[key] or 'none'}")
    return 1 if report["failures"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("object_chaos", __doc__, data=PHOTOGRAPHS)
    add = parser.add_argument
    add("--seconds", type=float, help=f"of faults (default {SECONDS:g})")
    add("--seed", type=int, default=0, help="of the faults (default 0)")
    add("--without-filter", action="store_true", help="a Swift without HAPI")
    add("--logs", type=Path, help="folder to which the logs are copied")
    options = parse(parser, argv)
    if options.seconds is None:
        options.seconds = QUICK_SECONDS if options.quick else SECONDS
    words = sys.argv[1:] if argv is None else argv
    return exit_status("object_chaos", lambda: _run(options, words))


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    enter(words)
    try:
        report = Run(options).run()
    finally:
        if options.logs and (FOLDER / "logs").exists():
            shutil.copytree(FOLDER / "logs", options.logs, dirs_exist_ok=True)
    names = ("seconds", "seed", "quick", "without_filter")
    settings = {name: getattr(options, name) for name in names}
    write_results(options.json, "object_chaos", settings, report)
    return _report(report)


if __name__ == "__main__":
    sys.exit(main())
