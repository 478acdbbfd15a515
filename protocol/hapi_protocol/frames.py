"""Frames of an object server's answer: kind, length, bytes.

The order is ``READY``, ``ANSWER``, ``DATA`` …, ``USAGE``, ``END``; all but the
last may be missing.  ``ERROR`` instead of the rest ends the answer, and so
does ``END``.  ``BEAT`` may come anywhere: it says that the sender is alive.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from enum import IntEnum

from hapi_protocol.errors import HapiError, error_from_body

MAX_FRAME_BYTES = 16 << 20
"""Profiles are the largest: ``profiles.MAX_PROFILE_BYTES``."""
_HEAD = struct.Struct("!BI")


class Kind(IntEnum):
    """Kind of a frame."""

    BEAT = 0
    READY = 1
    ANSWER = 2
    DATA = 3
    USAGE = 4
    ERROR = 5
    END = 6


class FrameError(ValueError):
    """Bytes are no frame, or their frame is out of order."""


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """The bytes of a frame.

    Args:
        kind: kind of the frame.
        payload: at most :data:`MAX_FRAME_BYTES`.
    """
    return _HEAD.pack(kind, len(payload)) + payload


class FrameReader:
    """Reads frames and checks their order.

    Args:
        read: returns as many bytes as asked for; fewer only at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._last = Kind.BEAT

    def next(self) -> tuple[Kind, bytes]:
        """The next frame, beats included.

        Raises:
            FrameError: it is none, is out of order, or the bytes end.
        """
        number, length = _HEAD.unpack(self._exactly(_HEAD.size))
        try:
            kind = Kind(number)
        except ValueError:
            raise FrameError(f"{number} is no kind of a frame") from None
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame has {length} bytes")
        if kind is not Kind.BEAT:
            self._check_order(kind)
        return kind, self._exactly(length)

    def _check_order(self, kind: Kind) -> None:
        last = self._last
        is_later = kind > last or kind is last is Kind.DATA
        if last is Kind.ERROR or not is_later:
            raise FrameError(f"{kind.name} comes after {last.name}")
        if kind is Kind.DATA and last < Kind.ANSWER:
            raise FrameError("DATA comes before ANSWER")
        self._last = kind

    def _exactly(self, length: int) -> bytes:
        data = self._read(length) if length else b""
        if len(data) != length:
            raise FrameError(f"{length - len(data)} bytes are missing")
        return data


def error_payload(error: HapiError) -> bytes:
    """Payload of an ``ERROR`` frame."""
    facts = {"status": error.status, "retry_after": error.retry_after}
    return json.dumps(facts).encode() + b"\n" + error.to_body()


def read_error(payload: bytes) -> HapiError:
    """The error of an ``ERROR`` frame.

    Raises:
        FrameError: the payload is none.
    """
    facts, _, body = payload.partition(b"\n")
    try:
        fields = json.loads(facts)
        status, seconds = fields["status"], fields["retry_after"]
        retry_after = None if seconds is None else float(seconds)
        if type(status) is not int or not 100 <= status < 600:
            raise ValueError(f"status is {status!r:.80}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(f"an error frame is damaged: {error!r}") from error
    return error_from_body(status, body, retry_after=retry_after)
