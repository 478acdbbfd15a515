"""What ``benchmarks.filter`` measures: of each part, rounds of numbers."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from benchmarks.proxies import SideProxy
from benchmarks.reading_worker import SAMPLE_BYTES
from benchmarks.storage_tier import SWIFT_FOLDER
from benchmarks.stream_client import StreamClient
from benchmarks.testbed import Testbed
from benchmarks.worker_process import running_worker

from hapi_cluster.probes import ask
from hapi_middleware.filter import filter_factory
from hapi_protocol.feature_reader import read_features

Env = dict[str, Any]
Round = dict[str, float]

CALLS = 2000
GROUP_ROUNDS = 5
SMALL_BYTES = 4096
SLICES = 50
SLICE_REQUESTS = 2
SLICE_NAMES = 10
SHARD_BYTES = 128 << 20
BUFFER_BYTES = 1 << 20
CONTAINER = "bench"
TIMEOUT_SECONDS = 300.0
SHARD_SECONDS = 240.0
ENCODING = "float32"
ACCOUNT = "AUTH_test"


# --- a call ---------------------------------------------------------------


def plain_env() -> Env:
    """The environment of a plain GET, as it comes to the filter's place."""
    names = (
        "GATEWAY_INTERFACE QUERY_STRING RAW_PATH_INFO REMOTE_ADDR REMOTE_PORT"
        " REMOTE_USER SCRIPT_NAME SERVER_NAME SERVER_PORT SERVER_PROTOCOL"
        " CONTENT_TYPE HTTP_ACCEPT HTTP_ACCEPT_ENCODING HTTP_CONNECTION"
        " HTTP_HOST HTTP_USER_AGENT HTTP_X_AUTH_TOKEN HTTP_X_TRANS_ID"
        " HTTP_X_STORAGE_TOKEN HTTP_RANGE HTTP_IF_NONE_MATCH"
        " eventlet.input eventlet.posthooks eventlet.set_idle headers_raw"
        " wsgi.errors wsgi.input wsgi.multiprocess wsgi.multithread"
        " wsgi.run_once wsgi.url_scheme wsgi.version swift.authorize"
        " swift.cache swift.clean_acl swift.infocache swift.trans_id"
        " swift.copy_hook swift.proxy_access_log_made reseller_request"
        " swift.req_info swift.log_info swift.auth_scheme"
    )
    return {
        **dict.fromkeys(names.split(), "value"),
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/v1/AUTH_test/container/object",
    }


def call_rounds(rounds: int) -> Iterator[Round]:
    """CPU seconds of a call of an application that does nothing."""
    body = [b""]

    def bare(env: Env, start_response: Any) -> list[bytes]:
        return body

    filtered = filter_factory({})(bare)
    env = plain_env()
    _timed(bare, env)
    _timed(filtered, env)
    for _ in range(rounds):
        without = _timed(bare, env)
        yield {"without": without, "with": _timed(filtered, env)}


def _timed(app: Callable[[Env, Any], Any], env: Env) -> float:
    begun = time.thread_time()
    for _ in range(CALLS):
        app(env, None)
    return (time.thread_time() - begun) / CALLS


# --- proxies --------------------------------------------------------------


@dataclass
class Store:
    """A running Swift, and how to ask it.

    Attributes:
        bed: its tiers.
        path: of the account.
        headers: a token.
    """

    bed: Testbed
    path: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, bed: Testbed) -> Store:
        """
        Raises:
            ValueError: no token.
        """
        environment = bed.client.environment
        url = urlsplit(environment["ST_AUTH"])
        assert url.hostname is not None
        assert url.port is not None
        status, found = ask(
            (url.hostname, url.port),
            "GET",
            url.path,
            {
                "X-Auth-User": environment["ST_USER"],
                "X-Auth-Key": environment["ST_KEY"],
            },
        )
        if status != 200:
            raise ValueError(f"authentication got {status}")
        path = urlsplit(found["x-storage-url"]).path
        return cls(bed, path, {"X-Auth-Token": found["x-auth-token"]})

    def proxy(
        self, name: str, socket: Path | None, **options: Any
    ) -> SideProxy:
        """A proxy server of its own process, on the storage tier's core.

        Args:
            name: of its folder.
            socket: of the worker; None for a proxy without the filter.
            options: further arguments.
        """
        changes = {"filter:hapi": {"worker_socket": str(socket)}}
        return SideProxy(
            self.bed.folder / SWIFT_FOLDER,
            self.bed.folder / name,
            changes if socket else None,
            without=() if socket else ("hapi",),
            start=self.bed.storage.start,
            **options,
        )

    def put(self, proxy: SideProxy, name: str, body: Any) -> None:
        connection = connect(proxy)
        length = (
            len(body)
            if isinstance(body, bytes)
            else os.fstat(body.fileno()).st_size
        )
        with contextlib.closing(connection):
            connection.request(
                "PUT",
                f"{self.path}/{name}",
                body,
                {**self.headers, "Content-Length": str(length)},
            )
            expect(connection.getresponse(), 201)

    def make_container(self, proxy: SideProxy) -> None:
        connection = connect(proxy)
        with contextlib.closing(connection):
            connection.request(
                "PUT", f"{self.path}/{CONTAINER}", headers=dict(self.headers)
            )
            expect(connection.getresponse(), 201, 202)


