"""Loads spans by raw reads: a Range GET, decoded on the client."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeAlias

import torch

from hapi_client.caching.feature_cache import SampleCache
from hapi_client.data.span_bytes import read_span, span_samples
from hapi_client.loading.decode_pool import DecodePool
from hapi_client.loading.early_reads import EarlyReads
from hapi_client.loading.read_concurrency import ReadConcurrency
from hapi_client.loading.span_source import (
    CACHE_QUEUE,
    RAW_QUEUE,
    LoadedSpan,
    SpanLimits,
    SpanTask,
    check_keys,
    logger,
)
from hapi_client.metrics.events import SpanEvent
from hapi_client.metrics.job_recorder import JobRecorder
from hapi_client.swift.connection import Connection
from hapi_client.swift.retry import Backoff, is_outage, is_retryable
from hapi_client.swift.traffic_counters import TrafficCount
from hapi_client.swift.transport import CancelScope
from hapi_protocol.data_index import Span
from hapi_protocol.errors import HapiError
from hapi_protocol.samples import IMAGE, Medium, Sample, SampleError
from hapi_protocol.transforms import Training
from hapi_splitter.inputs.sample_format import SampleForm

TRUNCATED_SECONDS = 60.0
"""Longest wait for bodies that break off.  A server that was stopped is back
or left out within a minute; a replaced segment of a large object stays, and
looks the same."""
# Twenty lines in the five minutes of ReadConfig.retry_seconds.
_OUTAGE_LOG_SECONDS = 15.0
"""Between two lines that tell that the job waits for Swift."""


class RawSource:
    """Loads spans at cut 0, the input of the model.

    Args:
        connection: connection to the account.
        pool: decodes and transforms samples.
        form: shape and dtype of the model's input.
        limits: time limits of each span.
        recorder: recorder of the job.
        concurrency: counts reads and decoding.
        medium: how samples are stored.
        stored: returns samples that are cached as they are stored, from the
            random changes of the images; None for none.
        early: spans that were read early; None for none.
    """

    def __init__(
        self,
        connection: Connection,
        pool: DecodePool,
        form: SampleForm,
        limits: SpanLimits,
        recorder: JobRecorder,
        concurrency: ReadConcurrency,
        medium: Medium = IMAGE,
        stored: Callable[
            [Training | None], SampleCache | None
        ] = lambda training: None,
        early: EarlyReads | None = None,
    ) -> None:
        self._early = early
        self._stored = stored
        self._connection = connection
        self._pool = pool
        self._form = form
        self._medium = medium
        self._limits = limits
        self._recorder = recorder
        self._concurrency = concurrency
        # Samples that the store could not decode: the client's own error, or
        # None if it can decode them.
        self._errors: dict[_SampleKey, str | None] = {}
        self._outage_logged = 0.0  # time; 0 while Swift answers

    def task(self, span: Span, training: Training | None = None) -> SpanTask:
        """Returns the task of loading a span.

        Args:
            span: the span.
            training: seed and epoch of random changes; None for evaluation.
        """
        stored = self._stored(training)
        is_local = stored is not None and stored.holds(span)
        return SpanTask(
            CACHE_QUEUE if is_local else RAW_QUEUE,
            self.cost_bytes(span),
            lambda scope: self.load(span, scope, training),
        )

    def cost_bytes(self, span: Span) -> int:
        """Returns the maximum memory of a loaded span."""
        decoded = len(span.rows) * self._form.num_bytes
        return span.byte_range.length_bytes + decoded

    def load(
        self, span: Span, scope: CancelScope, training: Training | None = None
    ) -> LoadedSpan:
        """Loads a span, with retries.

        Raises:
            SourceChangedError: if the shard has changed since it was indexed.
            HapiError: after the last attempt, or if Swift has been away for
                ``retry_seconds``.
        """
        backoff, started = self._limits.backoff, time.monotonic()
        for failures in itertools.count(1):
            scope.check()
            try:
                loaded = self._load(span, scope, training)
            except HapiError as error:
                scope.check()
                waited = time.monotonic() - started
                if failures >= backoff.attempts:
                    self._check_outage(error, waited)
                elif not is_retryable(error):
                    raise
                logger.info("%s again after: %s", span, error)
                self._recorder.counters.add(retries=1)
                scope.wait(delay_seconds(backoff, failures, error))
            else:
                self._outage_logged = 0.0
                return loaded
        raise AssertionError("unreachable")

    def _check_outage(self, error: HapiError, waited: float) -> None:
        """Raises an error after the last attempt, unless Swift is away."""
        limit = self._limits.retry_seconds
        if error.code == "truncated":
            limit = min(limit, TRUNCATED_SECONDS)
        if not limit or not is_outage(error):
            raise error
        if waited > limit:
            error.message += (
                f"; raw reads have failed for {waited:.0f} s (retry_seconds, "
                "hapi train --retry-seconds, is how long to wait); when Swift "
                "answers, go on where the run was: hapi train --resume, the "
                "state_dict of the job, or hapi extract to the same folder"
            )
            raise error
        now = time.monotonic()
        if now - self._outage_logged > _OUTAGE_LOG_SECONDS:
            self._outage_logged = now
            logger.warning(
                "raw reads fail for %.0f s; waiting up to %.0f s for Swift: "
                "%s",
                waited,
                limit,
                error,
            )

    def failures_of(
        self,
        span: Span,
        rows: Sequence[int],
        scope: CancelScope,
        training: Training | None = None,
    ) -> dict[int, str]:
        """Tries samples that the store cannot decode.

        Each sample is read alone, and only once: it cannot change without a
        new ETag of its shard.

        Args:
            span: span of the samples.
            rows: their rows in it.
            scope: cancels the reads.
            training: seed and epoch of random changes; None for evaluation.

        Returns:
            Error messages by row, of samples that the client cannot decode
            either.

        Raises:
            HapiError: as :meth:`load`.
        """
        messages = {}
        for row in rows:
            key = _sample_key(span, row, training)
            if key not in self._errors:
                sample = span.part(row, row + 1)
                failures = self.load(sample, scope, training).failures
                self._errors[key] = failures.get(0)
            message = self._errors[key]
            if message is not None:
                messages[row] = message
        return messages

    def decodes_more(
        self, span: Span, training: Training | None = None
    ) -> bool:
        """Returns True if the client, but not the store, decodes a sample."""
        return bool(self._errors) and any(
            self._errors.get(_sample_key(span, row, training), "") is None
            for row in range(len(span.rows))
        )

    def _load(
        self, span: Span, scope: CancelScope, training: Training | None
    ) -> LoadedSpan:
        started = time.monotonic()
        stored = self._stored(training)
        data = stored.get(span) if stored else None
        is_new = data is None
        read_seconds, early_bytes = 0.0, 0
        if data is not None:
            self._recorder.counters.add(local_reads=len(span.rows))
        else:
            if self._early is not None:
                data = self._early.take(span, scope, self._reading)
            early_bytes = len(data or b"")
            if data is None:
                data = self._read(span)
            read_seconds = time.monotonic() - started
        with self._concurrency.decoding():
            samples = span_samples(span, data)
            check_keys(
                span, [(sample.index, sample.key) for sample in samples]
            )
            if stored and is_new:
                stored.put(span, data)
            loaded, decode_cpu_seconds = self._decode(
                span, samples, scope, training
            )
        return replace(
            loaded,
            costs=SpanEvent(
                read_seconds=read_seconds,
                read_bytes=len(data) - early_bytes if read_seconds else 0,
                raw_seconds=time.monotonic() - started,
                decode_cpu_seconds=decode_cpu_seconds,
                traffic=TrafficCount(early_bytes, requests=early_bytes > 0),
            ),
        )

    def _read(self, span: Span) -> bytes:
        with self._concurrency.reading(span.byte_range.length_bytes) as ending:
            return read_span(
                self._connection,
                span,
                seconds=self._limits.seconds,
                reading=self._reading,
                ending=ending,
            )

    def _reading(self) -> AbstractContextManager[None]:
        """Counts the block as a read that waits for bytes."""
        return self._recorder.reading(self._concurrency.equivalent_reads)

    def _decode(
        self,
        span: Span,
        samples: Sequence[Sample],
        scope: CancelScope,
        training: Training | None,
    ) -> tuple[LoadedSpan, float]:
        """Returns the decoded span, and CPU seconds of decoding."""
        decoded = torch.empty(
            (len(samples), *self._form.shape), dtype=self._form.dtype
        )
        seconds = 0.0
        failures = {}
        futures = {}
        for row, sample in enumerate(samples):
            try:
                data = sample.content(self._medium)
            except SampleError as error:
                failures[row] = str(error)
                continue
            futures[row] = self._pool.submit(
                data, decoded[row], sample.key, training
            )
        try:
            for row, future in futures.items():
                scope.check()
                try:
                    seconds += self._pool.result(future, self._limits.seconds)
                except SampleError as error:
                    failures[row] = str(error)
        finally:
            for future in futures.values():
                future.cancel()
        if failures:
            decoded = decoded[[r for r in futures if r not in failures]]
        return LoadedSpan(span, 0, decoded, failures), seconds


_SampleKey: TypeAlias = tuple[str, str, int, bool]


def _sample_key(span: Span, row: int, training: Training | None) -> _SampleKey:
    # A sample may be decodable in evaluation only, or in training only.
    return span.path, span.etag, span.rows[row].sample, training is None


def delay_seconds(backoff: Backoff, failures: int, error: HapiError) -> float:
    return backoff.delay_seconds(
        failures,
        error.retry_after,
        random.random(),  # noqa: S311
    )
