"""The body of an answer: counted, bounded in time, with named errors."""

from __future__ import annotations

import contextlib
import io
import json
import time
from types import TracebackType
from typing import Any, TypeVar

import requests
import urllib3

from hapi_client.swift.traffic_counters import Traffic
from hapi_client.swift.transport import CancelScope
from hapi_protocol.errors import (
    ClientError,
    HapiError,
    TooSlowError,
    TruncatedStreamError,
)

PIECE_BYTES = 1024 * 1024
MAX_DRAIN_BYTES = 64 * 1024
MAX_QUOTED_BYTES = 80
Document = TypeVar("Document", bound="dict[str, Any] | list[Any]")


class ResponseBody(io.RawIOBase):
    """A readable file over one answer's body, to be closed after use.

    ``read(n)`` returns exactly ``n`` bytes unless the body ends, as
    pyarrow wants it.  Errors that are raised in a ``with`` block of it get
    its transaction id and its object's name where they have none.

    Args:
        response: streaming answer of requests.
        object_name: what was asked for, for errors.
        traffic: counts the bytes.
        scope: ends the reading when cancelled.
        deadline: of the monotonic clock, for the whole body.

    Raises:
        TruncatedStreamError: while reading, when the connection breaks.
        TooSlowError: while reading, when the deadline passes.
    """

    def __init__(
        self,
        response: requests.Response,
        object_name: str,
        traffic: Traffic,
        scope: CancelScope,
        deadline: float,
    ) -> None:
        super().__init__()
        self.headers = response.headers
        self.status = response.status_code
        self.trans_id = response.headers.get("X-Trans-Id")
        self._response = response
        self._object_name = object_name
        self._traffic = traffic
        self._scope = scope
        self._deadline = deadline
        self._num_read = 0

    def read_json(self, kind: type[Document]) -> Document:
        """What the whole body says.

        Args:
            kind: ``dict`` or ``list``.

        Raises:
            ClientError: ``bad_configuration`` when it is no such JSON: the
                answer is not Swift's.
        """
        data = self.read()
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, kind):
            return found
        start = data[:MAX_QUOTED_BYTES].decode("utf-8", "replace")
        raise ClientError(
            "bad_configuration",
            f"{self._object_name} was answered with {start!r}, which is no "
            f"JSON {kind.__name__}; the URL is not Swift's, or a gateway "
            "answers in its place",
            object_name=self._object_name,
            trans_id=self.trans_id,
        )

    @property
    def length_bytes(self) -> int | None:
        """``Content-Length``, None where the answer is chunked."""
        value = self.headers.get("Content-Length")
        return int(value) if value is not None else None

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        missing = None if size is None or size < 0 else size
        pieces = []
        while missing is None or missing > 0:
            piece = self._read_piece(min(missing or PIECE_BYTES, PIECE_BYTES))
            if not piece:
                break
            pieces.append(piece)
            if missing is not None:
                missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        piece = self._read_piece(min(len(view), PIECE_BYTES))
        view[: len(piece)] = piece
        return len(piece)

    def _read_piece(self, size: int) -> bytes:
        self._scope.check()
        if time.monotonic() > self._deadline:
            raise self._error(
                TooSlowError, "too_slow", "did not end before its deadline"
            )
        try:
            # read1: whatever has come, so the deadline is looked at often.
            piece: bytes = self._response.raw.read1(size, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._scope.check()
            raise self._error(
                TruncatedStreamError,
                "truncated",
                f"broke off after {self._num_read} bytes: {error}",
            ) from error
        self._num_read += len(piece)
        self._traffic.add(received_bytes=len(piece))
        return piece

    def _error(self, kind: type[HapiError], code: str, what: str) -> HapiError:
        return kind(
            code,
            f"the body of {self._object_name} {what}",
            object_name=self._object_name,
            trans_id=self.trans_id,
        )

    def drain(self) -> None:
        """Reads a short rest, so that the connection can be kept.

        Raises:
            TruncatedStreamError: when the body does not end as it must,
                or more than a short rest is left.
        """
        if len(self.read(MAX_DRAIN_BYTES)) == MAX_DRAIN_BYTES:
            raise self._error(
                TruncatedStreamError, "truncated", "goes on after its end"
            )

    def close(self) -> None:
        if not self.closed:
            # An unread rest makes urllib3 drop the connection.
            with contextlib.suppress(OSError):
                self._response.close()
        super().close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What is wrong with an answer is looked for by its transaction.
        if isinstance(error, HapiError):
            error.trans_id = error.trans_id or self.trans_id
            error.object_name = error.object_name or self._object_name
        super().__exit__(kind, error, traceback)
