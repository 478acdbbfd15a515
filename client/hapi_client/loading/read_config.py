"""Options of reading and decoding."""

from __future__ import annotations

from dataclasses import dataclass

from hapi_client.loading.span_source import SpanLimits
from hapi_client.option_checks import (
    check_integers,
    check_seconds,
    check_types,
)
from hapi_client.sampling.partition import EpochPartition
from hapi_client.sampling.sampler import DEFAULT_BUFFER_SPANS
from hapi_client.swift.retry import Backoff
from hapi_protocol.errors import ClientError

ON_ERROR = ("raise", "skip")
SPAN_SECONDS = 120.0
"""Deadline of one try of one span, decoding included: a span has a few MB and
takes seconds even on a link of 1 Mbit/s."""
SPAN_BACKOFF = Backoff()
"""Waits between the tries of one span."""


@dataclass(frozen=True)
class ReadConfig:
    """Options of reading and decoding.

    A span is a run of consecutive samples of a shard, read by one request.

    Attributes:
        num_threads: concurrent requests of each kind: raw reads, feature
            reads, and reads of cached features.
        ahead_bytes: memory of spans that are read ahead of the training
            loop; at least one span is always read.
        forward_samples: samples of one forward pass of the frozen layers on
            the client; None for what suits the device.
        max_pixels: largest image that the client decodes, height times
            width; the worker has the operator's ``max_pixels``.
        buffer_spans: width of the shuffle buffer, in spans.
        partition: division of an epoch, which says how many ranks and loader
            workers can share it, also after a resume with other numbers of
            them; None for what suits.
        on_error: ``"raise"`` for a sample that cannot be decoded, or
            ``"skip"``, counted in ``stats.skipped``.
        retry_seconds: longest wait for a Swift that does not answer, or
            breaks bodies off, as while its proxy restarts; then the job ends
            with an error.

    Raises:
        ClientError: ``bad_configuration`` naming the option, its value and
            what is allowed.
    """

    # For links on which a single flow is slow; on others, read_concurrency
    # finds that fewer suffice.
    num_threads: int = 4
    # Some 36 spans of 64 photographs of 110 kB.
    ahead_bytes: int = 256 * 1024 * 1024
    forward_samples: int | None = None
    # 8192 x 8192, as the worker's default.
    max_pixels: int = 1 << 26
    buffer_spans: int = DEFAULT_BUFFER_SPANS
    partition: EpochPartition | None = None
    on_error: str = ON_ERROR[0]
    # A restarted proxy is back in seconds, a rebooted host in some minutes.
    retry_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_integers(
            self,
            1,
            "num_threads",
            "ahead_bytes",
            "forward_samples",
            "max_pixels",
            "buffer_spans",
        )
        check_seconds(self, "retry_seconds")
        kinds = (EpochPartition, type(None))
        check_types({"partition": kinds}, vars(self))
        if self.on_error not in ON_ERROR:
            raise ClientError(
                "bad_configuration",
                f"on_error is {self.on_error!r}; allowed: "
                f"{', '.join(ON_ERROR)}",
            )

    @property
    def span_limits(self) -> SpanLimits:
        return SpanLimits(SPAN_SECONDS, SPAN_BACKOFF, self.retry_seconds)
