"""Counters of bytes, requests and retries on the wire."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class TrafficCount:
    """Totals of requests and of the bytes of their *bodies*.

    Bytes are counted as they are sent and received, including failed,
    repeated and broken-off requests and error bodies.  Not counted: request
    and status lines, headers, chunk framing, TLS, and token requests.
    """

    received_bytes: int = 0
    sent_bytes: int = 0
    requests: int = 0
    retries: int = 0

    @property
    def total_bytes(self) -> int:
        return self.received_bytes + self.sent_bytes

    def __add__(self, more: TrafficCount) -> TrafficCount:
        return TrafficCount(
            self.received_bytes + more.received_bytes,
            self.sent_bytes + more.sent_bytes,
            self.requests + more.requests,
            self.retries + more.retries,
        )

    def __sub__(self, earlier: TrafficCount) -> TrafficCount:
        return TrafficCount(
            self.received_bytes - earlier.received_bytes,
            self.sent_bytes - earlier.sent_bytes,
            self.requests - earlier.requests,
            self.retries - earlier.retries,
        )


class Traffic:
    """Thread-safe counters behind :class:`TrafficCount`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = TrafficCount()
        self._local = threading.local()

    def add(
        self,
        *,
        received_bytes: int = 0,
        sent_bytes: int = 0,
        requests: int = 0,
        retries: int = 0,
    ) -> None:
        more = TrafficCount(received_bytes, sent_bytes, requests, retries)
        self._local.count = self.of_thread + more
        with self._lock:
            self._count += more

    @property
    def of_thread(self) -> TrafficCount:
        """The current thread's own share of the totals."""
        count: TrafficCount = getattr(self._local, "count", TrafficCount())
        return count

    def count(self) -> TrafficCount:
        with self._lock:
            return self._count
