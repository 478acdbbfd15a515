"""The tee stream: one answer with bytes for the client and for the cache.

Facts about one request (its timings, the worker's load) must not be served to
the next request for the same features.  So the worker marks the bytes that
may be cached: the answer is a sequence of frames, each of one byte of kind,
four bytes of length (big-endian) and the data.  Frames for the client and for
both make one Arrow stream; frames for the cache and for both make another one
of the same rows.  The last frame has the number of rows with errors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator

from hapi_protocol.errors import InternalError

CONTENT_TYPE_TEE = "application/vnd.hapi.split-stream"

BOTH = b"B"
CLIENT = b"C"
CACHE = b"K"
END = b"E"
KINDS = (BOTH, CLIENT, CACHE, END)

MAX_END_BYTES = 4096
"""Maximum length of the last frame, which has one number."""

_HEADER = struct.Struct(">cI")


def frame(kind: bytes, data: bytes) -> bytes:
    """One frame of a tee stream.

    Args:
        kind: one of :data:`KINDS`.
        data: bytes of the frame.
    """
    return _HEADER.pack(kind, len(data)) + data


def end_frame(errors: int) -> bytes:
    """The last frame of a tee stream.

    Args:
        errors: number of rows with an error.
    """
    return frame(END, json.dumps({"errors": errors}).encode())


class TeeReader:
    """Splits a tee stream into data of known kinds.

    Attributes:
        errors: number of rows with an error; None before the last frame.
    """

    def __init__(self) -> None:
        self.errors: int | None = None
        self._kind = b""
        self._missing_bytes = 0
        """Bytes of the current frame that have not been fed yet."""
        self._partial = b""
        """Start of a header, or of the last frame."""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields (kind, data); data is a part of a frame, never empty.

        Raises:
            InternalError: it is not a tee stream.
        """
        view = memoryview(data)
        while view:
            if not self._missing_bytes:
                view = self._take_header(view)
                continue
            piece = bytes(view[: self._missing_bytes])
            view = view[len(piece) :]
            self._missing_bytes -= len(piece)
            if self._kind == END:
                self._take_end(piece)
            else:
                yield self._kind, piece

    def _take_header(self, view: memoryview) -> memoryview:
        if self.errors is not None:
            raise bad_stream("bytes after its last frame")
        missing = _HEADER.size - len(self._partial)
        self._partial += bytes(view[:missing])
        if len(self._partial) == _HEADER.size:
            self._kind, self._missing_bytes = _HEADER.unpack(self._partial)
            self._partial = b""
            _check_header(self._kind, self._missing_bytes)
        return view[missing:]

    def _take_end(self, piece: bytes) -> None:
        self._partial += piece
        if self._missing_bytes:
            return
        try:
            errors = json.loads(self._partial)["errors"]
        except (ValueError, KeyError, TypeError) as error:
            raise bad_stream(f"its last frame: {error!r}") from error
        if type(errors) is not int or errors < 0:
            raise bad_stream(f"{errors!r} errors in its last frame")
        self._partial = b""
        self.errors = errors


def whole_frames(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yields kind and data of each frame, when all of it is there.

    Raises:
        InternalError: it is not a tee stream, or ends within a frame.
    """
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        while len(waiting) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(waiting)
            _check_header(kind, length)
            end = _HEADER.size + length
            if len(waiting) < end:
                break
            yield kind, bytes(waiting[_HEADER.size : end])
            del waiting[:end]
    if waiting:
        raise bad_stream("it ends within a frame")


def _check_header(kind: bytes, length: int) -> None:
    if kind not in KINDS:
        raise bad_stream(f"a frame of kind {kind!r}")
    if not length or (kind == END and length > MAX_END_BYTES):
        raise bad_stream(f"a frame {kind!r} of {length} bytes")


def bad_stream(reason: str) -> InternalError:
    """The error for a stream that is not as described here."""
    return InternalError("internal", f"the worker's tee stream: {reason}")
