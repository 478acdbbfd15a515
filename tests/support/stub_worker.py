"""A stub worker without models, whose answers the tests set.

It runs on a real unix socket in a real thread, so that the filter's sockets,
deadlines and cancellations are those of production.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from hapi_protocol.errors import HapiError, make_error
from hapi_protocol.headers import CONTENT_TYPE_STREAM
from hapi_protocol.job_messages import (
    HEADER_IDENTITY,
    JobGrant,
    JobRequest,
    ModelIdentity,
    ProfileRequest,
    Usage,
)
from hapi_protocol.profiles import BatchProfile, ModelProfile
from hapi_protocol.tee_stream import (
    BOTH,
    CACHE,
    CLIENT,
    CONTENT_TYPE_TEE,
    end_frame,
    frame,
)

NUMERICS_TAG = "exact;stub"
CLIENT_END = b"<the client's end>"
KEPT_END = b"<the end that is kept>"
"""Last frame of a tee stream for the cache."""
USAGE_SECONDS = 2.0
"""Maximum wait of a request for a job's usage for the stream's end."""


@dataclass
class StubWorker:
    """Answers that the worker gives, and the requests it has received.

    Attributes:
        answer: makes the features of a job from the source's chunks; a
            HapiError before the first chunk is an error answer, any
            exception after it breaks the connection.
        refuse_job: raised by ``POST /jobs`` instead of a grant.
        refuse_profile: raised by ``POST /profiles`` instead of a profile.
        refuse_model: raised by ``PUT /models``.
        is_forgetful: always answers ``model_needed``.
        usage: answer to ``GET /jobs/<id>`` for every job that has ended;
            None for 404.
        usage_delay_seconds: delay of that answer.
        ends_after: bytes of a JSON answer after which the worker ends.
        is_chunked: answers are chunked, so that a break differs from an end.
        lifetime_seconds: time after which an unused grant lapses.
        num_errors: rows with errors, in the last frame of a tee stream;
            None for a tee stream without a last frame.
        splits: the worker supports tee streams.
    """

    socket_path: str
    answer: Callable[[Iterator[bytes]], Iterator[bytes]] = lambda source: (
        chunk.upper() for chunk in source
    )
    refuse_job: HapiError | None = None
    refuse_profile: HapiError | None = None
    refuse_model: HapiError | None = None
    is_forgetful: bool = False
    ends_after: int | None = None
    is_chunked: bool = True
    lifetime_seconds: float = 10.0
    num_errors: int | None = 0
    splits: bool = True
    usage: Usage | None = None
    usage_delay_seconds: float = 0.0
    delay_seconds: float = 0.0
    num_cuts: int = 9
    digests: dict[ModelIdentity, str] = field(default_factory=dict)
    jobs: list[JobRequest] = field(default_factory=list)
    granted: dict[str, float] = field(default_factory=dict)
    profiles: list[ProfileRequest] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    trans_ids: list[str | None] = field(default_factory=list)
    sources: list[bytes] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator[StubWorker]:
        handler = type("_BoundHandler", (_Handler,), {"worker": self})
        server = _Server(self.socket_path, handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join(5)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect: tests do that."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    worker: StubWorker

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def do_POST(self) -> None:
        actions = {"/jobs": self._job, "/profiles": self._profile}
        self._serve(actions.get(self.path, self._stream))

    def do_PUT(self) -> None:
        self._serve(self._put_model)

    def do_GET(self) -> None:
        is_job = self.path.startswith("/jobs/")
        self._serve(self._get_usage if is_job else self._get_model)

    def _serve(self, action: Callable[[], None]) -> None:
        self.worker.calls.append((self.command, self.path))
        self.worker.trans_ids.append(self.headers.get("X-Trans-Id"))
        time.sleep(self.worker.delay_seconds)
        try:
            action()
        except HapiError as error:
            headers = {}
            if error.retry_after is not None:
                headers["Retry-After"] = str(int(error.retry_after))
            self._reply(error.status, error.to_body(), headers)

    def _reply(
        self, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: self.worker.ends_after])
        self.close_connection = True

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _job(self) -> None:
        worker = self.worker
        job = JobRequest.from_body(self._body())
        worker.jobs.append(job)
        if worker.refuse_job:
            raise worker.refuse_job
        digest = worker.digests.get(job.model) if job.model else None
        if job.model and (worker.is_forgetful or not digest):
            raise make_error("model_needed", "send the package")
        grant = JobGrant(
            f"j{len(worker.jobs)}",
            1 << 20,
            digest,
            NUMERICS_TAG,
            worker.lifetime_seconds,
        )
        worker.granted[grant.job_id] = time.monotonic()
        self._reply(201, grant.to_body())

    def _profile(self) -> None:
        worker = self.worker
        wanted = ProfileRequest.from_body(self._body())
        worker.profiles.append(wanted)
        if worker.refuse_profile:
            raise worker.refuse_profile
        digest = worker.digests.get(wanted.model)
        if worker.is_forgetful or not digest:
            raise make_error("model_needed", "send the package")
        profile = stub_profile(digest, worker.num_cuts)
        self._reply(200, profile.to_body())

    def _put_model(self) -> None:
        if self.worker.refuse_model:
            raise self.worker.refuse_model
        body = self._body()
        if len(body) == int(self.headers["Content-Length"]):
            identity = ModelIdentity.from_json(self.headers[HEADER_IDENTITY])
            digest = hashlib.sha256(body).hexdigest()
            self.worker.digests[identity] = digest
            self._reply(201, json.dumps({"digest": digest}).encode())

    def _get_model(self) -> None:
        identity = ModelIdentity.from_json(self.headers[HEADER_IDENTITY])
        digest = self.worker.digests.get(identity)
        if digest is None:
            raise make_error("not_found", "no such model here")
        facts = {
            "digest": digest,
            "num_cuts": self.worker.num_cuts,
            "numerics_tag": NUMERICS_TAG,
        }
        self._reply(200, json.dumps(facts).encode())

    def _get_usage(self) -> None:
        time.sleep(self.worker.usage_delay_seconds)
        if not self.worker.ended.wait(USAGE_SECONDS):
            raise make_error("too_slow", "the job still runs")
        if self.worker.usage is None:
            raise make_error("not_found", "no such job here")
        self._reply(200, self.worker.usage.to_body())

    def _stream(self) -> None:
        answer = self.worker.answer(self._source())
        job_id = self.path.rpartition("/")[2]
        age = time.monotonic() - self.worker.granted[job_id]
        if age > self.worker.lifetime_seconds:
            raise make_error("not_found", "the grant has lapsed")
        number = int(job_id.removeprefix("j"))
        is_split = self.worker.splits and self.worker.jobs[number - 1].is_split
        if is_split:
            answer = _split(answer, self.worker.num_errors)
        kind = CONTENT_TYPE_TEE if is_split else CONTENT_TYPE_STREAM
        try:
            self._send_stream(answer, kind)
        except HapiError:
            raise
        except Exception:
            # A failure after the status ends the answer without a last chunk.
            self.close_connection = True
        finally:
            self.worker.ended.set()

    def _send_stream(self, answer: Iterator[bytes], kind: str) -> None:
        first = next(answer)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if self.worker.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for chunk in itertools.chain([first], answer):
            self._send_chunk(chunk)
        self._send_chunk(b"")

    def _send_chunk(self, chunk: bytes) -> None:
        framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        self.wfile.write(framed if self.worker.is_chunked else chunk)

    def _source(self) -> Iterator[bytes]:
        received = bytearray()
        while size := int(self.rfile.readline(), 16):
            chunk = self.rfile.read(size)
            if len(chunk) < size:
                raise ConnectionError("the source is cut off")
            self.rfile.read(2)
            received += chunk
            yield chunk
        self.rfile.readline()
        self.worker.sources.append(bytes(received))


def break_off(source: Iterator[bytes]) -> Iterator[bytes]:
    """A job's answer that breaks after its first chunk."""
    yield next(source)
    raise RuntimeError("out of memory")


def refuse_shard(source: Iterator[bytes]) -> Iterator[bytes]:
    """A job's answer that refuses the source once it has read some of it."""
    next(source)
    raise make_error("damaged_shard", "no tar")
    yield b""


def _split(answer: Iterator[bytes], num_errors: int | None) -> Iterator[bytes]:
    for chunk in answer:
        yield frame(BOTH, chunk)
    yield frame(CACHE, KEPT_END) + frame(CLIENT, CLIENT_END)
    if num_errors is not None:
        yield end_frame(num_errors)


def stub_profile(digest: str, num_cuts: int) -> ModelProfile:
    """The stub's profile of every package."""
    return ModelProfile(
        digest=digest,
        numerics_tag=NUMERICS_TAG,
        device="cpu",
        device_name="stub",
        num_devices=1,
        cores=2.0,
        forward_threads=2,
        batches=(BatchProfile(1, tuple(map(float, range(num_cuts + 1)))),),
        reference_seconds=0.01,
        load_seconds=0.5,
        parameter_bytes=1000,
        memory_limit_bytes=1 << 30,
        peak_bytes=tuple(range(num_cuts + 1)),
    )
