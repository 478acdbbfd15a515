"""Chunked bodies, however their bytes arrive."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from cheroot.makefile import StreamReader

from hapi_protocol.errors import HapiError, TooLargeError, TooSlowError
from hapi_worker.jobs.chunked_body import ChunkedBody
from hapi_worker.peer import ClientDisconnectedError, PeerConnection

CHUNKS = b"4;x=y\r\nab\nd\r\n006\r\nefghi\r\r\n0\r\nTrailer: x\r\n\r\n"


class Wire:
    """Both ends of a connection: ``body`` reads the bytes of ``send``."""

    def __init__(self, length_bytes, idle_seconds):
        self.ours, self.theirs = socket.socketpair()
        self._sender: threading.Thread | None = None
        self.connection = PeerConnection(
            self.ours, StreamReader(self.ours, "rb", 64 * 1024)
        )
        self.body = ChunkedBody(
            self.connection,
            length_bytes=length_bytes,
            idle_seconds=idle_seconds,
        )

    def send(self, data):
        self.theirs.sendall(data)

    def send_in_pieces(self, data, step):
        """Sends in a thread: the socket's buffer holds few small pieces."""

        def send():
            with contextlib.suppress(OSError):
                for start in range(0, len(data), step):
                    self.theirs.sendall(data[start : start + step])

        self._sender = threading.Thread(target=send)
        self._sender.start()

    def read_all(self, size=1000):
        pieces = []
        while piece := self.body.read(size):
            assert len(piece) <= size
            pieces.append(piece)
        return b"".join(pieces)

    def close(self):
        self.ours.close()
        if self._sender is not None:
            self._sender.join(5)
            assert not self._sender.is_alive()
        self.theirs.close()


@pytest.fixture
def wire():
    wire = Wire(10, 0.3)
    yield wire
    wire.close()


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_body_is_the_chunks_joined(wire, step, size):
    wire.send_in_pieces(CHUNKS, step)
    assert wire.read_all(size) == b"ab\ndefghi\r"
    assert wire.body.read(size) == b""
    assert wire.body.bytes_read == 10


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"a",
        b"a\r\n",
        b"a\r\nabcd",
        b"a\r\nabcdefghij",
        b"a\r\nabcdefghij\r\n",
        b"a\r\nabcdefghij\r\n0",
        b"a\r\nabcdefghij\r\n0\r\n",
    ],
)
def test_incomplete_body_never_ends_cleanly(wire, sent):
    wire.send(sent)
    wire.theirs.close()
    with pytest.raises(ClientDisconnectedError):
        wire.read_all()


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"-1\r\n", HapiError),
        (b"zz\r\n", HapiError),
        (b"\r\n", HapiError),
        (b"\n" * 200, HapiError),
        (b"0x4\r\nabcd\r\n", HapiError),
        (b"1\nx\r\na\r\n0\r\n\r\n", HapiError),
        (b"2\r\nabcd\r\n", HapiError),
        (b"4\r\nabcd\r\n0\r\n\r\n", HapiError),
        (b"b\r\nabcdefghijk\r\n", TooLargeError),
        (b"ffffffffffffffffff\r\n", TooLargeError),
        (b"1" * 1000, HapiError),
        (b"1;" + b"x" * 1000 + b"\r\na\r\n0\r\n\r\n", HapiError),
        (b"a\r\nabcdefghij\r\n0\r\n" + b"X: y\r\n" * 20, HapiError),
        (b"4\r\nab", TooSlowError),
    ],
)
def test_wrong_body_is_refused(wire, sent, kind, step):
    wire.send_in_pieces(sent, step)
    with pytest.raises(kind):
        wire.read_all()


def test_waiting_time_is_measured(wire):
    threading.Timer(0.15, wire.send, [b"1\r\na\r\n"]).start()
    assert wire.body.read(10) == b"a"
    assert 0.1 < wire.body.waited_seconds < 10


def test_stopped_connection_wakes_the_reader():
    wire = Wire(10, 60.0)
    threading.Timer(0.1, wire.connection.stop_reading).start()
    started = time.monotonic()
    with pytest.raises(ClientDisconnectedError):
        wire.body.read(1)
    assert time.monotonic() - started < 30
    assert not wire.connection.is_disconnected()
    wire.theirs.close()
    assert wire.connection.is_disconnected()
    wire.close()
    assert wire.connection.is_disconnected()
