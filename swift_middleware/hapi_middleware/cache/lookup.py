"""Cache lookup of one request.

* An entry is read only after both authorisations: the caller may read the
  source and the model.
* It is written only for a caller that owns the source's account.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from hapi_middleware.cache.cache_writer import CacheWriter, CachingStream
from hapi_middleware.cache.entries import MAX_NAME_BYTES, Entry, entry_name
from hapi_middleware.cache.store import CacheEntryBody, StoreCache
from hapi_middleware.requests.annotation_request import Env, FeatureRequest
from hapi_middleware.requests.authorization import is_owner
from hapi_middleware.requests.subrequests import ObjectHead
from hapi_middleware.worker.feature_stream import WorkerStream
from hapi_protocol.feature_identity import cache_key
from hapi_protocol.headers import (
    CACHE_MISS,
    CACHE_OFF,
    CACHE_READWRITE,
    CACHE_STORE,
)
from hapi_protocol.tee_stream import CONTENT_TYPE_TEE


@dataclass(eq=False, repr=False)
class CacheLookup:
    """The cache's part in one request.

    Args:
        cache: feature cache of this process.
        env: WSGI environment of the client's request.
        request: the parsed request.
        head: facts about the source.
        payer: the charged account.

    Attributes:
        state: value of the answer's ``X-Hapi-Cache``.
    """

    cache: StoreCache
    env: Env
    request: FeatureRequest
    head: InitVar[ObjectHead]
    payer: str

    def __post_init__(self, head: ObjectHead) -> None:
        self._last_etag = ""
        mode = self.request.annotation.cache
        self.state = CACHE_OFF
        if self.cache.config.cache and mode != CACHE_OFF and self._fits(head):
            self.state = CACHE_MISS
            account = self.request.account
            may_store = mode == CACHE_READWRITE and not self.cache.is_paused(
                account
            )
            if may_store and is_owner(self.env, account):
                self.state = CACHE_STORE

    @property
    def is_used(self) -> bool:
        """True if entries are read."""
        return self.state != CACHE_OFF

    @property
    def stores(self) -> bool:
        """True if computed features are stored."""
        return self.state == CACHE_STORE

    def find(self, etag: str) -> CacheEntryBody | None:
        """The cached features with this ETag; asks Swift once per ETag."""
        if not self.is_used or etag == self._last_etag:
            return None
        self._last_etag = etag
        return self.cache.find(self._entry(etag), self.payer)

    def wrap(
        self, stream: WorkerStream, etag: str
    ) -> WorkerStream | CachingStream:
        """The client's part of a stream; stores the features if allowed."""
        if not self.stores or stream.content_type != CONTENT_TYPE_TEE:
            # A worker of another release has no tee streams.
            self.state = CACHE_MISS if self.stores else self.state
            return stream
        writer = CacheWriter(self.cache, self._entry(etag), self.payer)
        return CachingStream(stream, writer)

    def _fits(self, head: ObjectHead) -> bool:
        # The HEAD of a manifest authorises none of its segments.
        length = len(self._entry("").name.encode())
        return not head.is_manifest and length <= MAX_NAME_BYTES

    def _entry(self, etag: str) -> Entry:
        request = self.request
        annotation = request.annotation
        key = cache_key(etag, annotation.byte_range, annotation.crc32s)
        name = entry_name(request.container, request.object, key)
        return Entry(self.env, request.account, name, key)
