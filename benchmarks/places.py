"""Object servers that compute features, compared with the proxy's worker.

    python -m benchmarks.places --data DIR --json places.json

Three object servers hold three replicas each; two have the filter and a
worker.  Two proxies in front of them take turns: one sends source bytes to a
worker of its own (``proxy``), the other sends jobs to the object servers
(``object``).  One worker has the first core, with the proxy's own, the other
one has the second; Swift and the clients have both.

CPU milliseconds per MB of source, of the proxy and of the object servers, are
those of whole shards, of which no feature is computed.  ``span``: seconds from
a request for four samples to its last byte, and CPU seconds.  ``shard``: CPU
seconds for 60 samples, asked for by four clients at a time, and their samples
per second.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import requests
from swiftclient.client import get_auth

from benchmarks.command_line import (
    PHOTOGRAPHS,
    add_rounds,
    exit_status,
    parse,
    parser_of,
    print_table,
)
from benchmarks.ratios import ratio, summary
from benchmarks.record import write_results
from benchmarks.testbed.process_resources import scheduled_seconds
from benchmarks.testbed.proxies import SideProxy
from benchmarks.testbed.shards import find_tars, write_shards
from benchmarks.testbed.worker_process import package_model, temporary_folder
from hapi_cluster import Cluster
from hapi_protocol.shards import iter_samples

ROUNDS = 5
PATHS = ("proxy", "object")
OBJECT_SERVERS = ("object", "object-2", "object-3")
CONTAINER = "places"
MODEL = ("mobilenet_v3_small", "avgpool")
SHARDS, SHARD_SAMPLES, SPAN_SAMPLES = 8, 60, 4
FLOWS = 4
MB = 1e6
TIMEOUT_SECONDS = 120.0

Round = dict[str, float]


@dataclass(frozen=True)
class Span:
    """Samples of a shard, and their bytes."""

    shard: str
    etag: str
    first: int
    last: int
    begin: int
    end: int

    def headers(self) -> dict[str, str]:
        return {
            "X-Hapi-Samples": f"{self.first}-{self.last}",
            "X-Hapi-Range": f"bytes={self.begin}-{self.end - 1}",
            "X-Hapi-If-Source-Etag": self.etag,
        }


class Bench:
    """Measures both paths of a running cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        environment = cluster.environment
        url, self._token = get_auth(
            *(environment[name] for name in ("ST_AUTH", "ST_USER", "ST_KEY"))
        )
        self._cluster = cluster
        self._account = "/v1" + url.partition("/v1")[2]
        self._folder = folder
        self._proxies: dict[str, SideProxy] = {}
        self._headers: dict[str, str] = {}
        self._spans: list[Span] = []
        self._source_bytes = 0

    def prepare(self, stack: ExitStack, tars: Sequence[Path]) -> None:
        """Starts the proxies, pins the workers and stores the data."""
        for path in PATHS:
            changes = {"filter:hapi": {"places": path}}
            proxy = SideProxy(
                self._cluster.directory, self._folder / path, changes
            )
            self._proxies[path] = stack.enter_context(proxy)
        cores = sorted(os.sched_getaffinity(0))
        for name, core in (
            ("worker", cores[0]),
            ("object-worker", cores[0]),
            ("object-2-worker", cores[-1]),
        ):
            _pin(self._pid(name), core)
        self._put(CONTAINER, b"")
        package, cut = package_model(self._folder, *MODEL)
        name = f"{CONTAINER}/{package.name}"
        self._put(name, package.read_bytes())
        account = self._account.rpartition("/")[2]
        self._headers = {
            "X-Hapi-Model": f"/{account}/{name}",
            "X-Hapi-Cut": str(cut),
        }
        for shard in write_shards(
            tars, self._folder, SHARDS * SHARD_SAMPLES, SHARD_SAMPLES
        ):
            etag = self._put(f"{CONTAINER}/{shard.name}", shard.read_bytes())
            self._source_bytes += shard.stat().st_size
            with shard.open("rb") as file:
                ends = [
                    (each.offset, each.offset + each.length)
                    for each in iter_samples(file, name=shard.name)
                ]
            for first in range(0, len(ends), SPAN_SAMPLES):
                last = min(first + SPAN_SAMPLES, len(ends)) - 1
                place = ends[first][0], ends[last][1]
                self._spans.append(Span(shard.name, etag, first, last, *place))

    def rounds(self, count: int) -> Iterator[Round]:
        """Measures each path once a round, in turn; the first is dropped."""
        for number in range(count + 1):
            found: Round = {}
            paths = PATHS if number % 2 else PATHS[::-1]
            for path in paths:
                found |= {
                    f"{path}_{key}": value
                    for key, value in self._measure(path).items()
                }
            if number:
                yield found

    def _measure(self, path: str) -> Round:
        before = self._cpu_seconds(path)
        for shard in sorted({each.shard for each in self._spans}):
            self._get(path, {"X-Hapi-Index": "true"}, shard)
        spent = self._cpu_seconds(path)
        megabytes = self._source_bytes / MB
        per_mb = {
            f"{name}_cpu_ms_per_mb": 1e3
            * (spent[name] - before[name])
            / megabytes
            for name in spent
        }
        seconds = []
        spans = self._spans[::2]
        before = self._cpu_seconds(path)
        for span in spans:
            begun = time.monotonic()
            self._ask(path, span)
            seconds.append(time.monotonic() - begun)
        spent = self._cpu_seconds(path)
        per_span = {
            f"span_{name}_cpu_seconds": (spent[name] - before[name])
            / len(spans)
            for name in spent
        }
        shards = 2 * sorted({each.shard for each in self._spans})
        before = self._cpu_seconds(path)
        begun = time.monotonic()
        with ThreadPoolExecutor(FLOWS) as pool:
            list(pool.map(partial(self._get, path, {}), shards))
        seconds_of_all = time.monotonic() - begun
        spent = self._cpu_seconds(path)
        per_shard = {
            f"shard_{name}_cpu_seconds": (spent[name] - before[name])
            / len(shards)
            for name in spent
        }
        return {
            **per_mb,
            **per_span,
            **per_shard,
            "span_p50_seconds": float(np.percentile(seconds, 50)),
            "span_p99_seconds": float(np.percentile(seconds, 99)),
            "samples_per_second": len(shards) * SHARD_SAMPLES / seconds_of_all,
        }

    def _ask(self, path: str, span: Span) -> None:
        self._get(path, span.headers(), span.shard)

    def _cpu_seconds(self, path: str) -> dict[str, float]:
        return {
            "proxy": scheduled_seconds(self._proxies[path].pid),
            "object_servers": sum(
                scheduled_seconds(self._pid(name)) for name in OBJECT_SERVERS
            ),
        }

    def _pid(self, name: str) -> int:
        return int(self._cluster.status()["children"][name]["pid"])

    def _get(self, path: str, options: Mapping[str, str], name: str) -> None:
        url = f"{self._proxies[path].url}{self._account}/{CONTAINER}/{name}"
        asked = {} if "X-Hapi-Index" in options else self._headers
        answer = requests.get(
            url,
            headers={"X-Auth-Token": self._token, **asked, **options},
            timeout=TIMEOUT_SECONDS,
        )
        if answer.status_code != 200:
            raise ValueError(f"{path}: {name}: {answer.text[:300]}")

    def _put(self, name: str, data: bytes) -> str:
        answer = requests.put(
            f"{self._proxies[PATHS[0]].url}{self._account}/{name}",
            data,
            headers={"X-Auth-Token": self._token},
            timeout=TIMEOUT_SECONDS,
        )
        answer.raise_for_status()
        return answer.headers.get("ETag", "").strip('"')


