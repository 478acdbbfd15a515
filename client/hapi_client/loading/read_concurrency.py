"""Limits the number of concurrent raw reads.

That of feature reads is limited in
:mod:`hapi_client.loading.circuit_breaker`.

If a single read saturates the link, concurrent reads add no throughput: they
share the link and finish late and together, so that the training loop waits
at first and has all the work at the end.  A single flow may also be slower
than the link.  So the throughput of 1, 2 and all reads is measured.

No fixed number suits each link.  Measured on epochs of 8 spans: two concurrent
reads took 10 % longer than one if a span took as long on the link as in the
client.  If each flow carried 4 MB/s and four carried 16 MB/s, two reads took
40 % longer than four, and one took 2.6 times as long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Measured, two cores: with spans of 0.28 s on the link, an epoch of 24 spans
# took 0.93 of a hand-written stream's rate with all reads, 0.99 with one.
# Simulated: measuring such spans takes up to 1.8 % longer if a flow carries a
# quarter of the link; with 50 ms before the first byte it takes 2 % less, or
# 1 % more.
SHORT_SPAN_SECONDS = 0.1
"""Transfer time of a span below which all reads are allowed: sharing the link
costs less than a link that is idle between two reads (some 50 ms)."""
# Two throughputs of the same link differ by some percent; a loss of 3 % is
# less than the 10 % that shared reads cost (see above).
SUFFICIENT_RATIO = 0.97
"""Throughput of fewer reads, relative to more, that is sufficient."""
MIN_RATIO = 0.9
"""Relative throughput below which a lower limit is rejected at once.  Above it
they are measured for :data:`MAX_SECONDS`, because the first read of a job has
to connect too and is slower than those after it."""
# Three reads that suffice gain little over four that share, and each candidate
# costs seconds of measuring.
CANDIDATES = (1, 2)
"""Concurrency limits tried before the maximum."""
# Ten spans, since shorter ones than SHORT_SPAN_SECONDS are not measured.
MIN_SECONDS = 1.0
"""Minimum measuring time of a throughput."""
# Chosen: sixteen spans of half a second, in which one slow span counts
# little, and soon forgotten if the link changes.
MAX_SECONDS = 8.0
"""Time over which a throughput is averaged."""
# Measuring costs a second or two of lower throughput, and 256 reads take half
# a minute at least: a few percent of the time.
MAX_AGE_READS = 256
"""Number of reads after which a throughput is measured again."""
# Sizes of spans differ by their last, shorter ones, and by shards.
NEW_WEIGHT = 0.3
"""Smoothing weight of the newest span's size."""
# As many as are read at a time: after that the link may be another one.
RECENT_SPANS = 4
"""Number of spans whose bytes give the link's present speed."""


@dataclass
class _Throughput:
    """Decaying sums of bytes and of the seconds in which they arrived.

    Attributes:
        num_bytes: number of bytes.
        seconds: time in which they arrived.
        num_reads: reads of the job so far when it was updated last.
    """

    num_bytes: float = 0.0
    seconds: float = 0.0
    num_reads: int = 0

    def add(self, num_bytes: float, seconds: float, num_reads: int) -> None:
        self.num_bytes += num_bytes
        self.seconds += seconds
        self.num_reads = num_reads

    def limit_seconds(self, limit: float) -> None:
        """Limits the time and scales the bytes, so that old ones fade."""
        if self.seconds > limit:
            self.num_bytes *= limit / self.seconds
            self.seconds = limit

    def limit_bytes(self, limit: float) -> None:
        """Limits the bytes and scales the time."""
        if self.num_bytes > limit:
            self.seconds *= limit / self.num_bytes
            self.num_bytes = limit


