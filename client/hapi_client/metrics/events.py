"""Events of a job: spans, stages and batches; and their sums.  No I/O.

The loaders record each event once.  :class:`WindowMetrics` of the planner,
reports of epochs and :class:`JobStats` are sums of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hapi_client.sums import Sums
from hapi_client.swift.traffic_counters import TrafficCount
from hapi_protocol.summary import WorkerLoad
from hapi_splitter.planner.problem import RAW_ROUTE, Route

WAITING, LAYERS, TRAINING = "waiting", "layers", "training"
PLANNING = "planning"
LOOP_STAGES = (WAITING, LAYERS, TRAINING, PLANNING)


@dataclass(frozen=True)
class JobStats(Sums):
    """Totals of a job so far.

    Attributes:
        bytes: size of all request and response bodies of the job's
            connection except the package, counted as in
            :class:`hapi_client.swift.traffic_counters.TrafficCount`.
        package_bytes: bytes sent to store the model package; 0 if it was
            already stored.
        retries: repeated requests.
        fallbacks: spans read raw because push-down failed or left out a
            sample that the client can decode.
        skipped: samples left out under ``on_error="skip"``.
        saturated: features that the encoding clipped.
        cached: samples whose features came from the store's cache.
        local_hits: samples whose features were cached on this host,
            in memory or in a directory.
        local_reads: samples whose stored bytes were cached on this host.
        samples: samples delivered in batches.
        samples_by_cut: samples received for the training loop, by the cut
            of their features; 0 for raw reads.
        seconds: time spent inside loaders, training steps included.
    """

    bytes: int = 0
    package_bytes: int = 0
    retries: int = 0
    fallbacks: int = 0
    skipped: int = 0
    saturated: int = 0
    cached: int = 0
    local_hits: int = 0
    local_reads: int = 0
    samples: int = 0
    samples_by_cut: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class SpanEvent(Sums):
    """Costs of loading one span.

    Attributes:
        samples: number of its samples.
        seconds: time from its start to its end.
        read_seconds: seconds of a raw read, until its last byte.
        read_bytes: bytes of a raw read, without those that were read before
            the loop asked for them.
        raw_seconds: seconds of a raw read with its decoding, without earlier
            failed attempts; 0 for a span of features.
        decode_cpu_seconds: CPU seconds of decoding after a raw read.
        fell_back: samples that were read raw because push-down failed.
        server_cpu_seconds: CPU seconds of the worker for a pushed-down span.
        server_seconds: seconds of the worker by stage of
            :data:`hapi_protocol.feature_stream.STAGES`.
        request_seconds: seconds of a pushed-down span until its features are
            unpacked, without earlier failed attempts.
        unpack_cpu_seconds: CPU seconds of receiving, decompressing and
            decoding the features.
        traffic: traffic of the thread that loaded the span, and bytes that
            were read early.
        counts: retries, fallbacks and the like of the span.
        was_cached: True if the features came from the store's cache.
        route: scheduled route.
        load: load that the worker reported.
        worker: opaque name of the worker; empty if it is not known.
    """

    samples: int = 0
    seconds: float = 0.0
    read_seconds: float = 0.0
    read_bytes: int = 0
    raw_seconds: float = 0.0
    decode_cpu_seconds: float = 0.0
    fell_back: int = 0
    server_cpu_seconds: float = 0.0
    server_seconds: Mapping[str, float] = field(default_factory=dict)
    request_seconds: float = 0.0
    unpack_cpu_seconds: float = 0.0
    traffic: TrafficCount = field(default_factory=TrafficCount)
    counts: JobStats = field(default_factory=JobStats)
    was_cached: bool = False
    route: Route = RAW_ROUTE
    load: WorkerLoad | None = None
    worker: str = ""

    def stage(self, name: str) -> float:
        """Returns the seconds of a stage of the worker."""
        return self.server_seconds.get(name, 0.0)


@dataclass(frozen=True)
class StageEvent(Sums):
    """A stage of the training loop's thread, for one span or one batch.

    Attributes:
        seconds: wall seconds.
        cpu_seconds: CPU seconds of the thread.
        samples: number of samples of the stage.
        failures: samples of the span that cannot be decoded.
        samples_by_cut: samples whose layers were computed, by their cut.
        stage: one of :data:`LOOP_STAGES`.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    samples: int = 0
    failures: int = 0
    samples_by_cut: Mapping[int, int] = field(default_factory=dict)
    stage: str = ""


