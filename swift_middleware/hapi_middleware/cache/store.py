"""The store of the feature cache: reads and stores entries in Swift.

An entry is checked as a whole before any of it is sent; a damaged one is
deleted, and its features are computed.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

from swift.common.swob import Request, Response
from swift.common.utils import close_if_possible, drain_and_close
from swift.proxy.controllers.base import get_container_info

from hapi_middleware.cache.buffer import Buffer, BufferReservation
from hapi_middleware.cache.entries import (
    CONTENT_TYPE,
    DamagedEntryError,
    Entry,
    private_request,
    unpack,
)
from hapi_middleware.concurrency import Task, Timeout
from hapi_middleware.config import FilterConfig
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.requests.authorization import SWIFT_SOURCE
from hapi_protocol.errors import make_error
from hapi_protocol.printable import printable

STORE_SECONDS = 60.0
"""Timeout of storing or deleting an entry; no client waits for it."""
PAUSE_SECONDS = 60.0
"""Pause of storing after a failure.  Swift suppresses a disk that is full, for
reads as well, so not every answer should try again.  A refusal (a quota)
pauses one account only."""
_ALL = ""
"""Key of the pause of all accounts."""
PIECE_BYTES = 256 * 1024
"""Equals one read of a worker's stream."""


class CacheEntryBody:
    """Cached features as an answer's body; frees their memory at its end.

    It is its own iterator: Swift's filters (``reiterate()``) close only the
    result of ``iter()``.

    Args:
        features: the features.
        reservation: their memory, which is freed at the end.

    Attributes:
        length_bytes: length of the body.

    Raises:
        TooSlowError: while iterating, if others needed the memory because
            the client reads too slowly.
    """

    def __init__(
        self, features: memoryview, reservation: BufferReservation
    ) -> None:
        self.length_bytes = len(features)
        self._remaining = features
        self._reservation = reservation
        self._is_too_slow = False
        reservation.begin_sending(self._break_off)

    def __iter__(self) -> CacheEntryBody:
        return self

    def __next__(self) -> bytes:
        if self._is_too_slow:
            raise make_error(
                "too_slow",
                "cached features were read too slowly, and others needed "
                "their memory; repeat the request",
            )
        if not self._remaining:
            self.close()
            raise StopIteration
        piece = bytes(self._remaining[:PIECE_BYTES])
        self._remaining = self._remaining[PIECE_BYTES:]
        self._reservation.sent(len(piece))
        return piece

    def close(self) -> None:
        """Frees the memory.  Idempotent."""
        self._reservation.free()
        self._remaining = memoryview(b"")

    def _break_off(self) -> None:
        self._is_too_slow = True
        self.close()


