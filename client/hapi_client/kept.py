"""Which features the store has kept, by what its answers say (pure).

An answer says whether its features were kept before, are from now on, or are
not (``X-Hapi-Cache``). Spans are the same in every epoch, so one whose
features are kept need not be dealt by the plan: it is read, at no cost of the
worker's. Entries may go, by their age or by the operator's limits, and may be
there without our doing, of another rank or of an earlier job: so what comes is
compared with what was expected.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import TypeAlias

from hapi_client.meter import Way
from hapi_protocol.headers import (
    CACHE_HIT,
    CACHE_OFF,
    CACHE_READWRITE,
    CACHE_STORE,
)
from hapi_protocol.index import Span
from hapi_protocol.transforms import Training
from hapi_splitter.keeping import Keeping

NEW_WEIGHT = 0.3
"""Of the newest span in the moving averages."""
LIKELY = 0.5
"""A span is asked for as kept where this part of those like it was."""

_Key: TypeAlias = tuple[str, str, int, int, Training | None]


class KeptFeatures:
    """Of one job; called by several threads.

    Args:
        cache: as :attr:`hapi_client.pushed.PushPlan.cache`.
        variants: epochs after which the random changes of the images repeat;
            None for never, 1 where there are none.

    Attributes:
        cache: as it was given.
    """

    def __init__(
        self, cache: str = CACHE_OFF, variants: int | None = 1
    ) -> None:
        self.cache = cache
        self._variants = variants
        self._is_on = cache != CACHE_OFF
        self._chance = 1.0 if cache == CACHE_READWRITE else 0.0
        self._lock = threading.Lock()
        self._spans: defaultdict[Way, set[_Key]] = defaultdict(set)
        self._samples: defaultdict[Way, Counter[str]] = defaultdict(Counter)
        # Of answers: whether those expected to be kept were, and others.
        self._trust = 1.0
        self._luck: defaultdict[Way, float] = defaultdict(float)
        self._used: Collection[Way] = ()

    def turn_off(self) -> None:
        """The store keeps nothing."""
        self._is_on = False

    def note(
        self, way: Way, span: Span, training: Training | None, state: str
    ) -> None:
        """Takes in what an answer said.

        Args:
            way: cut and encoding of the features.
            span: that they are of.
            training: random changes of the images; None for none.
            state: one of :data:`hapi_protocol.headers.CACHE_STATES`.
        """
        if not self._recurs(training):
            return
        key, count = _key(span, training), len(span.rows)
        with self._lock:
            spans, samples = self._spans[way], self._samples[way]
            hit = state == CACHE_HIT
            if key in spans:
                self._trust = _average(self._trust, hit)
            else:
                self._luck[way] = _average(self._luck[way], hit)
            if not hit:
                self._chance = _average(self._chance, state == CACHE_STORE)
            if hit or state == CACHE_STORE:
                samples[span.shard] += 0 if key in spans else count
                spans.add(key)
            elif key in spans:
                samples[span.shard] -= count
                spans.remove(key)

    def way_of(self, span: Span, training: Training | None) -> Way | None:
        """On which way a span's features are kept, so that it need not be
        dealt; None if that is not likely, or would not be faster."""
        if not self._used or not self._recurs(training):
            return None
        key = _key(span, training)
        with self._lock:
            for way in self._used:
                known = key in self._spans[way]
                if (self._trust if known else self._luck[way]) >= LIKELY:
                    return way
        return None

    def use(self, ways: Collection[Way]) -> None:
        """From now on, what is kept on these ways is asked for."""
        with self._lock:
            self._used = tuple(ways)

    def keeping(
        self, num_samples: int, shards: Collection[str]
    ) -> Keeping | None:
        """For the planner; None where nothing is kept.

        Args:
            num_samples: of the training data.
            shards: of them; features of other data are not counted.
        """
        if not self._is_on or self._variants is None:
            return None
        with self._lock:
            shares = {
                way: self._share(way, num_samples * self._variants, shards)
                for way in self._spans
            }
            return Keeping(shares, self._chance, self._variants)

    def _share(
        self, way: Way, num_samples: int, shards: Collection[str]
    ) -> float:
        counts = self._samples[way]
        known = sum(counts[each] for each in shards) / num_samples
        known = min(1.0, known)
        return self._trust * known + self._luck[way] * (1 - known)

    def _recurs(self, training: Training | None) -> bool:
        return self._is_on and (training is None or self._variants is not None)


def _key(span: Span, training: Training | None) -> _Key:
    first, last = span.rows[0].sample, span.rows[-1].sample
    return span.shard, span.etag, first, last, training


def _average(before: float, newest: bool) -> float:
    return before + NEW_WEIGHT * (newest - before)
