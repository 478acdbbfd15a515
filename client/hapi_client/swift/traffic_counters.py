"""Counters of bytes, requests and retries on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from hapi_client.sums import Sums, ThreadTotal


@dataclass(frozen=True)
class TrafficCount(Sums):
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


class Traffic(ThreadTotal[TrafficCount]):
    """Thread-safe counters behind :class:`TrafficCount`."""

    def __init__(self) -> None:
        super().__init__(TrafficCount)
