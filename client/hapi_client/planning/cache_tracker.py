"""Tracks which spans have features in the store's cache.

No I/O; the clock is injected.  Entries become known from the listing at the
start of an epoch (:mod:`hapi_client.planning.cache_listing`) and from the
``X-Hapi-Cache`` header of each response.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TypeAlias

from hapi_protocol.data_index import Span
from hapi_protocol.feature_identity import cache_key, feature_etag
from hapi_protocol.headers import (
    CACHE_HIT,
    CACHE_OFF,
    CACHE_READWRITE,
    CACHE_STORE,
)
from hapi_protocol.transforms import Training, transform_text
from hapi_splitter.planner.cache_plan import CacheState
from hapi_splitter.planner.problem import Route

# Chosen: Swift updates the listing with the PUT, or, if that takes longer than
# a second (``container_update_timeout``), when its updater runs next, which is
# minutes later.  An entry that is forgotten too early is found again by the
# next response for its span.
LISTING_LAG_SECONDS = 10.0
"""Age up to which an entry may be missing in a listing: it is stored after
the response has ended, and Swift updates container listings later still."""

Entry: TypeAlias = tuple[str, str]
"""Object name of the source, and key of the entry."""


class CacheTracker:
    """The set of cached entries that one job may read.

    Empty until :meth:`identify` is called.  Thread-safe.

    Args:
        mode: ``off``, ``read`` or ``readwrite``, as requests ask for it.
        variants: number of epochs after which random changes of the images
            repeat; None if they never do, 1 if there are none.
        clock: returns monotonic seconds.

    Attributes:
        mode: as given.
    """

    def __init__(
        self,
        mode: str = CACHE_OFF,
        variants: int | None = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = mode
        self._variants = variants
        self._clock = clock
        self._can_store = mode == CACHE_READWRITE
        self._model: tuple[str, str] | None = None
        self._lock = threading.Lock()
        self._cached: set[Entry] = set()
        self._stored: dict[Entry, tuple[Route, float]] = {}
        """Announced by responses, not yet confirmed by a listing."""
        self._num_computed: Counter[Route] = Counter()
        self._num_stored: Counter[Route] = Counter()
        self._routes: tuple[Route, ...] = ()

    def identify(self, model_digest: str, numerics_tag: str) -> None:
        """Sets the model and worker whose entries can be found.

        Args:
            model_digest: digest of the package.
            numerics_tag: tag from the worker's profile.  Entries of workers
                with another tag are not found.
        """
        if self.mode != CACHE_OFF:
            self._model = model_digest, numerics_tag

    @property
    def is_active(self) -> bool:
        """True once :meth:`identify` was called and the mode allows hits."""
        return self._model is not None

    def deny_storing(self) -> None:
        """Records that the user may not store entries in this cache."""
        self._can_store = False

    def use(self, routes: Collection[Route]) -> None:
        """Sets the routes whose cached features are read.

        Args:
            routes: routes in the order of their speed, fastest first.
        """
        self._routes = tuple(routes)

    def cached_route(
        self, span: Span, training: Training | None
    ) -> Route | None:
        """Returns the fastest route in use with cached features of a span."""
        if not self._recurs(training):
            return None
        entries = [
            (route, self._entry(route, span, training))
            for route in self._routes
        ]
        with self._lock:
            return next(
                (route for route, entry in entries if entry in self._cached),
                None,
            )

    def record(
        self, route: Route, span: Span, training: Training | None, state: str
    ) -> None:
        """Records the cache state that a response reported.

        Args:
            route: cut and encoding of the features.
            span: span of the features.
            training: random changes of the images; None for none.
            state: one of :data:`hapi_protocol.headers.CACHE_STATES`.
        """
        if not self._recurs(training):
            return
        entry = self._entry(route, span, training)
        with self._lock:
            was_cached = entry in self._cached
            self._cached.discard(entry)
            if state == CACHE_HIT:
                self._cached.add(entry)
                return
            self._num_computed[route] += 1
            if state == CACHE_STORE:
                self._num_stored[route] += 1
                self._stored[entry] = route, self._clock()
                # An entry that was announced before and is missing may be
                # too large: only a listing or a hit confirms it.
                if not was_cached:
                    self._cached.add(entry)

    def add(self, entries: Collection[Entry]) -> None:
        """Adds the entries of one page of a listing."""
        with self._lock:
            self._cached.update(entries)

    def replace(self, entries: Collection[Entry], started: float) -> None:
        """Replaces the known entries by a complete listing.

        Args:
            entries: all cached entries of the job's data.
            started: clock time before the listing was requested.
        """
        listed = set(entries)
        with self._lock:
            recent = {
                entry: stored
                for entry, stored in self._stored.items()
                if stored[1] > started - LISTING_LAG_SECONDS
            }
            for entry, (route, _) in self._stored.items():
                if entry not in listed and entry not in recent:
                    self._num_stored[route] -= 1
            self._cached = listed | (self._cached & recent.keys())
            self._stored = recent

    def state(self) -> CacheState | None:
        """Returns the planner's view of the cache; None without a cache."""
        if self._model is None or not self._variants:
            return None
        if not self._can_store:
            return CacheState(0.0, period_epochs=self._variants)
        with self._lock:
            rates = {
                # One more of each: a rate starts at 1.
                route: (self._num_stored[route] + 1) / (count + 1)
                for route, count in self._num_computed.items()
            }
        return CacheState(1.0, rates, self._variants)

    def _recurs(self, training: Training | None) -> bool:
        return self._model is not None and (
            training is None or self._variants is not None
        )

    def _entry(
        self, route: Route, span: Span, training: Training | None
    ) -> Entry:
        assert self._model is not None, "checked by the callers"
        digest, numerics_tag = self._model
        cut, encoding = route
        etag = feature_etag(
            source_etag=span.etag,
            model_digest=digest,
            cut=cut,
            transform=transform_text(training),
            encoding=encoding,
            samples=span.samples,
            numerics_tag=numerics_tag,
            span_samples=span.whole,
        )
        return span.path, cache_key(etag, span.byte_range, span.crc32s)