def connect(proxy: SideProxy) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(*proxy.address, timeout=TIMEOUT_SECONDS)


def expect(answer: http.client.HTTPResponse, *statuses: int) -> bytes:
    """The body.

    Raises:
        ValueError: another status.
    """
    body = answer.read()
    if answer.status not in statuses:
        raise ValueError(f"{answer.status}: {body[:500]!r}")
    return body


@contextmanager
def pinned(cores: Collection[int]) -> Iterator[None]:
    """This process, and what it starts, on some cores."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


# --- CPU seconds ----------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """Of a process, all threads, to the nanosecond (schedstat)."""
    return (
        sum(
            int(path.read_text().split()[0])
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )
        * 1e-9
    )


def cpu_rounds(bed: Testbed, rounds: int) -> Iterator[Round]:
    """CPU seconds of a proxy for 1,000 requests, by contender.

    ``get`` and ``put``, each with the filter, without it, and without it once
    more.
    """
    store = Store.of(bed)
    with pinned(bed.client.cores):
        for first in range(0, rounds, GROUP_ROUNDS):
            # Two processes of one kind may differ for as long as they live.
            group = min(GROUP_ROUNDS, rounds - first)
            yield from _cpu_group(store, f"group-{first}", group)


def _cpu_group(store: Store, folder: str, rounds: int) -> Iterator[Round]:
    nowhere = store.bed.folder / "none.sock"
    with ExitStack() as stack:
        proxies = {
            name: stack.enter_context(store.proxy(f"{folder}/{name}", socket))
            for name, socket in (
                ("without", None),
                ("with", nowhere),
                ("again", None),
            )
        }
        clients = {
            name: SmallRequests(store, proxy)
            for name, proxy in proxies.items()
        }
        store.make_container(proxies["without"])
        for client in clients.values():
            stack.callback(client.close)
            client.prepare()
        names = list(clients)
        for number in range(rounds + 1):
            turn = number % len(names)
            found = _cpu_round(clients, names[turn:] + names[:turn])
            if number:  # the first warms up
                yield found


def _cpu_round(
    clients: Mapping[str, SmallRequests], order: Sequence[str]
) -> Round:
    found = dict.fromkeys(
        (f"{verb}_{name}" for verb in ("get", "put") for name in clients), 0.0
    )
    for number in range(SLICES):
        turn = number % len(order)
        for name in (*order[turn:], *order[:turn]):
            client = clients[name]
            for verb, send in (("get", client.get), ("put", client.put)):
                before = cpu_seconds(client.pid)
                for _ in range(SLICE_REQUESTS):
                    send()
                found[f"{verb}_{name}"] += cpu_seconds(client.pid) - before
    per_thousand = 1000 / (SLICES * SLICE_REQUESTS)
    return {name: value * per_thousand for name, value in found.items()}


class SmallRequests:
    """GETs and PUTs of small objects on one connection that is kept."""

    def __init__(self, store: Store, proxy: SideProxy) -> None:
        self._path = f"{store.path}/{CONTAINER}"
        self._headers = dict(store.headers)
        self._connection = connect(proxy)
        self._body = os.urandom(SMALL_BYTES)
        self._number = 0
        self.pid = proxy.pid

    def prepare(self) -> None:
        for _ in range(SLICE_NAMES):
            self.put()
        self._number = 0

    def get(self) -> None:
        body = self._ask("GET", None, 200)
        if len(body) != SMALL_BYTES:
            raise ValueError(f"{len(body)} bytes of {SMALL_BYTES} came")

    def put(self) -> None:
        self._ask("PUT", self._body, 201)

    def _ask(self, method: str, body: bytes | None, status: int) -> bytes:
        self._number += 1
        self._connection.request(
            method,
            f"{self._path}/small-{self._number % SLICE_NAMES}",
            body,
            self._headers,
        )
        return expect(self._connection.getresponse(), status)

    def close(self) -> None:
        self._connection.close()


# --- bytes ----------------------------------------------------------------


def byte_rounds(
    bed: Testbed, rounds: int, shard_bytes: int = SHARD_BYTES
) -> Iterator[Round]:
    """Bytes of a source per second, plain and to a worker that only reads.

    ``plain`` and ``features`` by one proxy, which has the filter, and
    ``again``, plain once more.
    """
    store = Store.of(bed)
    socket = bed.folder / "reading.sock"
    with ExitStack() as stack:
        stack.enter_context(pinned(bed.client.cores))
        stack.enter_context(reading_worker(socket))
        proxy = stack.enter_context(store.proxy("bytes", socket))
        store.make_container(proxy)
        store.put(proxy, f"{CONTAINER}/model", bytes(1024))
        store.put(proxy, f"{CONTAINER}/shard", os.urandom(shard_bytes))
        asked = annotation(f"{CONTAINER}/model")
        ways: dict[str, Mapping[str, str]] = {
            "plain": {},
            "features": asked,
            "again": {},
        }
        names = list(ways)
        for number in range(rounds + 1):
            turn = number % len(names)
            found = {
                name: shard_bytes
                / _read_seconds(store, proxy, ways[name], shard_bytes)
                for name in names[turn:] + names[:turn]
            }
            if number:
                yield found


@contextmanager
def reading_worker(socket: Path) -> Iterator[None]:
    """``benchmarks.reading_worker`` on the cores of this process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.reading_worker", str(socket)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError("benchmarks.reading_worker did not start")
            time.sleep(0.05)
        yield
    finally:
        process.stdin.close()
        process.wait(TIMEOUT_SECONDS)


