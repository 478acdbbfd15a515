"""What was seen of a span, and of all of a window of time (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hapi_protocol.summary import Load
from hapi_splitter.planner.problem import Route


@dataclass(frozen=True)
class SpanMetrics:
    """What loading one span took.

    Attributes:
        read_seconds: of a plain read, until its last byte was here.
        read_bytes: of a plain read.
        plain_seconds: of a plain read, decoding included; of the try that
            succeeded, without what may have failed before. 0 for a span
            that came as features.
        decode_cpu_seconds: of a plain read.
        server_cpu_seconds: CPU seconds of the worker for a pushed span.
        forward_seconds: wall seconds of its forwards there.
        forward_cpu_seconds: CPU seconds of them.
        send_blocked_seconds: for which the worker's answer did not find
            room on its way here.
        server_seconds: of the worker by stage, by the clock; as
            :data:`hapi_protocol.feature_stream.STAGES`.
        request_seconds: of a pushed span, until its features were here and
            unpacked; of the try that succeeded.
        unpack_cpu_seconds: of the thread that received them: handling,
            decompressing, undoing their encoding.
        load: what the worker said of itself.
        fell_back: the span should have been pushed.
        was_kept: its features were computed before, and nothing of the
            worker's was needed.
    """

    read_seconds: float = 0.0
    read_bytes: int = 0
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
    fell_back: bool = False
    was_cached: bool = False


@dataclass(frozen=True)
class WindowMetrics:
    """Sums over one window of time.

    Attributes:
        seconds: length of the window.
        samples: that arrived, by the way they came.
        received_bytes: of all answers.
        client_cpu_seconds: of the whole process, all threads.
        decode_cpu_seconds: of the plain reads.
        finished: samples whose layers behind the cut were computed here, by
            cut.
        finish_cpu_seconds: CPU seconds of the loop's own thread, for these.
        train_samples: that the training loop took.
        train_cpu_seconds: CPU seconds of the loop's own thread, outside
            the loader.
        train_seconds: wall seconds, likewise.
        waiting_seconds: in which the loader had no span for the loop.
        reading_share: of the plain reads' time, the part in which they
            waited for bytes (the rest decodes); 0 without such spans.
        reading_seconds: in which at least one of them did.
        reading_bytes: of all answers, received in these.
        reading_flows: how many of them did at a time, on average; what came
            by other answers meanwhile counts as if it were plain reads.
        blocked_share: of the pushed reads' time, the part in which the
            worker could not send.
        stream_seconds: summed durations of the plain reads.
        push_seconds: summed durations of the pushed reads, without what
            the store had kept.
        most_pushed: how many pushed reads were under way at a time, at most.
        pushed_samples: that were pushed and computed, without those that
            fell back or that the store had kept.
        kept: samples that the store had kept, by the way they came.
        server_cpu_seconds: of the worker, for these.
        forward_seconds: wall seconds of the worker's forwards, for these.
        forward_cpu_seconds: CPU seconds of them.
        fell_back: samples that should have been pushed.
        load: the worker's last report.
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

    @property
    def num_samples(self) -> int:
        """That arrived on any way."""
        return sum(self.samples.values())

    @property
    def num_cached(self) -> int:
        """That the store had kept."""
        return sum(self.cached.values())

    def without_cached(self) -> WindowMetrics:
        """The same, had nothing come of what the store had kept."""
        computed = Counter(self.samples)
        computed.subtract(self.cached)
        return replace(self, samples=dict(computed), cached={})
