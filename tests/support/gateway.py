"""A gateway between a client and a real Swift that injects failures."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PIECE_BYTES = 8192
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive"}


@dataclass
class Storm:
    """Failures of requests, each as a fraction of all requests.

    Attributes:
        refused: 503 instead of an answer.
        expired: 401 for a token that was valid until then.
        torn: the connection ends within a body.
    """

    refused: float = 0.0
    expired: float = 0.0
    torn: float = 0.0


@dataclass
class Gateway:
    """Forwards requests; ``storm`` may be changed at any time.

    Attributes:
        url: URL of the gateway.
        storm: failures to inject; None for none.
        happened: number of requests by their fate.
        info: status and body of its own response to ``/info``; None to ask
            Swift.
    """

    url: str
    info: tuple[int, bytes] | None = None
    storm: Storm | None = None
    happened: Counter[str] = field(default_factory=Counter)
    _dead_tokens: set[str] = field(default_factory=set)
    _dice: random.Random = field(default_factory=lambda: random.Random(3))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fate(self, token: str | None) -> str:
        """Draws ``refused``, ``expired``, ``torn`` or ``passed``."""
        with self._lock:
            fate = self._drawn(token)
            if fate == "expired" and token:
                self._dead_tokens.add(token)
            self.happened[fate] += 1
            return fate

    def _drawn(self, token: str | None) -> str:
        if token in self._dead_tokens:
            return "expired"
        drawn = self._dice.random()
        for name, share in vars(self.storm or Storm()).items():
            if drawn < share and (token or name != "expired"):
                return str(name)
            drawn -= share
        return "passed"


@contextlib.contextmanager
def gateway_to(proxy_url: str) -> Iterator[Gateway]:
    """Listens on loopback until the end of the ``with`` block."""
    target = urlsplit(proxy_url)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    gateway = Gateway(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = _handler(gateway, target.netloc)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield gateway
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _handler(gateway: Gateway, target: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle_one_request()

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if gateway.info is not None and self.path == "/info":
                status, page = gateway.info
                return self._refuse(status, page)
            fate = gateway.fate(self.headers.get("X-Auth-Token"))
            if fate == "refused":
                return self._refuse(503)
            if fate == "expired":
                return self._refuse(401)
            upstream = http.client.HTTPConnection(target, timeout=60)
            try:
                upstream.request(
                    self.command, self.path, body, dict(self.headers.items())
                )
                self._pass_on(upstream.getresponse(), torn=fate == "torn")
            finally:
                upstream.close()
            return None

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        def _refuse(self, status: int, page: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def _pass_on(
            self, answer: http.client.HTTPResponse, *, torn: bool
        ) -> None:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP_BY_HOP | {"date", "server"}:
                    self.send_header(name, value)
            chunked = answer.chunked
            if chunked:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while data := answer.read1(PIECE_BYTES):
                if torn:
                    data = data[: len(data) // 2]
                head = b"%x\r\n" % len(data) if chunked else b""
                self.wfile.write(head + data + (b"\r\n" if chunked else b""))
                if torn:
                    self.close_connection = True
                    return
            if chunked:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    return Handler