def annotation(model: str, cut: int = 1) -> dict[str, str]:
    return {"X-Hapi-Model": quote(model), "X-Hapi-Cut": str(cut)}


def _read_seconds(
    store: Store, proxy: SideProxy, headers: Mapping[str, str], size: int
) -> float:
    connection = connect(proxy)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    total = 0
    with contextlib.closing(connection):
        begun = time.monotonic()
        connection.request(
            "GET",
            f"{store.path}/{CONTAINER}/shard",
            headers={**store.headers, **headers},
        )
        answer = connection.getresponse()
        if answer.status != 200:
            expect(answer, 200)
        while got := answer.readinto(buffer):
            total += got
        seconds = time.monotonic() - begun
    least = size // SAMPLE_BYTES if headers else size
    if total < least:
        raise ValueError(f"{total} bytes came, of {least}")
    return seconds


# --- samples --------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a worker is to do: files of package and shard."""

    package: Path
    cut: int
    shard: Path
    num_samples: int


def sample_rounds(
    bed: Testbed, rounds: int, work: Work, options: Sequence[str]
) -> Iterator[Round]:
    """Samples per second of a worker: ``straight``, and through ``swift``.

    The worker has the client tier's core for itself; the client is on that of
    Swift.
    """
    store = Store.of(bed)
    with ExitStack() as stack:
        with pinned(bed.client.cores):
            socket = stack.enter_context(
                running_worker(bed.folder, "cpu", options)
            )
        stack.enter_context(pinned(bed.storage.cores))
        proxy = stack.enter_context(store.proxy("samples", socket))
        store.make_container(proxy)
        for name, path in (("model", work.package), ("shard", work.shard)):
            with path.open("rb") as file:
                store.put(proxy, f"{CONTAINER}/{name}", file)
        client = StreamClient()
        client.open(
            str(socket),
            ACCOUNT,
            str(work.package),
            str(work.shard),
            work.cut,
            ENCODING,
        )
        ways = {
            "straight": lambda: _straight_seconds(client),
            "swift": lambda: _swift_seconds(store, proxy, work),
        }
        names = list(ways)
        for number in range(rounds + 1):
            turn = number % len(names)
            found = {
                name: work.num_samples / ways[name]()
                for name in names[turn:] + names[:turn]
            }
            if number:
                yield found


def _straight_seconds(client: StreamClient) -> float:
    begun = time.monotonic()
    client.work(begun, streams=1, shards=1, limit=SHARD_SECONDS)
    return time.monotonic() - begun


def _swift_seconds(store: Store, proxy: SideProxy, work: Work) -> float:
    connection = connect(proxy)
    with contextlib.closing(connection):
        begun = time.monotonic()
        connection.request(
            "GET",
            f"{store.path}/{CONTAINER}/shard",
            headers={
                **store.headers,
                **annotation(f"{CONTAINER}/model", work.cut),
            },
        )
        answer = connection.getresponse()
        if answer.status != 200:
            expect(answer, 200)
        rows = [row for batch in read_features(answer) for row in batch.rows]
        answer.read()
        seconds = time.monotonic() - begun
    failed = [row.error for row in rows if row.error]
    if failed or len(rows) != work.num_samples:
        raise ValueError(f"{len(rows)} rows of {work.num_samples}: {failed}")
    return seconds
