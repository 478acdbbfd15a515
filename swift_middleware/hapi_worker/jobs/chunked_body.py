"""Reads HTTP/1.1 chunked request bodies strictly and with deadlines.

cheroot's own reader takes a truncated last chunk for a clean end, holds a
chunk of any size in memory and does not measure its waiting time.  This one
reads from the same buffered connection, ends only at a complete last chunk,
and is woken by :meth:`PeerConnection.stop_reading`.
"""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass

from hapi_protocol.errors import (
    AnnotationError,
    HapiError,
    TooLargeError,
    TooSlowError,
)
from hapi_worker.peer import ClientDisconnectedError, PeerConnection

MAX_CHUNK_HEADER_BYTES = 128
"""A length of 16 digits and the extensions that nobody sends."""
MAX_TRAILERS = 16
"""Largest number of lines after the last chunk; they are ignored."""
MAX_READ_BYTES = 256 * 1024
"""Also the buffer of each connection: larger ones cost memory per connection,
smaller ones a system call for each filter's chunk (64 KiB) of the source."""


@dataclass(eq=False)
class ChunkedBody:
    """A readable file over a chunked body.

    Args:
        connection: the request's connection.
        length_bytes: required length of the body.
        is_upper_bound: the body may be shorter.
        idle_seconds: longest wait for the next bytes.

    Attributes:
        bytes_read: bytes of the body read until now.
        waited_seconds: time spent waiting for bytes.
    """

    connection: PeerConnection
    _: KW_ONLY
    length_bytes: int
    idle_seconds: float
    is_upper_bound: bool = False

    def __post_init__(self) -> None:
        self._left_in_chunk = 0
        self._ended = False
        self._failure: HapiError | None = None
        # Each read of the connection's reader copies its whole buffer.
        self._buffer = b""
        self._position = 0
        self.bytes_read = 0
        self.waited_seconds = 0.0

    def read(self, size: int, /) -> bytes:
        """Returns 1 to ``size`` bytes, or ``b""`` at the end of the body.

        Raises:
            ClientDisconnectedError: the connection ended inside the body.
            HapiError: the body is too long, too short, too slow, not
                chunked, or was aborted.
        """
        if not self._left_in_chunk:
            self._start_chunk()
        if self._ended or size == 0:
            return b""
        wanted = min(size, self._left_in_chunk, MAX_READ_BYTES)
        self._await_bytes()
        data = self._take(wanted)
        self.bytes_read += len(data)
        self._left_in_chunk -= len(data)
        if not self._left_in_chunk and self._line() != b"":
            raise _bad("a chunk longer than its header says")
        return data

    def abort(self, error: HapiError) -> None:
        """Makes :meth:`read` fail, from another thread.

        The response can still be sent.
        """
        self._failure = error
        self.connection.stop_reading()

    def drain(self) -> None:
        """Reads and drops the rest; raises what :meth:`read` raises."""
        while self.read(MAX_READ_BYTES):
            pass

    def _start_chunk(self) -> None:
        if self._ended:
            return
        header = self._line().partition(b";")[0].strip()
        digits = header.decode("latin-1")
        if not digits or digits.strip("0123456789abcdefABCDEF"):
            raise _bad(f"chunk header {header!r}")
        self._left_in_chunk = int(digits, 16)
        total = self.bytes_read + self._left_in_chunk
        if total > self.length_bytes:
            raise TooLargeError(
                "object_too_large",
                f"the body has {total} bytes or more, and "
                f"{self.length_bytes} were "
                + ("allowed" if self.is_upper_bound else "announced"),
            )
        if not self._left_in_chunk:
            self._end()

    def _end(self) -> None:
        for _ in range(MAX_TRAILERS + 1):
            if self._line() == b"":
                break
        else:
            raise _bad(f"more than {MAX_TRAILERS} trailers")
        self._ended = True
        if self.is_upper_bound:
            return
        if self.bytes_read != self.length_bytes:
            raise _bad(
                f"the body has {self.bytes_read} bytes, and "
                f"{self.length_bytes} were announced"
            )

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            self._await_bytes()
            start = self._position
            limit = MAX_CHUNK_HEADER_BYTES + 1 - len(line)
            end = self._buffer.find(b"\n", start, start + limit)
            line += self._take(limit if end < 0 else end + 1 - start)
            if len(line) > MAX_CHUNK_HEADER_BYTES:
                raise _bad(f"chunk header {line[:32]!r}…")
        return line[:-2]

    def _take(self, size: int) -> bytes:
        """Takes up to ``size`` bytes from the buffer."""
        data = self._buffer[self._position : self._position + size]
        self._position += len(data)
        return data

    def _await_bytes(self) -> None:
        """Fills the buffer if it is empty."""
        if self._position < len(self._buffer):
            return
        if not self.connection.reader.has_data():
            started = time.monotonic()
            ready = self.connection.wait_readable(self.idle_seconds)
            self.waited_seconds += time.monotonic() - started
            if not ready:
                raise TooSlowError(
                    "too_slow",
                    f"nothing was sent for {self.idle_seconds:g} s",
                )
        try:
            self._buffer = self.connection.reader.read1(MAX_READ_BYTES)
        except OSError as error:
            raise ClientDisconnectedError(str(error)) from error
        if self._failure is not None:
            raise self._failure
        self._position = 0
        if not self._buffer:
            raise ClientDisconnectedError("the body is incomplete")


def _bad(reason: str) -> HapiError:
    return AnnotationError("bad_request", f"the job's body: {reason}")