class ReadConcurrency:
    """Adapts the limit of concurrent raw reads to the link.

    The limit starts at one, so that the first span arrives soon.  A read that
    is nearly complete does not count, so that the next one is requested early
    enough to leave the link no pause.  Throughput is measured here and not by
    the job's recorder, which counts a read from its first byte on:
    the idle time before that byte counts against a single read.

    No throughput is stored while spans are short.  A fast link would bring
    so many bytes in a moment that they would outweigh, for minutes, those of
    a link that has become slow.

    Args:
        max_reads: maximum number of concurrent reads.
        received_bytes: returns the bytes that the job has received, features
            included, because they share the link.
        changed: called when another read may begin.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        max_reads: int,
        received_bytes: Callable[[], int],
        changed: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_reads = max_reads
        self._received_bytes = received_bytes
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._rates: dict[int, _Throughput] = {}
        self._recent = _Throughput()
        self._span_bytes = 0.0
        self._num_reads = 0
        self._num_reading = 0
        self._num_ending = 0
        self._num_decoding = 0
        self._mark()

    @property
    def limit(self) -> int:
        """Maximum number of spans between request and decoded samples.

        Spans that are nearly read or being decoded do not hold up others.
        """
        with self._lock:
            others = self._num_ending + self._num_decoding
            return min(self._max_reads, self._sufficient() + others)

    @property
    def equivalent_reads(self) -> float:
        """Number of concurrent reads whose throughput one read reaches.

        It is 1 unless fewer reads than the maximum are known to suffice.
        """
        with self._lock:
            count = self._sufficient()
            is_known = self._bytes_per_second(count, count) is not None
            return self._max_reads / count if is_known else 1.0

    @contextmanager
    def reading(self, num_bytes: int) -> Iterator[Callable[[], None]]:
        """Counts a read of a span, from its request on.

        Args:
            num_bytes: size of the span.

        Yields:
            A function to call once, when the read is nearly complete.
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
        """Counts the decoding of a span that has been read."""
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
        """Adds the bytes since the last mark to the present concurrency."""
        seconds, num_bytes = self._seconds_before, self._bytes_before
        self._mark()
        # A nearly complete read counts until another has taken its place.
        count = max(
            self._num_reading,
            min(self._num_reading + self._num_ending, self._sufficient()),
        )
        if not count:
            return
        arrived = (
            self._bytes_before - num_bytes,
            self._seconds_before - seconds,
            self._num_reads,
        )
        self._recent.add(*arrived)
        self._recent.limit_bytes(RECENT_SPANS * self._span_bytes)
        if self._spans_are_short():
            self._rates.clear()
            return
        rate = self._rates.setdefault(count, _Throughput())
        rate.add(*arrived)
        rate.limit_seconds(MAX_SECONDS)

    def _forget(self) -> None:
        """Removes throughputs that have not been measured for long."""
        for count, rate in list(self._rates.items()):
            if self._num_reads - rate.num_reads > MAX_AGE_READS:
                del self._rates[count]

    def _spans_are_short(self) -> bool:
        """Returns True if spans take under :data:`SHORT_SPAN_SECONDS`."""
        recent = self._recent
        return (
            self._span_bytes * recent.seconds
            < SHORT_SPAN_SECONDS * recent.num_bytes
        )

    def _bytes_per_second(self, lowest: int, highest: int) -> float | None:
        """Throughput of a range of concurrencies; None if not known."""
        rates = [r for n, r in self._rates.items() if lowest <= n <= highest]
        seconds = sum(rate.seconds for rate in rates)
        if seconds < MIN_SECONDS:
            return None
        return sum(rate.num_bytes for rate in rates) / seconds

    def _sufficient(self) -> int:
        """Smallest number of reads that suffices."""
        if not self._num_reads:
            return 1
        if self._spans_are_short():
            return self._max_reads
        for count in CANDIDATES:
            if count >= self._max_reads:
                break
            rate = self._bytes_per_second(count, count)
            if rate is None:
                return count  # measures it
            # All higher ones together: the best of several throughputs may
            # be that of a lucky moment.
            more = self._bytes_per_second(count + 1, self._max_reads)
            if more is None:
                return self._max_reads  # nothing to compare it with
            is_new = self._rates[count].seconds < MAX_SECONDS
            if rate >= (MIN_RATIO if is_new else SUFFICIENT_RATIO) * more:
                return count
        return self._max_reads
