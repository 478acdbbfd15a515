"""What one request has to do with kept features.

* An entry is found behind both authorisations only: whoever may not read the
  source, or the model, never gets so far.
* It is written only for a caller who owns the source's account.
"""

from __future__ import annotations

from hapi_middleware.cache.cache_writer import CacheWriter, KeptStream
from hapi_middleware.cache.entries import MAX_NAME_BYTES, entry_name
from hapi_middleware.cache.store import FeatureCache, KeptFeatures
from hapi_middleware.requests.annotation_request import Env, FeatureRequest
from hapi_middleware.requests.authorization import is_owner
from hapi_middleware.requests.subrequests import ObjectHead
from hapi_middleware.worker.feature_stream import FeatureStream
from hapi_protocol.headers import (
    CACHE_MISS,
    CACHE_OFF,
    CACHE_READWRITE,
    CACHE_STORE,
    cache_key,
)
from hapi_protocol.tee_stream import CONTENT_TYPE_SPLIT


class CacheLookup:
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

        return KeptStream(stream, CacheWriter(self._cache, key, store))

    def _fits(self, head: ObjectHead) -> bool:
        # The HEAD of a manifest authorises none of its segments.
        length = len(self._place("")[1].encode())
        return not head.is_manifest and length <= MAX_NAME_BYTES

    def _place(self, etag: str) -> tuple[str, str]:
        request = self._request
        key = cache_key(etag, request.annotation.byte_range)
        return key, entry_name(request.container, request.object, key)
