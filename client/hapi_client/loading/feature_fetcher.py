"""Reads a span's features by one request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from hapi_client.loading.feature_request import (
    FeatureRequestSpec,
    check_objects,
)
from hapi_client.loading.span_source import LoadedSpan, check_keys
from hapi_client.metrics.events import JobStats, SpanEvent
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.sums import ThreadTotal
from hapi_client.swift.connection import Connection
from hapi_client.swift.read_errors import unreadable
from hapi_protocol.data_index import Span
from hapi_protocol.encodings import Encoding
from hapi_protocol.errors import ClientError, HapiError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import STAGES, FeatureBatch
from hapi_protocol.headers import (
    CACHE_HIT,
    CACHE_MISS,
    CACHE_OFF,
    HEADER_CACHE,
    HEADER_WORKER,
)
from hapi_protocol.transforms import Training
from hapi_splitter.encodings import decode as decode_features
from hapi_splitter.planner.problem import Route

logger = logging.getLogger(__name__)


class FeatureFetcher:
    """Reads a span's features by one request.

    Args:
        connection: connection to the account.
        spec: features to request.
        seconds: deadline of the request.
        counters: counters of the job.
        tracker: records the cache states of responses.
    """

    def __init__(
        self,
        connection: Connection,
        spec: FeatureRequestSpec,
        seconds: float,
        counters: ThreadTotal[JobStats],
        tracker: CacheTracker | None = None,
    ) -> None:
        self._connection = connection
        self._spec = spec
        self._seconds = seconds
        self._counters = counters
        self._tracker = tracker or CacheTracker()
        self._has_warned = False

    def cost_bytes(self, span: Span) -> int:
        """Returns the maximum memory of a loaded span."""
        shape = self._spec.shape
        decoded = 4 * int(torch.Size(shape).numel())
        received = Encoding.parse(self._spec.encoding).sample_bytes(shape)
        # Received and decoded together, or received twice (Arrow's copy).
        return len(span.rows) * (received + max(decoded, received))

    def load(self, span: Span, training: Training | None) -> LoadedSpan:
        """Reads a span.

        Raises:
            HapiError: if the store cannot deliver it, or delivers something
                else.
        """
        started, started_cpu = time.monotonic(), time.thread_time()
        try:
            body = self._spec.open(
                self._connection, span, training, seconds=self._seconds
            )
        except HapiError as error:
            raise unreadable(error, span.container, span.shard) from error
        state = body.headers.get(HEADER_CACHE, CACHE_OFF)
        if not span.is_group:
            self._warn_of_no_cache(state, span)
        with body:
            reader = read_features(body)
            batches = list(reader)
            body.drain()
            loaded = self._loaded(span, batches)
        assert reader.summary is not None, "the reader raises without one"
        if reader.summary.saturated:
            self._note_saturated(reader.summary.saturated)
        self._tracker.record(
            Route(self._spec.cut, self._spec.encoding),
            span,
            training,
            # The store does not cache features with errors, although the
            # header came before them.
            CACHE_MISS if loaded.failures else state,
        )
        costs = SpanEvent(
            was_cached=state == CACHE_HIT,
            request_seconds=time.monotonic() - started,
            unpack_cpu_seconds=time.thread_time() - started_cpu,
        )
        if costs.was_cached:
            self._counters.add(cached=len(span.rows))
            return replace(loaded, costs=costs)
        costs = replace(
            costs,
            server_cpu_seconds=reader.summary.cpu_seconds,
            server_seconds={
                stage: sum(batch.timings.get(stage, 0.0) for batch in batches)
                for stage in STAGES
            },
            load=reader.summary.load,
            worker=body.headers.get(HEADER_WORKER, ""),
        )
        return replace(loaded, costs=costs)

    def _warn_of_no_cache(self, state: str, span: Span) -> None:
        is_refused = self._spec.cache != CACHE_OFF and state == CACHE_OFF
        if is_refused and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the store caches no features of %s: the operator has not "
                "enabled the cache, or the shards are large objects",
                span.container,
            )

    def _note_saturated(self, count: int) -> None:
        if not self._counters.count().saturated:
            logger.warning(
                "features beyond the range of %s were clipped (counted in "
                "stats.saturated); use encoding='float32' to avoid this",
                self._spec.encoding,
            )
        self._counters.add(saturated=count)

    def _loaded(
        self, span: Span, batches: Sequence[FeatureBatch]
    ) -> LoadedSpan:
        rows = [row for batch in batches for row in batch.rows]
        first = 0
        if span.is_group:
            first = span.rows[0].sample
            check_objects(span, rows)
        check_keys(span, [(first + row.index, row.key) for row in rows])
        failures = {
            number: row.error
            for number, row in enumerate(rows)
            if row.error is not None
        }
        num_good = len(rows) - len(failures)
        try:
            features = self._decoded(batches, num_good)
        except ValueError as error:
            raise ClientError(
                "truncated",
                f"{span.path} {span.samples}: {error}",
            ) from error
        return LoadedSpan(span, self._spec.cut, features, failures)

    def _decoded(
        self, batches: Sequence[FeatureBatch], num_good: int
    ) -> torch.Tensor:
        features = torch.empty(
            (num_good, *self._spec.shape), dtype=torch.float32
        )
        rest = features
        for batch in batches:
            if batch.features is not None:
                count = len(batch.features)
                decode_features(
                    batch.features,
                    self._spec.encoding,
                    batch.scale,
                    batch.zero,
                    out=rest[:count],
                )
                rest = rest[count:]
        if len(rest):
            raise ValueError(f"features of {len(rest)} samples are missing")
        return features
