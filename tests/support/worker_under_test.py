"""A worker on real unix sockets in this process, and the filter's side."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hapi_protocol.errors import HapiError
from hapi_protocol.feature_reader import FeatureStreamReader, read_features
from hapi_protocol.feature_stream import Row
from hapi_protocol.job_messages import (
    HEADER_IDENTITY,
    JobGrant,
    JobRequest,
    ModelIdentity,
)
from hapi_protocol.unix_http import UnixConnection
from hapi_splitter.fork_server import ForkServer
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import package_pieces
from hapi_worker.config import WorkerConfig
from hapi_worker.jobs.worker import Worker
from hapi_worker.models.package_loader import PackageLoad
from hapi_worker.server.service import Service
from networks import small_parts

TIMEOUT_SECONDS = 60.0
TRANS_ID = "tx-worker-test"


small_split = lru_cache(maxsize=4)(small_parts)


@lru_cache(maxsize=4)
def small_package(seed: int = 0) -> bytes:
    return b"".join(package_pieces(small_split(seed).frozen))


def identity_of(
    package: bytes, name: str = "m.hapi", etag: str = "etag"
) -> ModelIdentity:
    return ModelIdentity("AUTH_a", "models", name, etag, len(package))


def job_for(
    source: bytes, package: bytes | None = None, **changes: Any
) -> JobRequest:
    """A job over ``source``: an index job without a package."""
    job = JobRequest(
        kind="index" if package is None else "features",
        charged_account="AUTH_a",
        model=None if package is None else identity_of(package),
        cut=0 if package is None else 1,
        encoding="float32",
        transform="eval",
        numerics="exact",
        samples=None,
        ranged=False,
        source_name="/AUTH_a/data/shard-000.tar",
        source_etag="source-etag",
        source_length_bytes=len(source),
        trans_id=TRANS_ID,
    )
    return replace(job, **changes)


def rows_of(reader: FeatureStreamReader) -> list[Row]:
    """Rows of a reader that :meth:`Exchange.run` returned."""
    return [row for batch in reader.batches for row in batch.rows]


def features_of(reader: FeatureStreamReader) -> np.ndarray[Any, Any]:
    """Features of a reader that :meth:`Exchange.run` returned."""
    found = [batch.features for batch in reader.batches]
    return np.concatenate([each for each in found if each is not None])


def small_features(images: Iterable[bytes], cut: int = 1) -> torch.Tensor:
    """Features of images, one batch, computed here by the small network."""
    frozen = small_split().frozen
    pixels = [frozen.transform(decode_image(image)) for image in images]
    with torch.inference_mode():
        features: torch.Tensor = frozen.prefix(cut)(torch.stack(pixels))
    return features


def assert_features(reader: FeatureStreamReader, wanted: torch.Tensor) -> None:
    """Asserts that features differ by rounding only."""
    torch.testing.assert_close(
        torch.from_numpy(features_of(reader)),
        wanted,
        rtol=1e-4,
        atol=1e-5 * float(wanted.abs().max()),
    )


def refusal(
    ask: Callable[..., object], *arguments: Any, **options: Any
) -> HapiError:
    """The error with which a call is refused."""
    with pytest.raises(HapiError) as refused:
        ask(*arguments, **options)
    return refused.value


def pieces(data: bytes, size: int = 65536) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def in_two(
    data: bytes, event: threading.Event, at: int | None = None
) -> Iterator[bytes]:
    """Pieces of ``data``; those from ``at``, or the middle, after ``event``.

    The wait outlasts all others, so that a test without the event fails.
    """
    at = len(data) // 2 if at is None else at
    yield from pieces(data[:at])
    event.wait(2 * TIMEOUT_SECONDS)
    yield from pieces(data[at:])


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.body)
        return fields

    @property
    def code(self) -> str:
        return str(self.fields["code"])


class Streaming:
    """A running job's stream; a thread sends the body."""

    def __init__(self, path: str, job_id: str, body: Iterable[bytes]) -> None:
        self.connection = UnixConnection(path, TIMEOUT_SECONDS)
        self.connection.connect()
        # A duplicate: the response closes its socket at the end, which does
        # not wake a blocked sender.
        self.socket = self.connection.sock.dup()
        self._body = body
        self.sent_all = False
        self._answer: http.client.HTTPResponse | None = None
        self.connection.putrequest("POST", f"/jobs/{job_id}")
        self.connection.putheader("Transfer-Encoding", "chunked")
        self.connection.putheader("Connection", "close")
        self.connection.putheader("X-Trans-Id", TRANS_ID)
        self.connection.endheaders()
        self._sender = threading.Thread(target=self._send)
        self._sender.start()

    def answer(self) -> http.client.HTTPResponse:
        # The response owns the socket and closes it when collected.
        self._answer = self.connection.getresponse()
        return self._answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        if self._answer is not None:
            self._answer.close()
        self._sender.join(TIMEOUT_SECONDS)
        self.socket.close()
        assert not self._sender.is_alive()

    def _send(self) -> None:
        # The worker may stop reading before the body's end.
        with contextlib.suppress(OSError):
            for piece in self._body:
                self.socket.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.socket.sendall(b"0\r\n\r\n")
            self.sent_all = True


