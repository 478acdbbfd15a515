"""CPU seconds of the filter: of one call, and of a proxy's small requests."""

from __future__ import annotations

import contextlib
import http.client
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Any
from urllib.parse import urlsplit

from swiftclient.client import get_auth

from benchmarks.ratios import rotated
from benchmarks.testbed.process_resources import scheduled_seconds
from benchmarks.testbed.proxies import SideProxy
from benchmarks.testbed.storage_process import SWIFT_FOLDER
from benchmarks.testbed.two_tiers import Testbed
from hapi_middleware.filter import filter_factory

Env = dict[str, Any]
Round = dict[str, float]

CALLS = 2000
GROUP_ROUNDS = 5
"""Number of rounds with the same proxies: two processes of one kind may differ
for as long as they live."""
SMALL_BYTES = 4096
SLICES = 50
SLICE_REQUESTS = 2
NUM_OBJECTS = 10
CONTAINER = "bench"
TIMEOUT_SECONDS = 300.0


def plain_env() -> Env:
    """WSGI environment of a plain GET at the filter's position."""
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
    """CPU seconds of a call, ``with`` and ``without`` the filter.

    The application behind the filter does nothing.
    """
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
    begun = thread_time()
    for _ in range(CALLS):
        app(env, None)
    return (thread_time() - begun) / CALLS


@dataclass
class Account:
    """Path of an account of a running Swift, and headers with a token."""

    bed: Testbed
    path: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, bed: Testbed) -> Account:
        """Logs in."""
        names = ("ST_AUTH", "ST_USER", "ST_KEY")
        url, token = get_auth(*(bed.client.environment[n] for n in names))
        return cls(bed, urlsplit(url).path, {"X-Auth-Token": token})

    def proxy(self, name: str, *, filtered: bool) -> SideProxy:
        """A proxy server in a process of its own, on the storage tier."""
        socket = self.bed.folder / "none.sock"
        changes = {"filter:hapi": {"worker_socket": str(socket)}}
        return SideProxy(
            self.bed.folder / SWIFT_FOLDER,
            self.bed.folder / name,
            changes if filtered else None,
            without=() if filtered else ("hapi",),
            start=self.bed.storage.start,
        )


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Pins this process, and the processes it starts, to cores."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


def proxy_rounds(bed: Testbed, rounds: int) -> Iterator[Round]:
    """CPU seconds of a proxy for 1,000 requests.

    ``get_…`` and ``put_…``, each ``with`` the filter, ``without`` it, and
    without it once more (``again``).
    """
    account = Account.of(bed)
    with pinned(bed.client.cores):
        for first in range(0, rounds, GROUP_ROUNDS):
            group = min(GROUP_ROUNDS, rounds - first)
            yield from _group(account, Path(f"group-{first}"), group)


def _group(account: Account, folder: Path, rounds: int) -> Iterator[Round]:
    kinds = {"without": False, "with": True, "again": False}
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, filtered in kinds.items():
            proxy = stack.enter_context(
                account.proxy(str(folder / name), filtered=filtered)
            )
            clients[name] = SmallRequests(account, proxy)
            stack.callback(clients[name].close)
            clients[name].prepare()
        for number in range(rounds + 1):
            seconds = _round(clients, rotated(list(clients), number))
            if number:  # the first warms up
                yield seconds


def _round(
    clients: Mapping[str, SmallRequests], order: Sequence[str]
) -> Round:
    sums = dict.fromkeys(
        (f"{verb}_{name}" for verb in ("get", "put") for name in clients), 0.0
    )
    for number in range(SLICES):
        for name in rotated(order, number):
            client = clients[name]
            for verb, send in (("get", client.get), ("put", client.put)):
                before = scheduled_seconds(client.pid)
                for _ in range(SLICE_REQUESTS):
                    send()
                seconds = scheduled_seconds(client.pid) - before
                sums[f"{verb}_{name}"] += seconds
    per_thousand = 1000 / (SLICES * SLICE_REQUESTS)
    return {name: value * per_thousand for name, value in sums.items()}


class SmallRequests:
    """GETs and PUTs of small objects on one persistent connection."""

    def __init__(self, account: Account, proxy: SideProxy) -> None:
        self._container = f"{account.path}/{CONTAINER}"
        self._headers = dict(account.headers)
        self._connection = http.client.HTTPConnection(
            *proxy.address, timeout=TIMEOUT_SECONDS
        )
        self._body = os.urandom(SMALL_BYTES)
        self._number = 0
        self.pid = proxy.pid

    def prepare(self) -> None:
        self._ask("PUT", self._container, None, 201, 202)
        for _ in range(NUM_OBJECTS):
            self.put()

    def get(self) -> None:
        body = self._ask("GET", self._next_path(), None, 200)
        if len(body) != SMALL_BYTES:
            raise ValueError(f"GET returned {len(body)} of {SMALL_BYTES} B")

    def put(self) -> None:
        self._ask("PUT", self._next_path(), self._body, 201)

    def _next_path(self) -> str:
        self._number += 1
        return f"{self._container}/small-{self._number % NUM_OBJECTS}"

    def _ask(
        self, method: str, path: str, body: bytes | None, *statuses: int
    ) -> bytes:
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        stored = response.read()
        if response.status not in statuses:
            raise ValueError(f"{method}: {response.status}: {stored[:500]!r}")
        return stored

    def close(self) -> None:
        self._connection.close()
