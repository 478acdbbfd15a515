"""A worker that computes nothing: it reads sources, and answers short rows.

``python -m benchmarks.reading_worker SOCKET`` speaks as much of the exchange
as the filter needs, until its standard input ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from hapi_protocol.job_messages import JobGrant, Usage

SAMPLE_BYTES = 115_000
"""Of a photograph of ImageNet."""
ROW_BYTES = 1024
BATCH_SAMPLES = 8
"""Rows that come at once, as from a worker on a CPU."""
BUFFER_BYTES = 1 << 20
MAX_HEAD_BYTES = 1 << 16
DIGEST = "0" * 64

_USAGE = Usage(
    kind="features",
    charged_account="AUTH_test",
    model_digest=DIGEST,
    cut=1,
    encoding="float32",
    samples=1,
    errors=0,
    device_seconds=0.0,
    decode_seconds=0.0,
    cpu_seconds=0.0,
    source_bytes=0,
    sent_bytes=0,
    outcome="done",
    reason="",
)
_MODEL = json.dumps(
    {"digest": DIGEST, "num_cuts": 9, "numerics_tag": "exact"}
).encode()


class Exchange:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def answer(self) -> None:
        """One request."""
        with self._sock:
            head = self._until(b"\r\n\r\n")
            method, path = head.split(b" ", 2)[:2]
            if path == b"/jobs":
                # A client must not see the connection's end before its own.
                self._skip_body(head)
                self._reply(
                    201, JobGrant("j", 1 << 30, DIGEST, "exact").to_body()
                )
            elif method == b"GET" and path.startswith(b"/jobs/"):
                self._reply(200, _USAGE.to_body())
            elif method == b"GET":
                facts = {
                    "digest": DIGEST,
                    "num_cuts": 9,
                    "numerics_tag": "exact",
                }
                self._reply(200, json.dumps(facts).encode())
            else:
                self._stream()

    def _skip_body(self, head: bytes) -> None:
        [length] = [
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        ]
        while len(self._rest) < length:
            piece = self._sock.recv(MAX_HEAD_BYTES)
            if not piece:
                raise ConnectionError("no whole body")
            self._rest += piece

    def _until(self, end: bytes) -> bytes:
        while end not in self._rest:
            piece = self._sock.recv(MAX_HEAD_BYTES)
            if not piece or len(self._rest) > MAX_HEAD_BYTES:
                raise ConnectionError("no whole line")
            self._rest += piece
        found, _, self._rest = self._rest.partition(end)
        return found

    def _reply(self, status: int, body: bytes) -> None:
        self._sock.sendall(
            b"HTTP/1.1 %d OK\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (status, len(body), body)
        )

    def _stream(self) -> None:
        self._sock.sendall(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        batch = ROW_BYTES * BATCH_SAMPLES
        framed = b"%x\r\n%b\r\n" % (batch, bytes(batch))
        self._sock.sendall(framed)
        step = SAMPLE_BYTES * BATCH_SAMPLES
        received, wanted = 0, step
        for size in self._pieces():
            received += size
            while received >= wanted:
                self._sock.sendall(framed)
                wanted += step
        self._sock.sendall(b"0\r\n\r\n")

    def _pieces(self) -> Iterator[int]:
        """Sizes of what is read of a chunked body."""
        view = memoryview(bytearray(BUFFER_BYTES))
        while size := int(self._until(b"\r\n"), 16):
            left = size + 2
            taken = min(left, len(self._rest))
            self._rest = self._rest[taken:]
            left -= taken
            while left:
                got = self._sock.recv_into(view[: min(left, BUFFER_BYTES)])
                if not got:
                    raise ConnectionError("the source is cut off")
                left -= got
            yield size
        self._until(b"\r\n")


def serve(path: str) -> None:
    """Until the process ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_answer, args=(sock,), daemon=True).start()


def _answer(sock: socket.socket) -> None:
    try:
        Exchange(sock).answer()
    except OSError as error:
        print(f"benchmarks.reading_worker: {error}", file=sys.stderr)


def main(argv: list[str]) -> Any:
    threading.Thread(target=serve, args=argv[:1], daemon=True).start()
    while os.read(0, 4096):
        continue


if __name__ == "__main__":
    main(sys.argv[1:])