@dataclass(eq=False)
class StoreCache:
    """Reads and stores entries; failures go to log and metrics only.

    Args:
        app: the rest of the pipeline.
        config: options of the filter.
        metrics: metrics of the filter.
        logger: Swift's.

    Attributes:
        buffer: memory budget of this process.
    """

    app: Any
    config: FilterConfig
    metrics: FilterMetrics
    logger: Any

    def __post_init__(self) -> None:
        self.buffer = Buffer(self.config.cache_buffer_bytes)
        self._pauses: dict[str, float] = {}

    def find(self, entry: Entry, payer: str) -> CacheEntryBody | None:
        """The features of an entry; None if there is no undamaged one.

        Args:
            entry: the entry.
            payer: account whose share of the buffer the entry takes.
        """
        try:
            with Timeout(self.config.cache_timeout):
                features = self._read(entry, payer)
        except DamagedEntryError as error:
            self.count("damaged")
            self._warn(entry, f"is damaged and will be deleted: {error}")
            # In the background: the job's grant would lapse meanwhile.
            Task(lambda: self._delete(entry))
            return None
        except (Exception, Timeout) as error:
            self.count("read_failures")
            self._warn(entry, f"cannot be read: {error!r}")
            return None
        self.count("misses" if features is None else "hits")
        return features

    def store(self, entry: Entry, content: bytes) -> None:
        """Stores an entry, unless the account's limit is exceeded."""
        try:
            with Timeout(STORE_SECONDS):
                outcome = self._store(entry, content)
        except (Exception, Timeout) as error:
            outcome = "store_failures"
            is_refused = isinstance(error, _RefusedError)
            self._pause(entry.account if is_refused else _ALL)
            scope = f"of {entry.account}" if is_refused else "at all"
            self._warn(
                entry,
                f"cannot be stored: {error!r}; nothing {scope} is stored for "
                f"{PAUSE_SECONDS:.0f} s",
            )
        self.count(outcome)

    def is_paused(self, account: str) -> bool:
        """Returns True during a pause of storing for the account."""
        now = time.monotonic()
        return any(now < self._pauses.get(key, 0) for key in (_ALL, account))

    def _pause(self, key: str) -> None:
        now = time.monotonic()
        others = {k: v for k, v in self._pauses.items() if v > now}
        self._pauses = {**others, key: now + PAUSE_SECONDS}

    def count(self, outcome: str) -> None:
        """Counts ``hapi.cache.<outcome>``."""
        self.metrics.count(f"cache.{outcome}")

    def _read(self, entry: Entry, payer: str) -> CacheEntryBody | None:
        response = entry.request("GET").get_response(self.app)
        if not response.is_success:
            drain_and_close(response)
            if response.status_int == 404:
                return None
            raise _answer_error(response.status)
        length = response.content_length or 0
        reservation = self.buffer.reservation(payer)
        if not reservation.grow(length):
            close_if_possible(response.app_iter)
            self.count("no_buffer")
            return None
        try:
            features = _unpacked(response, entry.key, length)
        except BaseException:
            reservation.free()
            raise
        return CacheEntryBody(features, reservation)

    def _delete(self, entry: Entry) -> None:
        try:
            with Timeout(STORE_SECONDS):
                self._send(entry.request("DELETE"))
        except (Exception, Timeout) as error:
            # The next request that reads the entry tries again.
            self._warn(entry, f"cannot be deleted: {error!r}")

    def _store(self, entry: Entry, content: bytes) -> str:
        limit = self.config.cache_max_account_bytes
        if self._used_bytes(entry) + len(content) > limit:
            return "full"
        headers = {
            "Content-Type": CONTENT_TYPE,
            "ETag": hashlib.md5(content, usedforsecurity=False).hexdigest(),
            "X-Delete-After": str(self.config.cache_ttl_seconds),
        }
        self._send(entry.request("PUT", headers, content))
        return "stores"

    def _used_bytes(self, entry: Entry) -> int:
        """Length of all entries some seconds ago; creates the container."""
        env, account = entry.env, entry.account
        info = get_container_info(
            private_request(env, "HEAD", account).environ,
            self.app,
            swift_source=SWIFT_SOURCE,
        )
        if info["status"] // 100 == 2:
            return int(info["bytes"] or 0)
        policy = self.config.cache_policy
        headers = {"X-Storage-Policy": policy} if policy else {}
        self._send(private_request(env, "PUT", account, headers=headers))
        return 0

    def _send(self, request: Request) -> None:
        response = request.get_response(self.app)
        drain_and_close(response)
        if not response.is_success:
            raise _answer_error(response.status)

    def _warn(self, entry: Entry, problem: str) -> None:
        shown = printable(entry.name.replace("\x00", "/"))
        self.logger.warning("hapi: the cache's %s %s", shown, problem)


def _unpacked(response: Response, key: str, length: int) -> memoryview:
    try:
        return unpack(key, response.app_iter, length)
    finally:
        # Within the read's timeout: closing may block as well.
        close_if_possible(response.app_iter)


class _RefusedError(OSError):
    """Swift refused the request (a quota), so that a retry fails as well."""


def _answer_error(status: str) -> OSError:
    kind = _RefusedError if status.startswith("4") else OSError
    return kind(f"Swift answers {status}")
