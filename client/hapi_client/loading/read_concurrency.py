"""How many spans are read plainly at a time.

Where a span keeps the link busy for long, reads side by side bring no more:
they share the link, and all come late and together.  The loop has nothing to
do at first, and at the end of an epoch it has the work of all of them left.
There one at a time is enough, if it carries as much as many do; whether it
does is measured, for a single flow may be slow for reasons of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LONG_SECONDS = 0.5
"""Of a span on the whole link; of a shorter one, waiting for a share of it
costs less than a link that is idle between two reads."""
AS_MUCH = 0.97
"""Of what more reads carry, that fewer must carry to be enough."""
NEARLY = 0.9
"""Of what more reads carry, short of which fewer are given up at once.
Between the two they are looked at for :data:`MAX_SECONDS`: a job's first
read has to connect too, and is no measure of those after it."""
FEW = (1, 2)
"""Reads at a time that may be enough."""
MIN_SECONDS = 1.0
"""Of so many reads at a time, before their rate is believed."""
MAX_SECONDS = 8.0
"""Of which a rate remembers as much."""
MAX_AGE_READS = 256
"""After which a rate is not known any more: to find it again costs some
seconds of a lower one."""
NEW_WEIGHT = 0.3
"""Of the newest span in the moving average of their bytes."""
RECENT_SPANS = 4
"""By whose bytes it is told how long a span takes: after so many, the link
may be another one than it was."""


@dataclass
class _Rate:
    num_bytes: float = 0.0
    seconds: float = 0.0
    num_reads: int = 0
    """Of all, when it was seen last."""

    def add(self, num_bytes: float, seconds: float, num_reads: int) -> None:
        self.num_bytes += num_bytes
        self.seconds += seconds
        self.num_reads = num_reads

    def keep_seconds(self, most: float) -> None:
        """Of what was added; the older the less is left of it."""
        if self.seconds > most:
            self.num_bytes *= most / self.seconds
            self.seconds = most

    def keep_bytes(self, most: float) -> None:
        """Likewise."""
        if self.num_bytes > most:
            self.seconds *= most / self.num_bytes
            self.num_bytes = most


class ReadWidth:
    """Finds out how many plain reads at a time are enough.

    It begins with one, so that the first span comes soon.  A read of which
    little is still to come keeps no other one waiting: that is asked for
    meanwhile, and the link has no pause between the two.  It counts by itself
    and not by the job's meter, whose reads begin with their first byte: a
    link that is idle until then speaks against one read at a time.

    Nothing is remembered of a link that carries a span fast: in no time it
    brings so many bytes that they would outweigh, for minutes, all that comes
    when it has become slow.

    Args:
        most: reads at a time.
        received_bytes: bytes received by the job so far, pushed answers
            included: they share the link.
        changed: called when another read may begin, as one is done or
            nearly so.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        most: int,
        received_bytes: Callable[[], int],
        changed: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._received_bytes = received_bytes
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._rates: dict[int, _Rate] = {}
        self._recent = _Rate()
        self._span_bytes = 0.0
        self._num_reads = 0
        self._num_reading = 0
        self._num_ending = 0
        self._num_decoding = 0
        self._mark()

    @property
    def limit(self) -> int:
        """Spans that may be in the lane: those that have nearly been read,
        and those that are being decoded, keep no other one waiting."""
        with self._lock:
            others = self._num_ending + self._num_decoding
            return min(self._most, self._enough() + others)

    @property
    def worth(self) -> float:
        """Reads at a time that one carries as much as, if fewer than all
        are known to be enough; else 1."""
        with self._lock:
            enough = self._enough()
            known = self._rate(enough, enough) is not None
            return self._most / enough if known else 1.0

    @contextmanager
    def reading(self, num_bytes: int) -> Iterator[Callable[[], None]]:
        """What happens inside reads a span, from asking for it on.

        Args:
            num_bytes: of the span.

        Yields:
            To be called once, when little of it is still to come.
        """
        is_ending = False

        def ending() -> None:
            nonlocal is_ending
            with self._lock:
                self._add_up()
                is_ending = True
                self._num_reading -= 1
                self._num_ending += 1
            self._changed()

        with self._lock:
            self._add_up()
            self._num_reading += 1
            self._span_bytes += (num_bytes - self._span_bytes) * (
                NEW_WEIGHT if self._span_bytes else 1.0
            )
        try:
            yield ending
        finally:
            with self._lock:
                self._add_up()
                if is_ending:
                    self._num_ending -= 1
                else:
                    self._num_reading -= 1
                self._num_reads += 1
                self._forget()

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """What happens inside decodes a span that has been read."""
        with self._lock:
            self._num_decoding += 1
        try:
            self._changed()
            yield
        finally:
            with self._lock:
                self._num_decoding -= 1

    def _mark(self) -> None:
        self._seconds_before = self._clock()
        self._bytes_before = self._received_bytes()

    def _add_up(self) -> None:
        """Adds what has come since the last mark, to so many reads."""
        seconds, num_bytes = self._seconds_before, self._bytes_before
        self._mark()
        # One that is ending counts until another one has taken its place.
        count = max(
            self._num_reading,
            min(self._num_reading + self._num_ending, self._enough()),
        )
        if not count:
            return
        seen = (
            self._bytes_before - num_bytes,
            self._seconds_before - seconds,
            self._num_reads,
        )
        self._recent.add(*seen)
        self._recent.keep_bytes(RECENT_SPANS * self._span_bytes)
        if self._spans_are_short():
            self._rates.clear()
            return
        rate = self._rates.setdefault(count, _Rate())
        rate.add(*seen)
        rate.keep_seconds(MAX_SECONDS)

    def _forget(self) -> None:
        """Rates that were not seen for long."""
        for count, rate in list(self._rates.items()):
            if self._num_reads - rate.num_reads > MAX_AGE_READS:
                del self._rates[count]

    def _spans_are_short(self) -> bool:
        """Whether the link carries a span so fast that one read is not
        enough, whatever it carries."""
        recent = self._recent
        return (
            self._span_bytes * recent.seconds < LONG_SECONDS * recent.num_bytes
        )

    def _rate(self, least: int, most: int) -> float | None:
        """Bytes per second of so many reads at a time; None if not known."""
        rates = [r for n, r in self._rates.items() if least <= n <= most]
        seconds = sum(rate.seconds for rate in rates)
        if seconds < MIN_SECONDS:
            return None
        return sum(rate.num_bytes for rate in rates) / seconds

    def _enough(self) -> int:
        """Reads at a time, decoding not counted."""
        if not self._num_reads:
            return 1
        if self._spans_are_short():
            return self._most
        for count in FEW:
            if count >= self._most:
                break
            rate = self._rate(count, count)
            if rate is None:
                return count  # to see what it carries
            # All wider ones together: the highest of several rates is
            # the one that was seen for a lucky moment.
            wider = self._rate(count + 1, self._most)
            if wider is None:
                return self._most  # nothing to compare it with
            is_new = self._rates[count].seconds < MAX_SECONDS
            if rate >= (NEARLY if is_new else AS_MUCH) * wider:
                return count
        return self._most
