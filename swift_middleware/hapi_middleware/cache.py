"""Features kept in Swift, so that they need not be computed again.

* An entry is found behind both authorisations only: whoever may not read the
  source, or the model, never gets so far.
* It is written only for a caller who owns the source's account.
* It has no timings, and no rows with errors: these may differ elsewhere.
* It is checked as a whole before any of it is sent; a damaged one is deleted,
  and what it held is computed as if it had never been.
* It costs the answer nothing but a look: an entry is stored behind the
  answer's end, and given up where it would take too much memory.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from swift.common.swob import Request, Response
from swift.common.utils import close_if_possible, drain_and_close
from swift.proxy.controllers.base import get_container_info

from hapi_middleware.cache_entries import (
    CONTENT_TYPE,
    MAX_NAME_BYTES,
    DamagedEntryError,
    entry_key,
    entry_name,
    pack,
    private_request,
    unpack,
)
from hapi_middleware.concurrency import Task, Timeout
from hapi_middleware.config import FilterConfig
from hapi_middleware.metrics import Metrics
from hapi_middleware.objects import ObjectHead
from hapi_middleware.requests import Env, FeatureRequest
from hapi_middleware.rights import SWIFT_SOURCE, is_owner
from hapi_middleware.worker_client import FeatureStream
from hapi_protocol.errors import HapiError, InternalError
from hapi_protocol.headers import (
    CACHE_MISS,
    CACHE_OFF,
    CACHE_READWRITE,
    CACHE_STORE,
)
from hapi_protocol.split import (
    BOTH,
    CLIENT,
    CONTENT_TYPE_SPLIT,
    KEPT,
    SplitReader,
)

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

    Attributes:
        length_bytes: of the body.
    """

    def __init__(
        self, features: memoryview, buffer: Buffer, taken_bytes: int
    ) -> None:
        self.length_bytes = len(features)
        self._features = features
        self._buffer = buffer
        self._taken_bytes = taken_bytes

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, self.length_bytes, PIECE_BYTES):
            yield bytes(self._features[start : start + PIECE_BYTES])

    def close(self) -> None:
        """Harmless when repeated."""
        self._buffer.free(self._taken_bytes)
        self._taken_bytes = 0
        self._features = memoryview(b"")


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


class CacheCall:
    """What one request has to do with the cache.

    Args:
        cache: of this process.
        env: of the client's request.
        request: the same, parsed.
        head: of the source.

    Attributes:
        state: for the answer's ``X-Hapi-Cache``.
    """

    def __init__(
        self,
        cache: FeatureCache,
        env: Env,
        request: FeatureRequest,
        head: ObjectHead,
    ) -> None:
        self._cache = cache
        self._env = env
        self._request = request
        self._looked_for = ""
        mode = request.annotation.cache
        self.state = CACHE_OFF
        if cache.config.cache and mode != CACHE_OFF and self._fits(head):
            self.state = CACHE_MISS
            account = request.account
            wanted = mode == CACHE_READWRITE and not cache.is_resting(account)
            if wanted and is_owner(env, account):
                self.state = CACHE_STORE

    @property
    def is_used(self) -> bool:
        return self.state != CACHE_OFF

    @property
    def stores(self) -> bool:
        """Whether what is computed shall be kept."""
        return self.state == CACHE_STORE

    def find(self, etag: str) -> KeptFeatures | None:
        """The features with that ETag, if they are kept."""
        if not self.is_used or etag == self._looked_for:
            return None
        self._looked_for = etag
        key, name = self._place(etag)
        return self._cache.find(self._env, self._request.account, name, key)

    def wrap(
        self, stream: FeatureStream, etag: str
    ) -> FeatureStream | KeptStream:
        """The client's part of a stream; keeps it where that is wanted."""
        if not self.stores or stream.content_type != CONTENT_TYPE_SPLIT:
            # A worker of another release splits no streams.
            self.state = CACHE_MISS if self.stores else self.state
            return stream
        key, name = self._place(etag)

        def store(content: bytes) -> None:
            self._cache.store(self._env, self._request.account, name, content)

        return KeptStream(stream, Keeper(self._cache, key, store))

    def _fits(self, head: ObjectHead) -> bool:
        # The HEAD of a manifest authorises none of its segments.
        length = len(self._place("")[1].encode())
        return not head.is_manifest and length <= MAX_NAME_BYTES

    def _place(self, etag: str) -> tuple[str, str]:
        request = self._request
        key = entry_key(etag, request.annotation.byte_range)
        return key, entry_name(request.container, request.object, key)


class Keeper:
    """Holds what may be kept until it is known to be whole.

    Args:
        cache: whose limits it keeps.
        key: of the entry.
        store: what to do with its content, in a green thread of its own.
    """

    def __init__(
        self, cache: FeatureCache, key: str, store: Callable[[bytes], None]
    ) -> None:
        self._cache = cache
        self._key = key
        self._store = store
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._is_open = True

    def add(self, data: bytes) -> None:
        """Take some more, or give it all up."""
        if not self._is_open:
            return
        cache = self._cache
        limit = cache.config.cache_max_entry_bytes
        if self._held_bytes + len(data) > limit:
            cache.count("too_large")
            self.give_up()
        elif not cache.buffer.take(len(data)):
            cache.count("no_buffer")
            self.give_up()
        else:
            self._pieces.append(data)
            self._held_bytes += len(data)

    def finish(self, errors: int) -> None:
        """The stream has ended well; returns at once."""
        if self._is_open and errors:
            self._cache.count("with_errors")
        elif self._is_open:
            self._is_open = False
            Task(self._store_all)
        self.give_up()

    def give_up(self) -> None:
        """Nothing is kept; harmless behind :meth:`finish`."""
        if self._is_open:
            self._is_open = False
            self._free()

    def _store_all(self) -> None:
        try:
            content = pack(self._key, self._pieces)
            self._pieces.clear()
            self._store(content)
        finally:
            self._free()

    def _free(self) -> None:
        self._pieces.clear()
        self._cache.buffer.free(self._held_bytes)
        self._held_bytes = 0


class KeptStream:
    """The client's part of a split stream, while a keeper takes the other.

    Args:
        stream: of the worker.
        keeper: for what may be kept.

    Raises:
        InternalError: while iterating, where the stream is not whole.
    """

    def __init__(self, stream: FeatureStream, keeper: Keeper) -> None:
        self._stream = stream
        self._keeper = keeper
        self._reader = SplitReader()

    def __iter__(self) -> KeptStream:
        return self

    def __next__(self) -> bytes:
        try:
            while not (data := self._take(next(self._stream))):
                pass
            return data
        except StopIteration:
            self._end()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._keeper.give_up()
        self._stream.close()

    def _take(self, data: bytes) -> bytes:
        mine = []
        try:
            for kind, piece in self._reader.feed(data):
                if kind in (BOTH, KEPT):
                    self._keeper.add(piece)
                if kind in (BOTH, CLIENT):
                    mine.append(piece)
        except HapiError as error:
            raise self._stream.broken(error) from None
        return b"".join(mine)

    def _end(self) -> None:
        if self._reader.errors is None:
            self.close()
            raise InternalError(
                "internal", "the worker's split stream has no last frame"
            )
        self._keeper.finish(self._reader.errors)
