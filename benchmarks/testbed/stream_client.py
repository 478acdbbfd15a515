"""A client process that keeps streams of one worker busy, without Swift.

``python -m benchmarks.testbed.stream_client`` answers questions.  It speaks to
the worker's socket as Swift's filter does: it requests a grant, then sends a
shard as a chunked body and reads the features.  A refused request (429, 503)
is repeated after ``Retry-After``.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.testbed.remote import serve
from hapi_protocol.errors import HapiError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import FeatureBatch
from hapi_protocol.job_messages import (
    HEADER_IDENTITY,
    KIND_FEATURES,
    JobGrant,
    JobRequest,
    ModelIdentity,
)
from hapi_protocol.unix_http import UnixConnection

CONTAINER = "bench"
PIECE_BYTES = 65536
TIMEOUT_SECONDS = 120.0
BUSY_STATUSES = (429, 503)
CHARGED_STAGES = ("decode_cpu", "forward_cpu")
"""Timings that an account is charged for, in CPU seconds."""


class BusyError(Exception):
    """The worker refuses the request for now.

    Attributes:
        retry_after: seconds.
    """

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"retry after {retry_after:g} s")
        self.retry_after = retry_after


@dataclass
class Counters:
    """Progress of all streams.

    ``progress`` has (time, samples so far), ``costs`` (time, charged CPU
    seconds so far), ``requests`` the seconds of each; ``over`` is set when all
    streams are to end.
    """

    progress: list[tuple[float, int]] = field(default_factory=list)
    costs: list[tuple[float, float]] = field(default_factory=list)
    refused: int = 0
    requests: list[float] = field(default_factory=list)
    is_lenient: bool = False
    failure: Exception | None = None
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        now = time.monotonic()
        self.progress.append((now, 0))
        self.costs.append((now, 0.0))

    def add(self, batch: FeatureBatch) -> None:
        seconds = sum(batch.timings.get(name, 0.0) for name in CHARGED_STAGES)
        with self._lock:
            now = time.monotonic()
            samples = self.progress[-1][1] + len(batch.rows)
            self.progress.append((now, samples))
            self.costs.append((now, self.costs[-1][1] + seconds))

    def refuse(self) -> None:
        with self._lock:
            self.refused += 1


class StreamClient:
    """One account with any number of streams."""

    def open(
        self,
        path: str,
        account: str,
        package: str,
        shard: str,
        cut: int,
        encoding: str,
        owner: str | None = None,
    ) -> None:
        """Prepares jobs and uploads the model.

        Args:
            path: of the worker's socket.
            account: that is charged.
            package: file of the model.
            shard: tar of photographs.
            cut, encoding: of the features.
            owner: of model and shard; None for ``account``.
        """
        owner = owner or account
        self._path = path
        self._shard = Path(shard).read_bytes()
        self._model = Path(package).read_bytes()
        self._identity = ModelIdentity(
            owner, CONTAINER, "model", "etag", len(self._model)
        )
        self._job = JobRequest(
            kind=KIND_FEATURES,
            charged_account=account,
            model=self._identity,
            cut=cut,
            encoding=encoding,
            transform="eval",
            numerics="exact",
            samples=None,
            ranged=False,
            source_name=f"/{owner}/{CONTAINER}/{Path(shard).name}",
            source_etag="etag",
            source_length_bytes=len(self._shard),
            trans_id="benchmark",
        )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        _until_accepted(lambda _: self._upload(), deadline, Counters())

    def run(
        self, begin: float, end: float, streams: int, is_lenient: bool = False
    ) -> dict[str, Any]:
        """Reads shard after shard between two times.

        Args:
            begin, end: of the monotonic clock.
            streams: that read at the same time.
            is_lenient: go on after damaged samples and broken streams.

        Returns:
            ``progress``, ``costs``, ``refused`` and ``requests`` of
            :class:`Counters`.
        """
        time.sleep(max(0.0, begin - time.monotonic()))
        counters = Counters(is_lenient=is_lenient)
        threads = [
            threading.Thread(target=self._loop, args=(end, counters))
            for _ in range(streams)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            # Interrupted: streams end after their present shard.
            counters.over.set()
        if counters.failure is not None:
            raise counters.failure
        return {
            "progress": counters.progress,
            "costs": counters.costs,
            "refused": counters.refused,
            "requests": counters.requests,
        }

    def _loop(self, end: float, counters: Counters) -> None:
        try:
            while time.monotonic() < end and not counters.over.is_set():
                began = time.monotonic()
                _until_accepted(self._read_shard, end, counters)
                counters.requests.append(time.monotonic() - began)
        except Exception as error:  # raised by run
            counters.failure = error
            counters.over.set()

    def _grant(self) -> str:
        status, body = self._ask("POST", "/jobs", self._job.to_body(), {})
        if status != 201:
            raise ValueError(f"POST /jobs: {status}: {body!r}")
        return JobGrant.from_body(body).job_id

    def _read_shard(self, counters: Counters) -> None:
        connection = UnixConnection(self._path, TIMEOUT_SECONDS)
        connection.putrequest("POST", f"/jobs/{self._grant()}")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.putheader("Connection", "close")
        connection.endheaders()
        sock = connection.sock
        sender = threading.Thread(target=self._send, args=(sock,))
        sender.start()
        lenient = (ValueError, HapiError, http.client.HTTPException, OSError)
        try:
            with contextlib.suppress(*lenient if counters.is_lenient else ()):
                self._receive(connection, counters)
        finally:
            # Ends a sender that the worker no longer reads from.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            connection.close()
            sender.join()

    def _receive(self, connection: UnixConnection, counters: Counters) -> None:
        response = connection.getresponse()
        if response.status != 200:
            status, body = _checked(response)
            raise ValueError(f"{status}: {body!r}")
        for batch in read_features(response):
            failed = [row.error for row in batch.rows if row.error]
            if failed:
                raise ValueError(failed[0])
            counters.add(batch)
        response.read()

    def _send(self, sock: socket.socket) -> None:
        view = memoryview(self._shard)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            sock.sendall(b"0\r\n\r\n")
        except OSError:
            return  # the response has the reason

    def _upload(self) -> None:
        headers = {HEADER_IDENTITY: self._identity.to_json()}
        status, body = self._ask("PUT", "/models", self._model, headers)
        if status != 201:
            raise ValueError(f"PUT /models: {status}: {body!r}")

    def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        connection = UnixConnection(self._path, TIMEOUT_SECONDS)
        try:
            # A refusal may arrive before the body was read.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, path, body, dict(headers))
            return _checked(connection.getresponse())
        finally:
            connection.close()


def _checked(response: http.client.HTTPResponse) -> tuple[int, bytes]:
    """Status and body.

    Raises:
        BusyError: the worker refuses for now.
    """
    body = response.read()
    if response.status in BUSY_STATUSES:
        raise BusyError(float(response.headers["Retry-After"]))
    return response.status, body


def _until_accepted(
    attempt: Callable[[Counters], None], end: float, counters: Counters
) -> None:
    """Repeats an attempt after each refusal, until a time."""
    while True:
        try:
            return attempt(counters)
        except BusyError as busy:
            counters.refuse()
            again = time.monotonic() + busy.retry_after
            wait = max(0.0, min(again, end) - time.monotonic())
            if counters.over.wait(wait) or again >= end:
                return None


def main() -> None:
    client = StreamClient()
    serve({"open": client.open, "run": client.run})


if __name__ == "__main__":
    main()
