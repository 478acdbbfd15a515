"""Metrics of one span, and of one measurement window. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hapi_protocol.summary import Load
from hapi_splitter.planner.problem import Route


@dataclass(frozen=True)
class SpanMetrics:
    """Costs of loading one span.

    Attributes:
        read_seconds: seconds of a raw read, until its last byte.
        read_bytes: bytes of a raw read.
        early_bytes: bytes that were read before the loop asked for them,
            which are not in ``read_bytes``.
        raw_seconds: seconds of a raw read with its decoding, without earlier
            failed attempts; 0 for a span of features.
        decode_cpu_seconds: CPU seconds of decoding after a raw read.
        server_cpu_seconds: CPU seconds of the worker for a pushed-down span.
        forward_seconds: wall seconds of the worker's forward passes.
        forward_cpu_seconds: CPU seconds of these passes.
        send_blocked_seconds: seconds in which the worker's response was
            blocked by the link or the client.
        server_seconds: wall seconds of the worker by stage of
            :data:`hapi_protocol.feature_stream.STAGES`.
        request_seconds: seconds of a pushed-down span until its features are
            unpacked, without earlier failed attempts.
        unpack_cpu_seconds: CPU seconds of receiving, decompressing and
            decoding the features.
        load: load that the worker reported.
        worker: opaque name of the worker; empty if it is not known.
        fell_back: True if the span fell back to a raw read.
        was_cached: True if the features came from the feature cache.
    """

    read_seconds: float = 0.0
    read_bytes: int = 0
    early_bytes: int = 0
    raw_seconds: float = 0.0
    decode_cpu_seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    forward_seconds: float = 0.0
    forward_cpu_seconds: float = 0.0
    send_blocked_seconds: float = 0.0
    server_seconds: Mapping[str, float] = field(default_factory=dict)
    request_seconds: float = 0.0
    unpack_cpu_seconds: float = 0.0
    load: Load | None = None
    worker: str = ""
    fell_back: bool = False
    was_cached: bool = False


@dataclass(frozen=True)
class WindowMetrics:
    """Sums over one measurement window.

    Attributes:
        seconds: length of the window.
        samples: samples that arrived, by the route they took.
        received_bytes: bytes of all responses.
        client_cpu_seconds: CPU seconds of all threads of the process.
        decode_cpu_seconds: CPU seconds of decoding after raw reads.
        suffix_samples: samples by cut whose suffix was computed.
        suffix_cpu_seconds: CPU seconds of the loop's thread for suffixes.
        train_samples: samples that the training loop took.
        train_cpu_seconds: CPU seconds of the loop's thread outside the
            loader.
        train_seconds: wall seconds of the loop's thread outside the loader.
        waiting_seconds: seconds in which the loop waited for a span.
        reading_share: fraction of the raw reads' time in which they waited
            for bytes rather than decoded; 0 without raw reads.
        reading_seconds: seconds in which at least one raw read waited for
            bytes.
        reading_bytes: bytes of all responses received in these seconds.
        reading_flows: average number of raw reads that waited concurrently
            in these seconds, scaled up by the bytes of other responses.
        blocked_share: fraction of the pushed-down reads' time in which the
            worker could not send.
        raw_read_seconds: summed durations of the raw reads.
        push_seconds: summed durations of the pushed-down reads, cached ones
            excluded.
        max_pushed: maximum number of concurrent pushed-down reads.
        pushed_samples: samples computed by the worker, without fallbacks and
            cached samples.
        cached: cached samples by the route they took.
        server_cpu_seconds: CPU seconds of the worker for the pushed samples.
        forward_seconds: wall seconds of the worker's forward passes.
        forward_cpu_seconds: CPU seconds of these passes.
        fell_back: samples that fell back to a raw read.
        load: last load that the worker reported.
        num_workers: workers that have computed lately; 0 if none has.
    """

    seconds: float
    samples: Mapping[Route, int] = field(default_factory=dict)
    received_bytes: int = 0
    client_cpu_seconds: float = 0.0
    decode_cpu_seconds: float = 0.0
    suffix_samples: Mapping[int, int] = field(default_factory=dict)
    suffix_cpu_seconds: float = 0.0
    train_samples: int = 0
    train_cpu_seconds: float = 0.0
    train_seconds: float = 0.0
    waiting_seconds: float = 0.0
    reading_share: float = 0.0
    reading_seconds: float = 0.0
    reading_bytes: int = 0
    reading_flows: float = 0.0
    blocked_share: float = 0.0
    raw_read_seconds: float = 0.0
    push_seconds: float = 0.0
    max_pushed: int = 0
    pushed_samples: int = 0
    cached: Mapping[Route, int] = field(default_factory=dict)
    server_cpu_seconds: float = 0.0
    forward_seconds: float = 0.0
    forward_cpu_seconds: float = 0.0
    fell_back: int = 0
    load: Load | None = None
    num_workers: int = 0

    @property
    def num_samples(self) -> int:
        """Samples that arrived on any route."""
        return sum(self.samples.values())

    @property
    def received_rate(self) -> float:
        """Received bytes per second; 0 if nothing was loaded in it."""
        return self.received_bytes / self.seconds if self.seconds else 0.0

    @property
    def num_cached(self) -> int:
        """Cached samples on any route."""
        return sum(self.cached.values())

    def without_cached(self) -> WindowMetrics:
        """Returns the metrics without the cached samples."""
        computed = Counter(self.samples)
        computed.subtract(self.cached)
        return replace(self, samples=dict(computed), cached={})
