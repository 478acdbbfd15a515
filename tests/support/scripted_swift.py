"""An HTTP server with scripted answers, and v1 auth in front."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Answer:
    """One scripted answer.

    Attributes:
        status: of the answer.
        body: as it is sent.
        headers: in addition to Content-Length.
        cut_off: say that the body is this many bytes longer, then close.
        hang_seconds: before the answer begins.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_off: int = 0
    hang_seconds: float = 0.0


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class ScriptedSwift:
    """Pops one answer for each request; the last one is kept."""

    def __init__(self) -> None:
        self.answers: deque[Answer] = deque()
        self.requests: list[Request] = []
        self.num_tokens = 0
        self.closing = threading.Event()

    def script(self, *answers: Answer) -> None:
        self.answers.extend(answers)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def auth_url(self) -> str:
        return f"{self.url}/auth/v1.0"

    scheme = "http"
    port = 0


def _handler(swift: ScriptedSwift) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def serve(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            if self.path.startswith("/auth"):
                swift.num_tokens += 1
                self.reply(
                    Answer(
                        headers={
                            "X-Storage-Url": f"{swift.url}/v1/AUTH_test",
                            "X-Auth-Token": f"token{swift.num_tokens}",
                        }
                    )
                )
                return
            swift.requests.append(
                Request(self.command, self.path, dict(self.headers), body)
            )
            answers = swift.answers
            self.reply(answers.popleft() if len(answers) > 1 else answers[0])

        def reply(self, answer: Answer) -> None:
            deadline = time.monotonic() + answer.hang_seconds
            while time.monotonic() < deadline:
                if swift.closing.wait(0.02):
                    break
            self.send_response_only(answer.status)
            if "Date" not in answer.headers:
                self.send_header("Date", self.date_time_string())
            for name, value in answer.headers.items():
                self.send_header(name, value)
            length = len(answer.body) + answer.cut_off
            self.send_header("Content-Length", str(length))
            with contextlib.suppress(ConnectionError):  # the client left
                self.end_headers()
                self.wfile.write(answer.body)
            self.close_connection = bool(answer.cut_off)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

    return Handler


@contextmanager
def scripted_swift(
    tls: ssl.SSLContext | None = None,
) -> Iterator[ScriptedSwift]:
    """A server on a free port of the loopback."""
    swift = ScriptedSwift()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(swift))
    server.daemon_threads = True
    swift.port = server.server_address[1]
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        swift.scheme = "https"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}
    )
    thread.start()
    try:
        yield swift
    finally:
        swift.closing.set()
        server.shutdown()
        thread.join(10)
        server.server_close()
