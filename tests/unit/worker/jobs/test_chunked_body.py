"""Chunks of a job's body, however they arrive."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from cheroot.makefile import MakeFile

from hapi_protocol.errors import HapiError
from hapi_worker.jobs.chunked_body import MAX_READ_BYTES, ChunkedBody
from hapi_worker.peer import Connection

CHUNKS = (
    b"5;name=value\r\nhello\r\n00A\r\nten\nbytes\r\n\r\n0\r\nlate: 1\r\n\r\n"
)
HELD = b"helloten\nbytes\r"


@contextlib.contextmanager
def body_of(
    sent: bytes, length_bytes: int, step: int
) -> Iterator[ChunkedBody]:
    """What a sender sends in so small pieces, which then closes."""
    near, far = socket.socketpair()

    def send() -> None:
        with far, contextlib.suppress(BrokenPipeError):
            for start in range(0, len(sent), step):
                far.sendall(sent[start : start + step])

    sender = threading.Thread(target=send)
    sender.start()
    reader = MakeFile(near, "rb", MAX_READ_BYTES)
    try:
        yield ChunkedBody(
            Connection(near, reader),
            length_bytes=length_bytes,
            idle_seconds=5.0,
        )
    finally:
        near.shutdown(socket.SHUT_RDWR)
        sender.join()
        reader.close()
        near.close()


def all_of(body: ChunkedBody, size: int) -> bytes:
    pieces = []
    while piece := body.read(size):
        assert len(piece) <= size
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_body_is_read_however_it_is_cut(step: int, size: int) -> None:
    sent = CHUNKS.replace(b"\r\n\r\n0", b"\r\r\n0")
    with body_of(sent, len(HELD), step) as body:
        assert all_of(body, size) == HELD
        assert body.bytes_read == len(HELD)
        assert body.read(size) == b""


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    "sent",
    [
        b"1" * 200 + b"\r\n",
        b"1;" + b"x" * 1000 + b"\r\na\r\n0\r\n\r\n",
        b"\n" * 200,
        b"1\nx\r\na\r\n0\r\n\r\n",
        b"1\r\nab\r\n0\r\n\r\n",
        b"-1\r\n",
        b"\r\n",
        b"0\r\n" + b"a: b\r\n" * 20,
    ],
)
def test_wrong_chunk_is_refused(sent: bytes, step: int) -> None:
    with (
        body_of(sent, 1, step) as body,
        pytest.raises(HapiError, match="the job's body: "),
    ):
        all_of(body, 10)