class NotGrantedError(AssertionError):
    """A job was refused."""


class Exchange:
    """The filter's side of the exchange with a worker at ``socket``."""

    def __init__(self, socket: str) -> None:
        self.socket = socket

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        admin: bool = False,
    ) -> Answer:
        suffix = ".admin" if admin else ""
        connection = UnixConnection(self.socket + suffix, TIMEOUT_SECONDS)
        try:
            # A refusal may come before the body was read.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    def ask(self, job: JobRequest) -> Answer:
        """``POST /jobs``."""
        return self.request(
            "POST", "/jobs", job.to_body(), {"X-Trans-Id": job.trans_id}
        )

    def put(
        self, package: bytes, identity: ModelIdentity | None = None
    ) -> Answer:
        """``PUT /models``."""
        identity = identity or identity_of(package)
        return self.request(
            "PUT", "/models", package, {HEADER_IDENTITY: identity.to_json()}
        )

    def grant(self, job: JobRequest, package: bytes | None = None) -> JobGrant:
        """Requests a grant; uploads the package if it is needed."""
        answer = self.ask(job)
        if answer.status == 409 and package is not None:
            assert self.put(package, job.model).status == 201
            answer = self.ask(job)
        if answer.status != 201:
            raise NotGrantedError(answer.body)
        return JobGrant.from_body(answer.body)

    @contextlib.contextmanager
    def streaming(
        self, job: JobRequest, package: bytes | None, body: Iterable[bytes]
    ) -> Iterator[Streaming]:
        job_id = self.grant(job, package).job_id
        with self.streaming_of(job_id, body) as stream:
            yield stream

    @contextlib.contextmanager
    def streaming_of(
        self, job_id: str, body: Iterable[bytes]
    ) -> Iterator[Streaming]:
        """The stream of a job that was granted."""
        stream = Streaming(self.socket, job_id, body)
        try:
            yield stream
        finally:
            stream.close()

    def run(
        self, job: JobRequest, package: bytes | None, source: bytes
    ) -> FeatureStreamReader:
        """Runs a job; the returned reader was read to its end."""
        with self.streaming(job, package, pieces(source)) as stream:
            answer = stream.answer()
            assert answer.status == 200, answer.read()
            reader = read_features(answer)
            reader.batches = list(reader)
            answer.read()  # raises when the last chunk is missing
            return reader

    def refusal(
        self, job: JobRequest, package: bytes | None, source: bytes
    ) -> Answer:
        """The response to a job that is refused before its stream starts."""
        with self.streaming(job, package, pieces(source)) as stream:
            answer = stream.answer()
            return Answer(answer.status, dict(answer.headers), answer.read())


class WorkerUnderTest(Exchange):
    """A :class:`Service` and the filter's side of its exchange."""

    def __init__(self, service: Service, config: WorkerConfig) -> None:
        super().__init__(config.socket)
        self.service = service
        self.config = config
        self.worker = service.worker

    def idle(self, seconds: float = 5.0) -> bool:
        """Returns True if all jobs and their threads end in ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.worker.admission.num_running() and not job_threads():
                return True
            time.sleep(0.02)
        return False


def jobs_ended(worker: WorkerUnderTest, outcome: str, reason: str) -> float:
    """Number of jobs of features that ended so."""
    return worker.worker.metrics.value(
        "hapi_worker_jobs_total",
        kind="features",
        outcome=outcome,
        reason=reason,
    )


def job_threads() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name == "job-reader"
    ]


@contextlib.contextmanager
def running_worker(
    folder: Path,
    *,
    load: PackageLoad = load_package,
    fork_server: ForkServer | None = None,
    out_of_service: Callable[[], None] = lambda: None,
    **options: Any,
) -> Iterator[WorkerUnderTest]:
    """A worker with its sockets in ``folder``, stopped afterwards.

    It loads packages without the validating subprocess, which takes seconds
    to start; ``load=ValidatingLoader()`` is the real loader.
    """
    values: dict[str, Any] = {
        "socket": str(folder / "worker.sock"),
        "device": "cpu",
        "memory_limit": 1 << 30,
        "forwards": 2,
        **options,
    }
    config = WorkerConfig(**values)
    worker = Worker(
        config,
        load=load,
        fork_server=fork_server,
        out_of_service=out_of_service,
    )
    service = Service(worker)
    try:
        service.begin()
        yield WorkerUnderTest(service, config)
    finally:
        service.end()