def judge(rounds: Sequence[Round]) -> dict[str, Any]:
    """Figures of both paths, and those of ``object`` over ``proxy``."""
    found: dict[str, Any] = {}
    names = [key.partition("_")[2] for key in rounds[0]]
    for name in dict.fromkeys(names):
        values = {
            path: [each[f"{path}_{name}"] for each in rounds] for path in PATHS
        }
        found[name] = {
            **{path: summary(values[path]) for path in PATHS},
            "ratio": ratio(values["object"], values["proxy"]),
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("places", __doc__, data=PHOTOGRAPHS)
    add_rounds(parser, ROUNDS)
    options = parse(parser, argv)
    return exit_status("places", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    tars = find_tars(options.data)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        cluster = stack.enter_context(
            Cluster.temporary(
                layout="replicated",
                object_servers=3,
                object_workers=2,
                worker_options={"device": "cpu", "decode_threads": "1"},
            )
        )
        bench = Bench(cluster, folder)
        bench.prepare(stack, tars)
        rounds = []
        for found in bench.rounds(options.rounds):
            rounds.append(found)
            text = (f"{key} {value:.3g}" for key, value in found.items())
            print(", ".join(text), flush=True)
    figures = judge(rounds)
    print_table(
        "Object servers compared with the proxy's worker",
        ("figure", *PATHS, "object / proxy", "interval"),
        [
            (
                name,
                *(f"{found[path]['median']:.4g}" for path in PATHS),
                f"{found['ratio']['median']:.3f}",
                " … ".join(f"{x:.3f}" for x in found["ratio"]["interval"]),
            )
            for name, found in figures.items()
        ],
    )
    write_results(
        options.json,
        "places",
        {"quick": options.quick, "rounds": options.rounds},
        {"figures": figures, "rounds": rounds},
    )
    return 0


def _pin(pid: int, core: int) -> None:
    """Pins a process's threads, and those that they start, to a core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


if __name__ == "__main__":
    sys.exit(main())
