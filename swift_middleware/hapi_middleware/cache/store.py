"""Features kept in Swift: finding entries, and storing them.

An entry is checked as a whole before any of it is sent; a damaged one is
deleted, and what it held is computed as if it had never been.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from swift.common.swob import Request, Response
from swift.common.utils import close_if_possible, drain_and_close
from swift.proxy.controllers.base import get_container_info

from hapi_middleware.cache.entries import (
    CONTENT_TYPE,
    DamagedEntryError,
    private_request,
    unpack,
)
from hapi_middleware.concurrency import Task, Timeout
from hapi_middleware.config import FilterConfig
from hapi_middleware.metrics import Metrics
from hapi_middleware.requests.annotation_request import Env
from hapi_middleware.requests.authorization import SWIFT_SOURCE

STORE_SECONDS = 60.0
"""For storing an entry, or deleting one; nobody waits for it."""
REST_SECONDS = 60.0
"""For which nothing is stored after Swift did not take an entry.  Swift shuns
a disk that was found to be full, for reads as well: no need to ask it again
with each answer.  What it refuses (a quota) is the matter of one account."""
_ALL = ""
"""In the place of an account: they all rest."""
PIECE_BYTES = 256 * 1024


class Buffer:
    """Memory of one process for entries that it reads or will store.

    Args:
        limit_bytes: of all together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Whether there is as much, which is then taken."""
        if self.used_bytes + num_bytes > self._limit_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def free(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes


class KeptFeatures:
    """Kept features as the body of an answer; frees their memory at its end.

    It is its own iterator: Swift's filters (``reiterate()``) close what
    ``iter()`` gives them, and nothing else.

    Attributes:
        length_bytes: of the body.
    """

    def __init__(
        self, features: memoryview, buffer: Buffer, taken_bytes: int
    ) -> None:
        self.length_bytes = len(features)
        self._left = features
        self._buffer = buffer
        self._taken_bytes = taken_bytes

    def __iter__(self) -> KeptFeatures:
        return self

    def __next__(self) -> bytes:
        if not self._left:
            self.close()
            raise StopIteration
        piece = bytes(self._left[:PIECE_BYTES])
        self._left = self._left[PIECE_BYTES:]
        return piece

    def close(self) -> None:
        """Harmless when repeated."""
        self._buffer.free(self._taken_bytes)
        self._taken_bytes = 0
        self._left = memoryview(b"")


class FeatureCache:
    """Reads and stores entries; what goes wrong goes to log and metrics.

    Args:
        app: the rest of the pipeline.
        config: options of the filter.
        metrics: of the filter.
        logger: Swift's.

    Attributes:
        buffer: of this process.
    """

    def __init__(
        self, app: Any, config: FilterConfig, metrics: Metrics, logger: Any
    ) -> None:
        self.config = config
        self._metrics = metrics
        self.buffer = Buffer(config.cache_buffer_bytes)
        self._rests: dict[str, float] = {}
        self._app = app
        self._logger = logger

    def find(
        self, env: Env, account: str, name: str, key: str
    ) -> KeptFeatures | None:
        """The features of an entry; None where there is no good one."""
        try:
            with Timeout(self.config.cache_timeout):
                features = self._read(env, account, name, key)
        except DamagedEntryError as error:
            self.count("damaged")
            self._complain(name, f"is damaged and goes: {error}")
            # Nobody waits for that; a grant that is held would lapse.
            Task(lambda: self._delete(env, account, name))
            return None
        except (Exception, Timeout) as error:
            self.count("read_failures")
            self._complain(name, f"cannot be read: {error!r}")
            return None
        self.count("misses" if features is None else "hits")
        return features

    def store(self, env: Env, account: str, name: str, content: bytes) -> None:
        """Keep an entry, unless the account has too many."""
        try:
            with Timeout(STORE_SECONDS):
                outcome = self._store(env, account, name, content)
        except (Exception, Timeout) as error:
            outcome = "store_failures"
            is_refused = isinstance(error, _RefusedError)
            self._rest(account if is_refused else _ALL)
            self._complain(
                name,
                f"cannot be stored: {error!r}; nothing"
                f"{f' of {account}' if is_refused else ''} is, for "
                f"{REST_SECONDS:.0f} s",
            )
        self.count(outcome)

    def is_resting(self, account: str) -> bool:
        """Whether nothing of the account is stored for a while."""
        now = time.monotonic()
        return any(now < self._rests.get(who, 0.0) for who in (_ALL, account))

    def _rest(self, who: str) -> None:
        now = time.monotonic()
        others = {k: v for k, v in self._rests.items() if v > now}
        self._rests = {**others, who: now + REST_SECONDS}

    def count(self, what: str) -> None:
        self._metrics.count(f"cache.{what}")

    def _read(
        self, env: Env, account: str, name: str, key: str
    ) -> KeptFeatures | None:
        request = private_request(env, "GET", account, name)
        response = request.get_response(self._app)
        if not response.is_success:
            drain_and_close(response)
            if response.status_int == 404:
                return None
            raise _answer_error(response.status)
        length = response.content_length or 0
        if not self.buffer.take(length):
            close_if_possible(response.app_iter)
            self.count("no_buffer")
            return None
        try:
            features = _unpacked(response, key, length)
        except BaseException:
            self.buffer.free(length)
            raise
        return KeptFeatures(features, self.buffer, length)

    def _delete(self, env: Env, account: str, name: str) -> None:
        try:
            with Timeout(STORE_SECONDS):
                self._done(private_request(env, "DELETE", account, name))
        except (Exception, Timeout) as error:
            # Whoever reads it next will try again.
            self._complain(name, f"cannot be deleted: {error!r}")

    def _store(self, env: Env, account: str, name: str, content: bytes) -> str:
        limit = self.config.cache_max_account_bytes
        if self._used_bytes(env, account) + len(content) > limit:
            return "full"
        headers = {
            "Content-Type": CONTENT_TYPE,
            "ETag": hashlib.md5(content, usedforsecurity=False).hexdigest(),
            "X-Delete-After": str(self.config.cache_ttl_seconds),
        }
        self._done(
            private_request(
                env, "PUT", account, name, headers=headers, body=content
            )
        )
        return "stores"

    def _used_bytes(self, env: Env, account: str) -> int:
        """Of all entries, as of some seconds ago; makes their container."""
        info = get_container_info(
            private_request(env, "HEAD", account).environ,
            self._app,
            swift_source=SWIFT_SOURCE,
        )
        if info["status"] // 100 == 2:
            return int(info["bytes"] or 0)
        policy = self.config.cache_policy
        headers = {"X-Storage-Policy": policy} if policy else {}
        self._done(private_request(env, "PUT", account, headers=headers))
        return 0

    def _done(self, request: Request) -> None:
        response = request.get_response(self._app)
        drain_and_close(response)
        if not response.is_success:
            raise _answer_error(response.status)

    def _complain(self, name: str, what: str) -> None:
        shown = name.replace("\x00", "/")
        self._logger.warning("hapi: the cache's %s %s", shown, what)


def _unpacked(response: Response, key: str, length: int) -> memoryview:
    try:
        return unpack(key, response.app_iter, length)
    finally:
        # It may take its time, and run out of it, as the reading may.
        close_if_possible(response.app_iter)


class _RefusedError(OSError):
    """Swift's answer says that the request was wrong, not Swift."""


def _answer_error(status: str) -> OSError:
    kind = _RefusedError if status.startswith("4") else OSError
    return kind(f"Swift answers {status}")
