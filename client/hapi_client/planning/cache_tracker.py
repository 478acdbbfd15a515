"""Which features the store has kept, by what its answers say (pure).

An answer says whether its features were kept before, are to be from now on,
or are not (``X-Hapi-Cache``). Most spans are the same in every epoch, so one
whose features are kept need not be dealt by the plan: it is read, at no cost
of the worker's. That something is to be kept is a promise, which is broken
where it is too large, or the store is full; entries may go, by their age or
by the operator's limits; and they may be there without our doing, of another
rank or of an earlier job. So what comes is compared with what was expected.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import TypeAlias

from hapi_protocol.data_index import Span
from hapi_protocol.headers import (
    CACHE_HIT,
    CACHE_OFF,
    CACHE_READWRITE,
    CACHE_STORE,
)
from hapi_protocol.transforms import Training
from hapi_splitter.planner.cache_plan import Keeping
from hapi_splitter.planner.problem import Route

NEW_WEIGHT = 0.1
"""Of the newest span in the moving averages."""
NEW_LUCK = 0.3
"""Likewise, in that of spans of which nothing was known."""
NEW_DEALT = 0.02
"""Likewise, in that of spans that are dealt, whole or in pieces."""
LIKELY = 0.5
"""Where fewer of those that should have been kept were, all are forgotten."""
LUCKY = 0.8
"""Where so many of those of which nothing was known were kept, the others of
which nothing is known are asked for as well."""
MAX_BROKEN = 2
"""Promises of one span: no further one is believed."""

_Place: TypeAlias = tuple[str, str, int, int]
_Key: TypeAlias = tuple[_Place, Training | None]


class KeptFeatures:
    """Of one job; called by several threads.

    Nothing is noted before :meth:`follow`: only a job that plans has use for
    it.

    Args:
        cache: as
        :attr:`hapi_client.loading.feature_source.FeatureRequestSpec.cache`.
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
        self._is_on = False
        self._lock = threading.Lock()
        # Of whole spans: samples that count, which are those to train on.
        self._places: dict[_Place, int] = {}
        self._num_samples = 0
        self._num_dealt = 0
        self._num_ranks = 1
        self._epoch = 0
        self._whole = 1.0
        self._known: defaultdict[Route, set[_Key]] = defaultdict(set)
        self._counts: Counter[Route] = Counter()
        self._before: Counter[Route] = Counter()
        self._broken: Counter[tuple[Route, _Key]] = Counter()
        self._stored = 1.0 if cache == CACHE_READWRITE else 0.0
        # Of answers to what should have been kept: the first begins anew
        # when all is forgotten, the second is what plans go by.
        self._trust: defaultdict[Route, float] = defaultdict(lambda: 1.0)
        self._promises: defaultdict[Route, float] = defaultdict(lambda: 1.0)
        self._luck: defaultdict[Route, float] = defaultdict(float)
        self._used: Collection[Route] = ()

    def follow(
        self, data: Sequence[Span], others: Sequence[Span] = ()
    ) -> None:
        """Takes notes from now on.

        Args:
            data: all spans of the training data.
            others: of further splits, which evaluations may find again.
        """
        with self._lock:
            self._places = {_place(span): 0 for span in others}
            self._places |= {_place(span): len(span.rows) for span in data}
            self._num_samples = sum(self._places.values())
            self._is_on = self.cache != CACHE_OFF

    def turn_off(self) -> None:
        """The store keeps nothing."""
        self._is_on = False

    def begin(self, epoch: int, ranks: int = 1) -> None:
        """A training epoch begins.

        Args:
            epoch: its number.
            ranks: that share it.
        """
        with self._lock:
            self._epoch = epoch
            self._num_ranks = ranks
            self._num_dealt = 0
            if self._variants and epoch % self._variants == 0:
                self._before = Counter(self._counts)

    def note(
        self, way: Route, span: Span, training: Training | None, state: str
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
        key = _place(span), training
        with self._lock:
            if key[0] not in self._places:
                return
            hit = state == CACHE_HIT
            if key in self._known[way]:
                self._judge(way, key, hit)
            else:
                self._luck[way] = _average(self._luck[way], hit, NEW_LUCK)
            if not hit:
                self._stored = _average(self._stored, state == CACHE_STORE)
            is_promised = (
                state == CACHE_STORE and self._broken[way, key] < MAX_BROKEN
            )
            if (hit or is_promised) and key not in self._known[way]:
                self._known[way].add(key)
                self._counts[way] += self._places[key[0]]

    def _judge(self, way: Route, key: _Key, hit: bool) -> None:
        """Of features that were thought to be kept."""
        self._trust[way] = _average(self._trust[way], hit)
        self._promises[way] = _average(self._promises[way], hit)
        if hit:
            return
        self._broken[way, key] += 1
        self._known[way].remove(key)
        self._counts[way] -= self._places[key[0]]
        if self._trust[way] < LIKELY:
            # They have all gone, or never came: asking for each would take
            # the worker what the plan gives to others.
            self._known[way].clear()
            self._counts[way] = 0
            self._trust[way] = 1.0
        self._before[way] = min(self._before[way], self._counts[way])

    def way_of(self, span: Span, training: Training | None) -> Route | None:
        """On which way a span's features are kept, so that it need not be
        dealt; None if that is not likely, or would not be faster."""
        if not self._recurs(training):
            return None
        place = _place(span)
        with self._lock:
            if place not in self._places:
                return None
            for way in self._used:
                is_known = (place, training) in self._known[way]
                if is_known or self._luck[way] >= LUCKY:
                    return way
        return None

    def dealt(self, span: Span) -> None:
        """A span goes some way, kept or not."""
        if not self._is_on:
            return
        place = _place(span)
        with self._lock:
            is_whole = place in self._places
            self._whole = _average(self._whole, is_whole, NEW_DEALT)
            self._num_dealt += self._places.get(place, len(span.rows))

    def use(self, ways: Collection[Route]) -> None:
        """From now on, what is kept on these ways is asked for.

        Args:
            ways: the fastest first.
        """
        with self._lock:
            self._used = tuple(ways)

    def keeping(self) -> Keeping | None:
        """For the planner; None where nothing is kept."""
        if not self._is_on or not self._variants:
            return None
        with self._lock:
            dealt = self._num_ranks * self._num_dealt / self._num_samples
            epochs = self._epoch % self._variants + min(1.0, dealt)
            ways = [*self._known, *self._luck]
            return Keeping(
                shares={way: self._share(way, self._counts) for way in ways},
                before={way: self._share(way, self._before) for way in ways},
                chance=self._stored,
                chances={
                    way: self._stored * each
                    for way, each in self._promises.items()
                },
                variants=self._variants,
                rest=1 - epochs / self._variants,
                whole=self._whole,
            )

    def _share(self, way: Route, counts: Counter[Route]) -> float:
        assert self._variants
        known = counts[way] / (self._num_samples * self._variants)
        luck = self._luck[way] if self._luck[way] >= LUCKY else 0.0
        return known + luck * (1 - known)

    def _recurs(self, training: Training | None) -> bool:
        return self._is_on and (training is None or self._variants is not None)


def _place(span: Span) -> _Place:
    return span.shard, span.etag, span.rows[0].sample, span.rows[-1].sample


def _average(before: float, newest: bool, weight: float = NEW_WEIGHT) -> float:
    return before + weight * (newest - before)
