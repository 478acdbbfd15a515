"""A process that keeps streams of one worker busy, on its unix socket.

``python -m benchmarks.stream_client`` answers the questions of
benchmarks/worker.py.  It speaks to the worker as Swift's filter does: a grant,
then a shard of photographs as a chunked body, while the features come back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.remote import serve

from hapi_protocol.features import read_features
from hapi_protocol.messages import (
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
PAUSE_SECONDS = 0.02


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
    ) -> None:
        """Prepares jobs, and uploads the model where it is needed.

        Args:
            path: of the worker's socket.
            account: that is charged.
            package: file of the model.
            shard: tar of photographs.
            cut, encoding: of the features.
        """
        self._path = path
        self._shard = Path(shard).read_bytes()
        model = Path(package).read_bytes()
        identity = ModelIdentity(
            account, CONTAINER, "model", "etag", len(model)
        )
        self._job = JobRequest(
            kind=KIND_FEATURES,
            charged_account=account,
            model=identity,
            cut=cut,
            encoding=encoding,
            transform="eval",
            numerics="exact",
            samples=None,
            ranged=False,
            source_name=f"/{account}/{CONTAINER}/{Path(shard).name}",
            source_etag="etag",
            source_length_bytes=len(self._shard),
            trans_id="benchmark",
        )
        status, answer = self._ask(
            "PUT", "/models", model, {HEADER_IDENTITY: identity.to_json()}
        )
        if status != 201:
            raise ValueError(f"PUT /models: {status}: {answer!r}")

    def run(self, begin: float, end: float, streams: int) -> dict[str, Any]:
        """Reads shard after shard.

        Args:
            begin, end: of the monotonic clock.
            streams: at a time.

        Returns:
            ``progress`` as (time, samples so far), ``refused`` grants,
            ``shards`` read, and ``cpu_seconds`` of this process.
        """
        counter = _Counter()
        time.sleep(max(0.0, begin - time.monotonic()))
        before = time.process_time()
        threads = [
            threading.Thread(target=self._loop, args=(end, counter))
            for _ in range(streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if counter.failure is not None:
            raise counter.failure
        return {
            "progress": counter.progress,
            "refused": counter.refused,
            "shards": counter.shards,
            "cpu_seconds": time.process_time() - before,
        }

    def _loop(self, end: float, counter: _Counter) -> None:
        try:
            while time.monotonic() < end and counter.failure is None:
                self._stream(counter)
        except Exception as error:
            counter.failure = error

    def _stream(self, counter: _Counter) -> None:
        status, answer = self._ask("POST", "/jobs", self._job.to_body(), {})
        if status in BUSY_STATUSES:
            counter.refused += 1
            time.sleep(PAUSE_SECONDS)
            return
        if status != 201:
            raise ValueError(f"POST /jobs: {status}: {answer!r}")
        grant = JobGrant.from_body(answer)
        connection = UnixConnection(self._path, TIMEOUT_SECONDS)
        connection.putrequest("POST", f"/jobs/{grant.job_id}")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.putheader("Connection", "close")
        connection.endheaders()
        sock = connection.sock
        sender = threading.Thread(target=self._send, args=(sock,))
        sender.start()
        try:
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"{response.status}: {response.read()!r}")
            for batch in read_features(response):
                failed = [row.error for row in batch.rows if row.error]
                if failed:
                    raise ValueError(failed[0])
                counter.add(len(batch.rows))
            response.read()
            counter.shards += 1
        finally:
            # A sender that waits for a worker nobody reads from must end.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            connection.close()
            sender.join()

    def _send(self, sock: socket.socket) -> None:
        view = memoryview(self._shard)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            sock.sendall(b"0\r\n\r\n")
        except OSError:
            return  # the reader of the answer says why

    def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        connection = UnixConnection(self._path, TIMEOUT_SECONDS)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class _Counter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.progress: list[tuple[float, int]] = [(time.monotonic(), 0)]
        self.refused = 0
        self.shards = 0
        self.failure: Exception | None = None

    def add(self, samples: int) -> None:
        with self._lock:
            self.progress.append(
                (time.monotonic(), self.progress[-1][1] + samples)
            )


def main() -> None:
    client = StreamClient()
    serve({"open": client.open, "run": client.run})


if __name__ == "__main__":
    main()
