"""Object servers that compute features, compared with the proxy's worker.

    python -m benchmarks.places --data DIR --json places.json

Three object servers, each with a worker and a replica of every object that is
measured, and a worker of the proxies.  One proxy sends source bytes to its
worker (``proxy``), another sends jobs to the object servers (``object``).
The proxies' worker and the first object server's have the first core, the
other ones the last; Swift and the clients have both.

Keys of the JSON; all ratios are ``object`` over ``proxy``, rounds interleaved:

figures        each with ``proxy``, ``object`` and ``ratio``:
  *_cpu_ms_per_mb      CPU milliseconds of proxy or object servers per MB of
                       source: whole shards, without features (their indexes)
  span_*_cpu_seconds   the same for four samples
  shard_*_cpu_seconds  and for 60 samples, asked for by four clients
  span_p50_seconds     from a request for four samples to its last byte;
                       also p99
  samples_per_second   of the four clients
storage_bytes  for each kind of object, bytes from object servers to proxies
               and back, for three spans, or for one index or 60 objects; here
               both proxies may use the worker of their host (``object, proxy``
               and ``proxy``).
               ``features``: bytes that the client gets
healthcheck    seconds to answer /healthcheck of an object server with no, one
               and two jobs that read objects of 200 MB there; ``cpu_share``:
               its part of the CPU seconds of all object servers
growth         resident bytes and open descriptors of processes after 500 and
               after 5,000 more requests, most for one sample; ``series``:
               bytes at each tenth
choice         samples per second of 12 clients, with the shorter queue and
               with the hash alone.  Workers may run for a part of the time, as
               with a CPU quota: ``equal`` a quarter of a core for each,
               ``one_slow`` a twelfth for the third
goals          claims that held
"""

from __future__ import annotations

import argparse
import http.client
import io
import itertools
import os
import random
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import (
    PHOTOGRAPHS,
    add_rounds,
    clock,
    exit_status,
    parse,
    parser_of,
    print_goals,
    print_table,
)
from benchmarks.micro.object_kinds import (
    OBJECT_SERVERS,
    SPAN_SAMPLES,
    TIMEOUT_SECONDS,
    Ask,
    Shard,
    User,
    store_kinds,
)
from benchmarks.ratios import ratio, rotated, summary
from benchmarks.record import write_results
from benchmarks.testbed.counted_links import CountedLink, place_devices
from benchmarks.testbed.process_resources import (
    scheduled_seconds,
    status_bytes,
)
from benchmarks.testbed.proxies import SideProxy
from benchmarks.testbed.shards import find_tars, write_shards
from benchmarks.testbed.worker_process import package_model, temporary_folder
from hapi_cluster import Cluster
from hapi_cluster.configs import BACKEND_HOST
from hapi_protocol.headers import HEADER_IF_SOURCE_ETAG

ROUNDS, BYTES_ROUNDS, BYTES_SPANS = 5, 2, 3
PATHS = ("proxy", "object")
WORKERS = tuple(f"{name}-worker" for name in OBJECT_SERVERS)
PLAIN = {"without": ("keymaster", "encryption")}
HASH_ALONE = "import hapi_middleware.places.places as it; it.SLACK = 10**6"
MODEL = ("mobilenet_v3_small", "avgpool")
SHARDS, SHARD_SAMPLES = 4, 60
INDEX = {"X-Hapi-Index": "true"}
FLOWS = 4
MB = 1e6
LARGE_BYTES, POLL_SECONDS = 200_000_000, 0.005
HEALTH_SECONDS = 5.0
CHOOSERS, CHOICE_SECONDS, CHOICE_WARM_SECONDS = 12, 20.0, 1.5
PROXY_OF = {"shorter_queue": "object", "hash_alone": "hash"}
QUOTA_SECONDS = 0.1
"""Period of a quota; that of Linux's ``cpu.max``."""
QUOTAS: Mapping[str, Sequence[float]] = {
    "equal": (1 / 4, 1 / 4, 1 / 4),
    "one_slow": (1 / 4, 1 / 4, 1 / 12),
}
GROWTH_REQUESTS, GROWTH_WARM_REQUESTS, GROWTH_STEPS = 5000, 500, 10
NOT_MIXED = (
    "plain_first_cut",
    "slo_small_segments",
    "encrypted",
    "many_encrypted",
)
MAX_STORAGE_RATIO, MAX_CPU_RATIO, MAX_HEALTH_SECONDS = 1.05, 0.4, 0.05
QUICK = 20
"""Times by which a quick run is shorter."""

