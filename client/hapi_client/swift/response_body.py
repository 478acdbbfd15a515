"""Response bodies: counted, limited in time, with named errors."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import time
from types import TracebackType
from typing import Any, TypeVar

import requests
import urllib3

from hapi_client.swift.read_errors import BROKEN_SEGMENT
from hapi_client.swift.traffic_counters import Traffic
from hapi_client.swift.transport import CancelScope
from hapi_protocol.errors import (
    ClientError,
    HapiError,
    TooSlowError,
    TruncatedStreamError,
)
from hapi_protocol.sample_checks import check_md5, etag_md5

READ_BYTES = 1024 * 1024
MAX_DRAIN_BYTES = 64 * 1024
MAX_QUOTED_BYTES = 80
Document = TypeVar("Document", bound="dict[str, Any] | list[Any]")


class ResponseBody(io.RawIOBase):
    """A readable file with the body of one response; the caller closes it.

    ``read(n)`` returns exactly ``n`` bytes unless the body ends, as pyarrow
    requires.  Errors raised in its ``with`` block get the response's
    transaction id and object name if they have none.

    Args:
        response: streaming response of requests.
        object_name: subject of the request, for errors.
        traffic: counts the bytes.
        scope: ends the read when cancelled.
        deadline: time of the monotonic clock for the end of the body.

    Raises:
        TruncatedStreamError: while reading, if the connection breaks.
        TooSlowError: while reading, if the deadline passes.
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
        """Reads the whole body as JSON.

        Args:
            kind: expected type, ``dict`` or ``list``.

        Raises:
            ClientError: ``bad_configuration`` if it is not such JSON, so
                that the response is not Swift's.
        """
        data = self.read()
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, kind):
            return document
        start = data[:MAX_QUOTED_BYTES].decode("utf-8", "replace")
        raise ClientError(
            "bad_configuration",
            f"{self._object_name} returned {start!r} instead of a JSON "
            f"{kind.__name__}; check that the storage URL is Swift's and "
            "that no gateway responds in its place",
            object_name=self._object_name,
            trans_id=self.trans_id,
        )

    def read_whole(self) -> bytes:
        """Reads the body of a whole object, and compares it with its ETag.

        Swift compares them too, but only its log has the result.

        Raises:
            UnavailableError: ``source_damaged``: they differ.
        """
        data = self.read()
        md5 = etag_md5(
            self.headers.get("ETag", "").strip('"'),
            is_manifest="X-Static-Large-Object" in self.headers
            or "X-Object-Manifest" in self.headers,
        )
        if md5 is not None:
            actual = hashlib.md5(data, usedforsecurity=False).hexdigest()
            check_md5(self._object_name, actual, md5)
        return data

    @property
    def length_bytes(self) -> int | None:
        """``Content-Length``, None if the response is chunked."""
        value = self.headers.get("Content-Length")
        return int(value) if value is not None else None

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        missing = None if size is None or size < 0 else size
        pieces = []
        while missing is None or missing > 0:
            piece = self._read_piece(min(missing or READ_BYTES, READ_BYTES))
            if not piece:
                break
            pieces.append(piece)
            if missing is not None:
                missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        piece = self._read_piece(min(len(view), READ_BYTES))
        view[: len(piece)] = piece
        return len(piece)

    def _read_piece(self, size: int) -> bytes:
        self._scope.check()
        if time.monotonic() > self._deadline:
            raise self._error(
                TooSlowError, "too_slow", "did not end before its deadline"
            )
        try:
            # read1 returns what has arrived, so the deadline is checked often.
            piece: bytes = self._response.raw.read1(size, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._scope.check()
            reason = f"broke off after {self._num_read} bytes: {error}"
            if "X-Static-Large-Object" in self.headers:
                reason += f"; if it does so again: {BROKEN_SEGMENT}"
            raise self._error(
                TruncatedStreamError, "truncated", reason
            ) from error
        self._num_read += len(piece)
        self._traffic.add(received_bytes=len(piece))
        return piece

    def _error(
        self, kind: type[HapiError], code: str, problem: str
    ) -> HapiError:
        return kind(
            code,
            f"the body of {self._object_name} {problem}",
            object_name=self._object_name,
            trans_id=self.trans_id,
        )

    def drain(self) -> None:
        """Reads a short rest, so that the connection can be reused.

        Raises:
            TruncatedStreamError: if the body breaks off, or more than a
                short rest is left.
        """
        if len(self.read(MAX_DRAIN_BYTES)) == MAX_DRAIN_BYTES:
            raise self._error(
                TruncatedStreamError, "truncated", "continues after its end"
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
        # Operators search their logs by transaction id.
        if isinstance(error, HapiError):
            error.trans_id = error.trans_id or self.trans_id
            error.object_name = error.object_name or self._object_name
        super().__exit__(kind, error, traceback)
