"""Loading one span: raw bytes decoded here, or features from the store."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hapi_client.connection import Connection, source_changed
from hapi_client.decode import DecodePool
from hapi_client.retry import (
    Backoff,
    PushGate,
    is_cured_by_streaming,
    is_retryable,
)
from hapi_client.stats import JobCounters
from hapi_client.transport import CancelScope
from hapi_protocol.errors import ClientError, HapiError
from hapi_protocol.features import FeatureBatch, read_features
from hapi_protocol.headers import Annotation, ModelPath
from hapi_protocol.index import Span
from hapi_protocol.shards import IMAGE_EXTENSIONS, Sample, iter_samples
from hapi_splitter.encodings import decode as decode_features
from hapi_splitter.transforms import SampleError

logger = logging.getLogger(__name__)

NO_IMAGE = f"has no image member ({', '.join(IMAGE_EXTENSIONS)})"


@dataclass(frozen=True)
class LoadedSpan:
    """A span's samples as they arrived.

    Attributes:
        span: which one.
        cut: where in the frozen region ``features`` stand; 0 for
            transformed images.
        features: ``[good samples, *shape]`` float32 on the CPU, in order.
        failures: row number to message, for the samples that cannot be
            had however often they are asked for.
    """

    span: Span
    cut: int
    features: torch.Tensor
    failures: Mapping[int, str] = field(default_factory=dict)


class SpanSource(Protocol):
    """Loads spans; called by several threads."""

    def load(self, span: Span, scope: CancelScope) -> LoadedSpan: ...

    def cost_bytes(self, span: Span) -> int:
        """Memory that a loaded span may take, at most."""
        ...


@dataclass(frozen=True)
class SpanLimits:
    """Of one span.

    Attributes:
        seconds: for one try, the decoding included.
        backoff: of tries that broke off.
    """

    seconds: float = 120.0
    backoff: Backoff = field(default_factory=Backoff)


class RawSource:
    """Cut 0: a Range GET of the span's tar members, decoded here.

    Args:
        connection: to the account.
        container: of the shards.
        pool: decodes and transforms.
        shape: of a transformed image.
        limits: of each span.
        counters: of the job.
    """

    def __init__(
        self,
        connection: Connection,
        container: str,
        pool: DecodePool,
        shape: Sequence[int],
        limits: SpanLimits,
        counters: JobCounters,
    ) -> None:
        self._connection = connection
        self._container = container
        self._pool = pool
        self._shape = tuple(shape)
        self._limits = limits
        self._counters = counters

    def cost_bytes(self, span: Span) -> int:
        image = 4 * int(torch.Size(self._shape).numel())
        return span.byte_range.length_bytes + len(span.rows) * image

    def load(self, span: Span, scope: CancelScope) -> LoadedSpan:
        """
        Raises:
            SourceChangedError: when the shard is not the index's.
            HapiError: after the last try.
        """
        backoff = self._limits.backoff
        for failures in range(1, backoff.attempts + 1):
            scope.check()
            try:
                return self._load(span, scope)
            except HapiError as error:
                if failures == backoff.attempts or not is_retryable(error):
                    raise
                logger.info("span again after: %s", error)
                self._counters.add(retries=1)
                scope.wait(_delay(backoff, failures, error))
        raise AssertionError("unreachable")

    def _load(self, span: Span, scope: CancelScope) -> LoadedSpan:
        data = self._connection.get_range(
            self._container,
            span.shard,
            span.byte_range,
            if_match=span.etag,
            seconds=self._limits.seconds,
        )
        samples = list(
            iter_samples(
                io.BytesIO(data),
                name=f"{self._container}/{span.shard}",
                first_index=span.rows[0].sample,
                first_offset=span.rows[0].offset,
            )
        )
        check_keys(span, [(each.index, each.key) for each in samples])
        return self._decode(span, samples, scope)

    def _decode(
        self, span: Span, samples: Sequence[Sample], scope: CancelScope
    ) -> LoadedSpan:
        images = torch.empty((len(samples), *self._shape), dtype=torch.float32)
        failures = {}
        futures = {}
        for row, sample in enumerate(samples):
            image = sample.image()
            if image is None:
                failures[row] = NO_IMAGE
            else:
                futures[row] = self._pool.submit(image, images[row])
        try:
            for row, future in futures.items():
                scope.check()
                try:
                    future.result(self._limits.seconds)
                except SampleError as error:
                    failures[row] = str(error)
        finally:
            for future in futures.values():
                future.cancel()
        if failures:
            images = images[[r for r in futures if r not in failures]]
        return LoadedSpan(span, 0, images, failures)


@dataclass(frozen=True)
class PushPlan:
    """What the storage tier is asked to compute.

    Attributes:
        model: the package.
        cut: from 1 on.
        encoding: of the features on the wire.
        shape: of one sample's features at the cut.
    """

    model: ModelPath
    cut: int
    encoding: str
    shape: tuple[int, ...]

    def annotation(self, span: Span) -> Annotation:
        return Annotation(
            model=self.model,
            cut=self.cut,
            encoding=self.encoding,
            samples=span.samples,
            byte_range=span.byte_range,
            if_source_etag=span.etag,
        )


class PushedSource:
    """Features from the store; cut 0 for spans that cannot be had.

    A span is delivered whole or not at all: a stream that breaks off is
    asked for again, and after the last try the span comes from ``raw``.

    Args:
        connection: to the account.
        container: of the shards.
        plan: what to ask for.
        raw: the fall-back.
        gate: when to push at all.
        limits: of each span.
        counters: of the job.
    """

    def __init__(
        self,
        connection: Connection,
        container: str,
        plan: PushPlan,
        raw: RawSource,
        gate: PushGate,
        limits: SpanLimits,
        counters: JobCounters,
    ) -> None:
        self._connection = connection
        self._container = container
        self._plan = plan
        self._raw = raw
        self._gate = gate
        self._limits = limits
        self._counters = counters

    def cost_bytes(self, span: Span) -> int:
        features = 4 * int(torch.Size(self._plan.shape).numel())
        # Twice: as received and as decoded.
        return 2 * len(span.rows) * features

    def load(self, span: Span, scope: CancelScope) -> LoadedSpan:
        """
        Raises:
            HapiError: that repeating or streaming would not cure.
        """
        if self._gate.admits():
            loaded = self._try_pushed(span, scope)
            if loaded is not None and not loaded.failures:
                return loaded
            if loaded is not None:
                # Limits of the operator's must not decide which samples an
                # epoch has: what fails there is tried here.
                return self._raw.load(span, scope)
        self._counters.add(fallbacks=1)
        return self._raw.load(span, scope)

    def _try_pushed(self, span: Span, scope: CancelScope) -> LoadedSpan | None:
        backoff = self._limits.backoff
        try:
            for failures in range(1, backoff.attempts + 1):
                scope.check()
                try:
                    loaded = self._load(span)
                except HapiError as error:
                    if not is_cured_by_streaming(error):
                        raise
                    last = error
                    # One that was too slow has cost enough time.
                    if not is_retryable(error) or error.code == "too_slow":
                        break
                else:
                    self._gate.succeeded()
                    return loaded
                if failures < backoff.attempts:
                    self._counters.add(retries=1)
                    seconds = _delay(backoff, failures, last)
                    logger.warning(
                        "push-down of %s %s: try %d of %d failed, again in "
                        "%.1f s: %s",
                        span.shard,
                        span.samples,
                        failures,
                        backoff.attempts,
                        seconds,
                        last,
                    )
                    scope.wait(seconds)
        except BaseException:
            self._gate.abandoned()
            raise
        self._gate.failed()
        logger.warning(
            "push-down of %s %s failed, streaming for a while: %s",
            span.shard,
            span.samples,
            last,
        )
        return None

    def _load(self, span: Span) -> LoadedSpan:
        try:
            body = self._connection.get_features(
                self._container,
                span.shard,
                self._plan.annotation(span),
                patient=False,
                seconds=self._limits.seconds,
            )
        except HapiError as error:
            if error.code == "source_changed":
                raise source_changed(
                    self._container, span.shard, error.trans_id
                ) from error
            raise
        with body:
            reader = read_features(body)
            batches = list(reader)
            body.drain()
        if reader.summary is not None and reader.summary.saturated:
            self._note_saturated(reader.summary.saturated)
        return self._loaded(span, batches)

    def _note_saturated(self, count: int) -> None:
        if not self._counters.snapshot().saturated:
            logger.warning(
                "features beyond the range of %s were clipped (counted in "
                "stats.saturated); encoding='float32' keeps them",
                self._plan.encoding,
            )
        self._counters.add(saturated=count)

    def _loaded(
        self, span: Span, batches: Sequence[FeatureBatch]
    ) -> LoadedSpan:
        rows = [row for batch in batches for row in batch.rows]
        check_keys(span, [(row.index, row.key) for row in rows])
        pieces = [
            decode_features(batch.features, self._plan.encoding)
            for batch in batches
            if batch.features is not None
        ]
        none = torch.empty((0, *self._plan.shape), dtype=torch.float32)
        features = torch.cat([none, *pieces])
        failures = {
            number: row.error
            for number, row in enumerate(rows)
            if row.error is not None
        }
        if len(features) != len(rows) - len(failures):
            raise ClientError(
                "truncated",
                f"{self._container}/{span.shard} {span.samples}: "
                f"{len(features)} features for {len(rows)} rows",
            )
        return LoadedSpan(span, self._plan.cut, features, failures)


def _delay(backoff: Backoff, failures: int, error: HapiError) -> float:
    return backoff.delay_seconds(
        failures,
        error.retry_after,
        random.random(),  # noqa: S311
    )


def check_keys(span: Span, found: Sequence[tuple[int, str]]) -> None:
    """Compares the samples that came with those of the index.

    Raises:
        ClientError: ``keys_changed`` naming shard and first difference.
    """
    expected = [(row.sample, row.key) for row in span.rows]
    if list(found) == expected:
        return
    for (index, key), got in zip(expected, [*found, None], strict=False):
        if got != (index, key):
            break
    raise ClientError(
        "keys_changed",
        f"shard {span.shard}: the index says sample {index} is {key!r}, "
        f"and {got!r} came; run 'hapi index' on the data set",
        object_name=span.shard,
    )