Round = dict[str, float]


class Bench:
    """Measures both paths of a running cluster."""

    def __init__(self, cluster: Cluster, folder: Path, speed: int) -> None:
        self._cluster, self._folder, self._speed = cluster, folder, speed
        self._proxies: dict[str, SideProxy] = {}
        self._kinds: dict[str, list[Ask]] = {}
        self._model: dict[str, str] = {}
        self._shards: list[str] = []
        self._spans: list[Ask] = []
        self._source_bytes = 0

    def prepare(
        self,
        stack: ExitStack,
        tars: Sequence[Path],
        links: Mapping[str, CountedLink],
    ) -> None:
        """Starts the proxies, pins the workers and stores the data."""
        self._links = links
        ports = self._cluster.status()["ports"]
        for name, link in links.items():
            link.far_port = ports[name]
        own, counted = (
            place_devices(self._cluster, self._folder / name, numbers)
            for name, numbers in (
                ("own", [ports[name] for name in links]),
                ("counted", [counter.port for counter in links.values()]),
            )
        )
        for name, places, directory, options in (
            ("proxy", "proxy", own, PLAIN),
            ("object", "object", own, PLAIN),
            ("hash", "object", own, {**PLAIN, "prepare": HASH_ALONE}),
            ("counted-proxy", "proxy", counted, {}),
            ("counted-object", "object, proxy", counted, {}),
        ):
            changes = {
                "DEFAULT": {"swift_dir": str(directory / "etc")},
                "filter:hapi": {"places": places},
            }
            folder = self._folder / f"{name}-proxy"
            proxy = SideProxy(directory, folder, changes, **options)
            self._proxies[name] = stack.enter_context(proxy)
        cores = sorted(os.sched_getaffinity(0))
        for name in ("worker", *WORKERS):
            is_first = name in ("worker", WORKERS[0])
            _pin(self._pid(name), cores[0 if is_first else -1])
        self._user = user = User(
            self._cluster, own / "etc", self._proxies["proxy"].url
        )
        user.container("places")
        package, cut = package_model(self._folder, *MODEL)
        path = "/places/model"
        user.put(path, package.read_bytes())
        self._model = {
            "X-Hapi-Model": f"/{user.account}{path}",
            "X-Hapi-Cut": str(cut),
        }
        samples = max(1, SHARDS // self._speed) * SHARD_SAMPLES
        for file in write_shards(tars, self._folder, samples, SHARD_SAMPLES):
            shard = Shard(file.read_bytes())
            path = f"/places/{file.stem}"
            etag = user.put(path, shard.content)
            self._shards.append(path)
            self._source_bytes += len(shard.content)
            self._spans += shard.spans(path, etag, self._model)
        self._shard = shard
        encrypting_url = self._proxies["counted-proxy"].url
        self._kinds = store_kinds(user, shard, self._model, encrypting_url)

    # -- figures ----------------------------------------------------------

    def rounds(self, count: int) -> Iterator[Round]:
        """Measures each path once a round, in turn; the first is dropped."""
        for number in range(count + 1):
            measured: Round = {}
            for path in rotated(PATHS, number):
                measured |= {
                    f"{path}_{key}": value
                    for key, value in self._measure(path).items()
                }
            if number:
                yield measured

    def _measure(self, path: str) -> Round:
        before = self._cpu_seconds(path)
        for shard in self._shards:
            self._ask(path, Ask(shard, INDEX))
        spent = self._cpu_seconds(path)
        megabytes = self._source_bytes / MB
        per_mb = {
            f"{name}_cpu_ms_per_mb": 1e3
            * (spent[name] - before[name])
            / megabytes
            for name in spent
        }
        seconds = []
        spans = self._spans
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
        shards = [Ask(path, self._model) for path in 2 * self._shards]
        before = self._cpu_seconds(path)
        begun = time.monotonic()
        with ThreadPoolExecutor(FLOWS) as pool:
            list(pool.map(partial(self._ask, path), shards))
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

    def _ask(self, proxy: str, ask: Ask) -> bytes:
        return self._user.ask(self._proxies[proxy].url, ask)

    def _cpu_seconds(self, path: str) -> dict[str, float]:
        return {
            "proxy": scheduled_seconds(self._proxies[path].pid),
            "object_servers": sum(
                scheduled_seconds(self._pid(name)) for name in OBJECT_SERVERS
            ),
        }

    def _pid(self, name: str) -> int:
        return int(self._cluster.status()["children"][name]["pid"])

    # -- storage bytes ----------------------------------------------------

    def storage_bytes(self, count: int) -> dict[str, Any]:
        """Bytes of each kind; the first round brings packages."""
        report: dict[str, Any] = {}
        for kind, all_asks in self._kinds.items():
            asks = all_asks[: max(1, BYTES_SPANS // self._speed)]
            rounds = []
            for number in range(count + 1):
                order = random.Random(number).sample(asks, len(asks))
                rounds.append(
                    {
                        path: self._crossed(f"counted-{path}", order)
                        for path in rotated(PATHS, number)
                    }
                )
            sums = [
                {path: trial[path][0] for path in PATHS} for trial in rounds
            ]
            report[kind] = {
                **compare("object", "proxy", sums[1:]),
                "features": rounds[-1]["object"][1],
            }
        return report

    def _crossed(self, proxy: str, asks: Sequence[Ask]) -> tuple[int, int]:
        """Bytes between proxies and object servers, and of the answers."""
        before = sum(link.num_bytes for link in self._links.values())
        features = sum(len(self._ask(proxy, ask)) for ask in asks)
        after = sum(link.num_bytes for link in self._links.values())
        return after - before, features

    # -- health -----------------------------------------------------------

    def healthcheck(self, count: int) -> dict[str, Any]:
        """Seconds of health checks of the first object server."""
        port = self._cluster.status()["ports"][OBJECT_SERVERS[0]]
        shard = _large_shard(LARGE_BYTES // self._speed)
        paths = []
        for number in itertools.count():
            path = f"/places/large-{number}"
            if self._user.first_choice(path) == port:
                self._user.put(path, shard)
                paths.append(path)
            if len(paths) == 2:
                break
        names = {"no_job": 0, "one_job": 1, "two_jobs": 2}
        rounds = []
        for number in range(count + 1):
            rounds.append(
                {
                    name: self._health(port, paths[: names[name]])
                    for name in rotated([*names], number)
                }
            )
        return {
            name: {
                key: summary([trial[name][key] for trial in rounds[1:]])
                for key in rounds[0][name]
            }
            for name in names
        }

    def _health(self, port: int, paths: Sequence[str]) -> Round:
        end = time.monotonic() + HEALTH_SECONDS / self._speed
        begun = time.monotonic()

        def read(path: str) -> int:
            for number in itertools.count(1):
                self._ask("object", Ask(path, INDEX))
                if time.monotonic() > end:
                    return number
            raise AssertionError("count() has no end")

        before = [scheduled_seconds(self._pid(n)) for n in OBJECT_SERVERS]
        waits = []
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(read, path) for path in paths]
            while time.monotonic() < end or not all(
                process.done() for process in running
            ):
                waits.append(_healthcheck_seconds(port))
                time.sleep(POLL_SECONDS)
            num_jobs = sum(process.result() for process in running)
        spent = [
            scheduled_seconds(self._pid(name)) - count
            for name, count in zip(OBJECT_SERVERS, before, strict=True)
        ]
        read_bytes = num_jobs * LARGE_BYTES / self._speed
        return {
            "p50_seconds": float(np.percentile(waits, 50)),
            "p99_seconds": float(np.percentile(waits, 99)),
            "longest_seconds": max(waits),
            "mb_per_second": read_bytes / MB / (time.monotonic() - begun),
            "cpu_share": spent[0] / sum(spent),
            "load_average": os.getloadavg()[0],
        }

    # -- growth -----------------------------------------------------------

    def growth(self) -> dict[str, Any]:
        """Memory and descriptors of all processes during many requests."""
        asks = []
        for kind, spans in self._kinds.items():
            etag = spans[0].headers.get(HEADER_IF_SOURCE_ETAG)
            if kind in NOT_MIXED:
                continue
            asks += (
                self._shard.spans(spans[0].path, etag, self._model, 1)
                if etag
                else spans
            )
        random.Random(0).shuffle(asks)
        endless = itertools.cycle(asks)
        pids = {
            "proxy": self._proxies["object"].pid,
            **{name: self._pid(name) for name in (*OBJECT_SERVERS, *WORKERS)},
        }

        def send(count: int) -> dict[str, Any]:
            with ThreadPoolExecutor(FLOWS) as pool:
                some = itertools.islice(endless, count // self._speed)
                list(pool.map(partial(self._ask, "object"), some))
            time.sleep(1)
            return {name: _resources(pid) for name, pid in pids.items()}

        series = [send(GROWTH_WARM_REQUESTS)]
        for _ in range(GROWTH_STEPS):
            series.append(send(GROWTH_REQUESTS // GROWTH_STEPS))
        return {
            name: {
                **{
                    f"{key}_{when}": series[number][name][key]
                    for key in series[0][name]
                    for when, number in (("before", 0), ("after", -1))
                },
                "series": [rates[name]["resident_bytes"] for rates in series],
            }
            for name in pids
        }

    # -- choice of the replica --------------------------------------------

    def choice(self, count: int) -> dict[str, Any]:
        """Samples per second with the shorter queue and the hash alone."""
        report: dict[str, Any] = {}
        for case, parts in QUOTAS.items():
            quotas = dict(zip(map(self._pid, WORKERS), parts, strict=True))
            with _quotas(quotas):
                rounds = [
                    {
                        name: self._closed_loop(PROXY_OF[name], number)
                        for name in rotated([*PROXY_OF], number)
                    }
                    for number in range(count + 1)
                ]
            report[case] = compare(*PROXY_OF, rounds[1:])
        return report

    def _closed_loop(self, proxy: str, seed: int) -> float:
        """Samples per second of clients that always have a span under way."""
        order = random.Random(seed).sample(self._spans, len(self._spans))
        spans = itertools.cycle(order)
        lock = threading.Lock()
        speed = min(self._speed, 8)  # a few spans with any quota
        begin = time.monotonic() + CHOICE_WARM_SECONDS / speed
        end = begin + CHOICE_SECONDS / speed

        def run(_: int) -> int:
            done = 0
            while time.monotonic() < end:
                with lock:
                    span = next(spans)
                self._ask(proxy, span)
                done += begin < time.monotonic() < end
            return done

        with ThreadPoolExecutor(CHOOSERS) as pool:
            total = sum(pool.map(run, range(CHOOSERS)))
        return total * SPAN_SAMPLES / (end - begin)


def compare(
    first: str, second: str, rounds: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Figures of two contenders, and the first over the second."""
    values = {
        name: [trial[name] for trial in rounds] for name in (first, second)
    }
    return {
        **{name: summary(rates) for name, rates in values.items()},
        "ratio": ratio(values[first], values[second]),
    }


def judge(rounds: Sequence[Round]) -> dict[str, Any]:
    """Figures of both paths, and those of ``object`` over ``proxy``."""
    names = dict.fromkeys(key.partition("_")[2] for key in rounds[0])
    return {
        name: compare(
            "object",
            "proxy",
            [
                {path: trial[f"{path}_{name}"] for path in PATHS}
                for trial in rounds
            ],
        )
        for name in names
    }


def claims(report: Mapping[str, Any]) -> dict[str, bool]:
    """The published claims, and whether they held."""
    figures = report["figures"]
    cpu = figures["proxy_cpu_ms_per_mb"]["ratio"]["median"]
    with_features = figures["shard_proxy_cpu_seconds"]["ratio"]["median"]
    health = report["healthcheck"]["one_job"]["p99_seconds"]["median"]
    return {
        **{
            f"storage bytes of {kind} at most {MAX_STORAGE_RATIO} of the"
            " proxy's": sizes["ratio"]["interval"][1] <= MAX_STORAGE_RATIO
            for kind, sizes in report["storage_bytes"].items()
        },
        f"proxy CPU per MB at most {MAX_CPU_RATIO}": cpu <= MAX_CPU_RATIO,
        f"the same with features at most {MAX_CPU_RATIO}": with_features
        <= MAX_CPU_RATIO,
        f"99th percentile of health checks below {MAX_HEALTH_SECONDS} s": (
            health < MAX_HEALTH_SECONDS
        ),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("places", __doc__, data=PHOTOGRAPHS)
    add_rounds(parser, ROUNDS)
    options = parse(parser, argv)
    return exit_status("places", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    tars = find_tars(options.data)
    note = clock()
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        links = {
            name: stack.enter_context(CountedLink()) for name in OBJECT_SERVERS
        }
        addresses = [f"{BACKEND_HOST}:{link.port}" for link in links.values()]
        cluster = stack.enter_context(
            Cluster.temporary(
                layout="mixed",
                object_servers=len(OBJECT_SERVERS),
                object_workers=len(OBJECT_SERVERS),
                encryption=True,
                worker_options={"device": "cpu", "decode_threads": "1"},
                object_options={"addresses": ",".join(addresses)},
            )
        )
        bench = Bench(cluster, folder, QUICK if options.quick else 1)
        bench.prepare(stack, tars, links)
        count = options.rounds
        report: dict[str, Any] = {}
        for name, measure in (
            ("storage_bytes", lambda: bench.storage_bytes(BYTES_ROUNDS)),
            ("rounds", lambda: list(bench.rounds(count))),
            ("healthcheck", lambda: bench.healthcheck(count)),
            ("choice", lambda: bench.choice(count)),
            ("growth", bench.growth),
        ):
            note(name)
            report[name] = measure()
            used = {"quick": options.quick, "rounds": count}
            write_results(options.json, "places", used, report)
    report["figures"] = judge(report["rounds"])
    report["goals"] = claims(report)
    _print(report)
    print_goals(report["goals"])
    write_results(options.json, "places", used, report)
    return 0


def _print(report: Mapping[str, Any]) -> None:
    for key, names in (
        ("figures", PATHS),
        ("storage_bytes", PATHS),
        ("choice", [*PROXY_OF]),
    ):
        rows = []
        for name, cell in report[key].items():
            low, high = cell["ratio"]["interval"]
            texts = [_text(cell[one]) for one in names]
            ratio_text = f"{cell['ratio']['median']:.3f}"
            rows.append([name, *texts, ratio_text, f"{low:.3f} … {high:.3f}"])
        print_table(key, ("", *names, "ratio", "interval"), rows)
    for key, columns in (
        ("healthcheck", report["healthcheck"]["no_job"]),
        ("growth", [*report["growth"]["proxy"]][:-1]),
    ):
        rows = [
            [name, *(_text(cell[one]) for one in columns)]
            for name, cell in report[key].items()
        ]
        print_table(key, ("", *columns), rows)


def _text(value: Any) -> str:
    number = value["median"] if isinstance(value, dict) else value
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _pin(pid: int, core: int) -> None:
    """Pins a process's threads, and those that they start, to a core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


@contextmanager
def _quotas(parts: Mapping[int, float]) -> Iterator[None]:
    """Lets processes run for a part of the time each."""
    is_over = threading.Event()

    def limit(pid: int, part: float) -> None:
        try:
            while not is_over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(QUOTA_SECONDS * (1 - part))
                os.kill(pid, signal.SIGCONT)
                time.sleep(QUOTA_SECONDS * part)
        finally:
            os.kill(pid, signal.SIGCONT)

    with ThreadPoolExecutor(max(1, len(parts))) as pool:
        running = [pool.submit(limit, *item) for item in parts.items()]
        try:
            yield
        finally:
            is_over.set()
    for process in running:
        process.result()


def _resources(pid: int) -> dict[str, int]:
    return {
        "resident_bytes": status_bytes("VmRSS", pid),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def _healthcheck_seconds(port: int) -> float:
    begun = time.monotonic()
    connection = http.client.HTTPConnection(
        BACKEND_HOST, port, timeout=TIMEOUT_SECONDS
    )
    connection.request("GET", "/healthcheck")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise ValueError(f"/healthcheck answers {answer.status}")
    return time.monotonic() - begun


def _large_shard(num_bytes: int) -> bytes:
    """A shard of so many bytes in 20 samples that are no images."""
    noise = os.urandom(num_bytes // 20)
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for number in range(20):
            member = tarfile.TarInfo(f"{number:03}.jpg")
            member.size = len(noise)
            tar.addfile(member, io.BytesIO(noise))
    return sink.getvalue()


if __name__ == "__main__":
    sys.exit(main())
