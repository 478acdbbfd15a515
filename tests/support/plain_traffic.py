"""Plain requests to a Swift while a test does something else."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAUSE_SECONDS = 0.01
JOIN_SECONDS = 180.0
TIMEOUT_SECONDS = 120.0

Address = tuple[str, int]
Answer = tuple[int, bytes]
"""Status and body."""


class NotAnsweredError(OSError):
    """The server ended a connection before an answer began.

    Attributes:
        is_reset: the connection was reset, not closed.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(repr(cause))
        self.is_reset = not isinstance(cause, http.client.RemoteDisconnected)


@dataclass(frozen=True)
class Request:
    """A request that is repeated.

    Attributes:
        method: its method.
        path: its path; ``{}`` becomes a number.
        body: its body.
        expected: expected body of the response; None for any.
    """

    method: str
    path: str
    body: bytes = b""
    expected: bytes | None = None


class PlainTraffic:
    """Sends the requests in turn, by two threads, until its block ends.

    One thread opens a connection for each request; the other keeps its
    connection, and repeats a request on a new one if the server closed the
    old one between two requests, as HTTP clients do (RFC 9112, 9.3.1).

    Args:
        address: address of the proxy.
        headers: headers of each request.
        requests: requests to repeat.
        repeats_resets: repeat a request, instead of recording a failure, if
            its new connection is reset before a response starts.

    Attributes:
        failures: descriptions of failures.
        resets: number of requests that were repeated after a reset.
        count: number of requests answered.
        longest_seconds: duration of the slowest request.
    """

    def __init__(
        self,
        address: Address,
        headers: Mapping[str, str],
        requests: Sequence[Request],
        *,
        repeats_resets: bool = False,
    ) -> None:
        self._address = address
        self._headers = dict(headers)
        self._requests = requests
        self._repeats_resets = repeats_resets
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.resets = 0
        self.count = 0
        self.longest_seconds = 0.0
        self._threads = [
            threading.Thread(target=self._run, args=(send,))
            for send in (self._send_alone, PersistentConnection(address).send)
        ]

    def _run(self, send: Callable[..., Answer]) -> None:
        for number in itertools.count():
            if self._stop.is_set():
                return
            request = self._requests[number % len(self._requests)]
            started = time.monotonic()
            try:
                self._check(request, *self._answer(send, request, number))
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"{request.method}: {error!r}")
            self.count += 1
            took = time.monotonic() - started
            self.longest_seconds = max(self.longest_seconds, took)
            time.sleep(PAUSE_SECONDS)

    def _answer(
        self, send: Callable[..., Answer], request: Request, number: int
    ) -> Answer:
        try:
            return send(request, self._headers, number)
        except NotAnsweredError as error:
            if not (self._repeats_resets and error.is_reset):
                raise
            self.resets += 1
            return send(request, self._headers, number)

    def _check(self, request: Request, status: int, body: bytes) -> None:
        is_right = request.expected in (None, body)
        if not 200 <= status < 300 or not is_right:
            self.failures.append(
                f"{request.method} {request.path}: {status}, {body[:200]!r}"
            )

    def _send_alone(self, *arguments: Any) -> Answer:
        connection = connect(self._address)
        try:
            return exchange(connection, *arguments)
        finally:
            connection.close()

    def __enter__(self) -> PlainTraffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
            assert not thread.is_alive(), "a plain request hangs"


class PersistentConnection:
    """A connection that stays open between requests."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection = connect(address)

    def send(self, *arguments: Any) -> Answer:
        try:
            return exchange(self._connection, *arguments)
        except NotAnsweredError:
            self._connection.close()
            self._connection = connect(self._address)
            return exchange(self._connection, *arguments)


def connect(address: Address) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(*address, timeout=TIMEOUT_SECONDS)


def exchange(
    connection: http.client.HTTPConnection,
    request: Request,
    headers: Mapping[str, str],
    number: int,
) -> Answer:
    try:
        connection.request(
            request.method,
            request.path.replace("{}", str(number)),
            body=request.body or None,
            headers={**headers, "Content-Length": str(len(request.body))},
        )
        answer = connection.getresponse()
    except (ConnectionResetError, BrokenPipeError) as error:
        raise NotAnsweredError(error) from error
    return answer.status, answer.read()