@dataclass(frozen=True)
class BatchEvent:
    """One batch that the loop receives, or several of a short time.

    Attributes:
        samples: number of their samples.
        local_hits: samples that were not counted as such before.
        training_seconds: seconds of the loop's body that are in no
            :class:`StageEvent`.
        num_batches: number of batches.
    """

    samples: int = 0
    local_hits: int = 0
    training_seconds: float = 0.0
    num_batches: int = 1


@dataclass(frozen=True)
class WindowMetrics(Sums):
    """Sums over one measurement window.

    Attributes:
        seconds: length of the window.
        samples: samples that arrived, by the route they took.
        cached: those of the store's cache, by the route they took.
        raw: sum of the raw reads.
        pushed: sum of the reads that the worker computed, without fallbacks
            and cached samples.
        waiting: sum of the loop's waits for a span.
        layers: sum of the layers after the cut.
        training: sum of the loop's thread outside the loader.
        planning: sum of measurements and re-plans.
        received_bytes: bytes of all responses.
        client_cpu_seconds: CPU seconds of all threads of the process.
        reading_seconds: seconds in which at least one raw read waited for
            bytes.
        reading_bytes: bytes of all responses received in these seconds.
        flow_seconds: these seconds times the raw reads that waited.
        max_pushed: maximum number of concurrent pushed-down reads.
        load: last load that the worker reported.
        num_workers: workers that have computed lately; 0 if none has.
    """

    seconds: float = 0.0
    samples: Mapping[Route, int] = field(default_factory=dict)
    cached: Mapping[Route, int] = field(default_factory=dict)
    raw: SpanEvent = field(default_factory=SpanEvent)
    pushed: SpanEvent = field(default_factory=SpanEvent)
    waiting: StageEvent = field(default_factory=StageEvent)
    layers: StageEvent = field(default_factory=StageEvent)
    training: StageEvent = field(default_factory=StageEvent)
    planning: StageEvent = field(default_factory=StageEvent)
    received_bytes: int = 0
    client_cpu_seconds: float = 0.0
    reading_seconds: float = 0.0
    reading_bytes: int = 0
    flow_seconds: float = 0.0
    max_pushed: int = 0
    load: WorkerLoad | None = None
    num_workers: int = 0

    @property
    def num_samples(self) -> int:
        """Samples that arrived on any route."""
        return sum(self.samples.values())

    @property
    def num_cached(self) -> int:
        """Cached samples on any route."""
        return sum(self.cached.values())

    @property
    def received_rate(self) -> float:
        """Received bytes per second; 0 if nothing was loaded in it."""
        return _share(self.received_bytes, self.seconds)

    @property
    def reading_share(self) -> float:
        """Fraction of the raw reads' time in which they wait for bytes."""
        return _share(self.raw.read_seconds, self.raw.raw_seconds)

    @property
    def reading_flows(self) -> float:
        """Raw reads that wait at a time, scaled up by other bytes received."""
        return _share(self.flow_seconds, self.reading_seconds) * max(
            1.0, _share(self.reading_bytes, self.raw.read_bytes)
        )

    @property
    def blocked_share(self) -> float:
        """Fraction of the pushed reads' time in which workers cannot send."""
        return _share(self.pushed.stage("send_blocked"), self.pushed.seconds)

    def without_cached(self) -> WindowMetrics:
        """Returns the metrics without the cached samples."""
        computed = Counter(self.samples)
        computed.subtract(self.cached)
        return replace(self, samples=dict(computed), cached={})


def _share(part: float, whole: float) -> float:
    """Returns a quotient; 0 if there is no whole."""
    return part / whole if whole > 0 else 0.0
