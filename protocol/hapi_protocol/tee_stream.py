"""A stream whose reader learns which of its bytes are worth keeping.

What one request took (its timings, the worker's load) must not be told to the
next one that asks for the same features.  The worker therefore marks the bytes
of a stream that may be kept: the answer is a sequence of frames, of one byte
of kind, four of length (big-endian) and the bytes.  Those for the client and
those for both make one Arrow stream; those for keeping and those for both make
another of the same rows.  The last frame says how the rows have fared.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

from hapi_protocol.errors import InternalError

CONTENT_TYPE_SPLIT = "application/vnd.hapi.split-stream"

BOTH = b"B"
CLIENT = b"C"
KEPT = b"K"
END = b"E"
KINDS = (BOTH, CLIENT, KEPT, END)

MAX_END_BYTES = 4096

_HEADER = struct.Struct(">cI")


def frame(kind: bytes, data: bytes) -> bytes:
    """``data`` with its mark, as it travels."""
    return _HEADER.pack(kind, len(data)) + data


def end_frame(errors: int) -> bytes:
    """The last frame.

    Args:
        errors: rows with an error.
    """
    return frame(END, json.dumps({"errors": errors}).encode())


class TeeReader:
    """Takes pieces as they come; gives marked pieces.

    Attributes:
        errors: rows with an error; None until the last frame has come.
    """

    def __init__(self) -> None:
        self.errors: int | None = None
        self._kind = b""
        self._left = 0
        self._pending = b""
        """Of a header, or of the last frame."""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields kind and bytes, never empty; a frame may come in parts.

        Raises:
            InternalError: it is no such stream.
        """
        view = memoryview(data)
        while view:
            if not self._left:
                view = self._take_header(view)
                continue
            piece = bytes(view[: self._left])
            view = view[len(piece) :]
            self._left -= len(piece)
            if self._kind == END:
                self._take_end(piece)
            else:
                yield self._kind, piece

    def _take_header(self, view: memoryview) -> memoryview:
        if self.errors is not None:
            raise _broken("bytes behind its last frame")
        missing = _HEADER.size - len(self._pending)
        self._pending += bytes(view[:missing])
        if len(self._pending) == _HEADER.size:
            self._kind, self._left = _HEADER.unpack(self._pending)
            self._pending = b""
            self._check_header()
        return view[missing:]

    def _check_header(self) -> None:
        if self._kind not in KINDS:
            raise _broken(f"a frame of kind {self._kind!r}")
        if not self._left or (
            self._kind == END and self._left > MAX_END_BYTES
        ):
            raise _broken(f"a frame {self._kind!r} of {self._left} bytes")

    def _take_end(self, piece: bytes) -> None:
        self._pending += piece
        if self._left:
            return
        try:
            errors = json.loads(self._pending)["errors"]
        except (ValueError, KeyError, TypeError) as error:
            raise _broken(f"its last frame: {error!r}") from error
        if type(errors) is not int or errors < 0:
            raise _broken(f"{errors!r} errors in its last frame")
        self._pending = b""
        self.errors = errors


def _broken(what: str) -> InternalError:
    return InternalError("internal", f"the worker's split stream: {what}")
