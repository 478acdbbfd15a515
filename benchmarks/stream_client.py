"""A process that keeps streams of one worker busy, on its unix socket.

``python -m benchmarks.stream_client`` answers the questions of the worker's
benchmarks.  It speaks to the worker as Swift's filter does: a grant, then a
shard of photographs as a chunked body, while the features come back.  What the
worker refuses for now is asked again when it says (``Retry-After``), and a
model that it no longer has is uploaded again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.remote import serve

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
MODEL_NEEDED = (409, "model_needed")
WORK_STAGES = ("decode_cpu", "forward_cpu")
"""What an account is charged for, in seconds of a core."""


class BusyError(Exception):
    """The worker cannot do it now.

    Attributes:
        retry_after: seconds, as it says.
    """

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"again in {retry_after:g} s")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def check_free(self) -> None:
        """
        Raises:
            BusyError: it refuses for now.
        """
        if self.status in BUSY_STATUSES:
            raise BusyError(float(self.headers["Retry-After"]))

    @property
    def needs_model(self) -> bool:
        status, code = MODEL_NEEDED
        return self.status == status and json.loads(self.body)["code"] == code


class StreamClient:
    """See :func:`serve`; one account, any number of streams."""

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
        """Prepares jobs, and uploads the model where it is needed.

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
        if not _insist(self._upload, deadline, Counter()):
            raise ValueError(f"PUT /models: refused for {TIMEOUT_SECONDS:g} s")

    def run(
        self, begin: float, end: float, streams: int, grace: float = 0.0
    ) -> dict[str, Any]:
        """Reads shard after shard.

        Args:
            begin, end: of the monotonic clock.
            streams: at a time.
            grace: seconds after the end, in which those begun before are
                still asked for again.

        Returns:
            ``progress`` as (time, samples so far), ``costs`` as (time,
            seconds of work so far), ``refused`` requests, ``uploads`` of the
            model, ``longest_seconds`` from a shard's first request to its
            end, ``shards`` read, ``unfinished`` ones, refused until the end,
            and ``cpu_seconds`` of this process.
        """
        counter = self._run(
            begin, end + grace, streams, lambda: time.monotonic() < end
        )
        return counter.found()

    def work(
        self, begin: float, streams: int, shards: int, limit: float
    ) -> dict[str, Any]:
        """Reads a number of shards.

        Args:
            begin: of the monotonic clock.
            streams: at a time.
            shards: in all.
            limit: seconds that it may take.

        Returns:
            As :meth:`run`.

        Raises:
            ValueError: not all of them came in that time.
        """
        left = threading.Semaphore(shards)
        counter = self._run(
            begin,
            begin + limit,
            streams,
            lambda: left.acquire(blocking=False),
        )
        if counter.shards != shards:
            raise ValueError(
                f"{counter.shards} of {shards} shards came in {limit:g} s"
            )
        return counter.found()

    def _run(
        self,
        begin: float,
        end: float,
        streams: int,
        more: Callable[[], bool],
    ) -> Counter:
        time.sleep(max(0.0, begin - time.monotonic()))
        counter = Counter()
        threads = [
            threading.Thread(target=self._loop, args=(end, more, counter))
            for _ in range(streams)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            # Interrupted: they end after the shard that they are at.
            counter.over.set()
        if counter.failure is not None:
            raise counter.failure
        return counter

    def _loop(
        self, end: float, more: Callable[[], bool], counter: Counter
    ) -> None:
        try:
            while (
                time.monotonic() < end and not counter.over.is_set() and more()
            ):
                begun = time.monotonic()
                if _insist(self._read_shard, end, counter):
                    counter.end_shard(time.monotonic() - begun)
                else:
                    counter.give_up()
        except Exception as error:
            counter.failure = error
            counter.over.set()

    def _grant(self, counter: Counter) -> str:
        while True:
            answer = self._ask("POST", "/jobs", self._job.to_body(), {})
            if not answer.needs_model:
                break
            self._upload(counter)
        answer.check_free()
        if answer.status != 201:
            raise ValueError(f"POST /jobs: {answer.status}: {answer.body!r}")
        return JobGrant.from_body(answer.body).job_id

    def _read_shard(self, counter: Counter) -> None:
        connection = self._start(self._grant(counter))
        sock = connection.sock
        sender = threading.Thread(target=self._send, args=(sock,))
        sender.start()
        try:
            self._receive(connection, counter)
        finally:
            # A sender that waits for a worker nobody reads from must end.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            connection.close()
            sender.join()

    def _start(self, job_id: str) -> UnixConnection:
        connection = UnixConnection(self._path, TIMEOUT_SECONDS)
        connection.putrequest("POST", f"/jobs/{job_id}")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.putheader("Connection", "close")
        connection.endheaders()
        return connection

    def _receive(self, connection: UnixConnection, counter: Counter) -> None:
        response = connection.getresponse()
        if response.status != 200:
            answer = _answer(response)
            answer.check_free()
            raise ValueError(f"{answer.status}: {answer.body!r}")
        for batch in read_features(response):
            failed = [row.error for row in batch.rows if row.error]
            if failed:
                raise ValueError(failed[0])
            counter.add(batch)
        response.read()

    def _send(self, sock: socket.socket) -> None:
        view = memoryview(self._shard)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            sock.sendall(b"0\r\n\r\n")
        except OSError:
            return  # the reader of the answer says why

    def _upload(self, counter: Counter) -> None:
        answer = self._ask(
            "PUT",
            "/models",
            self._model,
            {HEADER_IDENTITY: self._identity.to_json()},
        )
        answer.check_free()
        if answer.status != 201:
            raise ValueError(f"PUT /models: {answer.status}: {answer.body!r}")
        counter.uploads += 1

    def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        connection = UnixConnection(self._path, TIMEOUT_SECONDS)
        try:
            # A refusal may come before the body was read.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, path, body, dict(headers))
            return _answer(connection.getresponse())
        finally:
            connection.close()


def _answer(response: http.client.HTTPResponse) -> Answer:
    return Answer(response.status, dict(response.headers), response.read())


def _insist(
    attempt: Callable[[Counter], None], end: float, counter: Counter
) -> bool:
    """Tries again whenever the worker says so; whether it was done by then."""
    while True:
        try:
            attempt(counter)
        except BusyError as busy:
            counter.refuse()
            again = time.monotonic() + busy.retry_after
            wait = max(0.0, min(again, end) - time.monotonic())
            if counter.over.wait(wait) or again >= end:
                return False
        else:
            return True


class Counter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        now = time.monotonic()
        self._before = time.process_time()
        self._progress: list[tuple[float, int]] = [(now, 0)]
        self._costs: list[tuple[float, float]] = [(now, 0.0)]
        self._refused = 0
        self._longest = 0.0
        self._unfinished = 0
        self.shards = 0
        self.uploads = 0
        self.failure: Exception | None = None
        self.over = threading.Event()

    def add(self, batch: FeatureBatch) -> None:
        seconds = sum(batch.timings.get(stage, 0.0) for stage in WORK_STAGES)
        with self._lock:
            now = time.monotonic()
            self._progress.append(
                (now, self._progress[-1][1] + len(batch.rows))
            )
            self._costs.append((now, self._costs[-1][1] + seconds))

    def refuse(self) -> None:
        with self._lock:
            self._refused += 1

    def end_shard(self, seconds: float) -> None:
        with self._lock:
            self.shards += 1
            self._longest = max(self._longest, seconds)

    def give_up(self) -> None:
        with self._lock:
            self._unfinished += 1

    def found(self) -> dict[str, Any]:
        return {
            "progress": self._progress,
            "costs": self._costs,
            "refused": self._refused,
            "uploads": self.uploads,
            "longest_seconds": self._longest,
            "shards": self.shards,
            "unfinished": self._unfinished,
            "cpu_seconds": time.process_time() - self._before,
        }


def main() -> None:
    client = StreamClient()
    serve({"open": client.open, "run": client.run, "work": client.work})


if __name__ == "__main__":
    main()
