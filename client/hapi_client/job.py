"""A transfer-learning job: frozen layers near the data, the tail here."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hapi_client.connection import Connection
from hapi_client.decode import DecodePool
from hapi_client.fetch import Fetcher, FetchOptions
from hapi_client.frozen import FrozenRegion, check_encoding
from hapi_client.index import load_index
from hapi_client.labels import Labels, span_labels
from hapi_client.loader import FeatureLoader, LoaderPlan, check_on_error
from hapi_client.location import Location, parse_location
from hapi_client.order import index_order, shuffled_order
from hapi_client.packages import DEFAULT_MODELS_CONTAINER
from hapi_client.retry import PushGate
from hapi_client.sources import (
    PushedSource,
    PushPlan,
    RawSource,
    SpanSource,
)
from hapi_client.stats import JobCounters, JobStats
from hapi_protocol.index import Span

logger = logging.getLogger(__name__)


class TransferJob:
    """Trains a tail on features of a data set in Swift.

    ::

        with TransferJob(model, freeze="layer4",
                         data="swift://photos/train") as job:
            optimizer = torch.optim.SGD(job.tail.parameters(), lr=0.01)
            for epoch in range(5):
                for features, labels in job.loader(epoch):
                    loss = criterion(job.tail(features), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    Args:
        model: the whole network, with the weights to use.
        freeze: name of the last frozen module.
        data: ``swift://container/prefix`` of an indexed data set.
        batch_size: samples of a batch.
        transform: an ``ImageTransform``, or torchvision's
            ``weights.transforms()``; None for ImageNet's evaluation
            transform.
        cut: how much of the frozen region the store computes: None for
            all of it, ``"stream"`` or 0 for none (plain reads, all
            computed here), or a cut's number.
        encoding: of features on the wire.
        labels: class name or key to integer, or a function of the key;
            None for the integers of the index.
        on_error: ``"raise"`` for a sample that cannot be decoded, or
            ``"skip"``, counted in ``stats.skipped``.
        seed: of the order of samples; not negative.
        connection: None makes one from the environment.
        device: of the tail and the client's part of the frozen region.
        models_container: where packages are stored.
        options: how to fetch.

    Attributes:
        tail: the trainable rest of ``model``; its parameters are those of
            ``model``.

    Raises:
        HapiError: naming what is wrong and the remedy.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        freeze: str,
        data: str,
        batch_size: int = 32,
        transform: Any = None,
        cut: int | str | None = None,
        encoding: str = "float32",
        labels: Labels = None,
        on_error: str = "raise",
        seed: int = 0,
        connection: Connection | None = None,
        device: torch.device | str = "cpu",
        models_container: str = DEFAULT_MODELS_CONTAINER,
        options: FetchOptions | None = None,
    ) -> None:
        check_on_error(on_error)
        self._owns_connection = connection is None
        self._connection = connection or Connection()
        self._traffic_before = self._connection.traffic.count()
        self._options = options or FetchOptions()
        self._order_arguments = (batch_size, seed)
        self._counters = JobCounters()
        self._loaders: weakref.WeakSet[FeatureLoader] = weakref.WeakSet()
        self._frozen = FrozenRegion(
            model,
            freeze,
            transform,
            torch.device(device),
            self._options.forward_samples,
        )
        self.tail = self._frozen.tail
        self.cut = self._frozen.cut_number(cut)
        location = parse_location(data)
        self._plan = self._make_plan(location, labels, on_error)
        self._pool = DecodePool(
            self._frozen.decode, self._options.decode_threads
        )
        try:
            self._source = self._make_source(
                location.container, models_container, encoding
            )
        except BaseException:
            self.close()
            raise

    def _make_plan(
        self, location: Location, labels: Labels, on_error: str
    ) -> LoaderPlan:
        index = load_index(self._connection, location)
        spans = index.spans()
        return LoaderPlan(
            spans=spans,
            labels=span_labels(spans, labels, index.class_names),
            to_freeze_point=self._frozen.finish,
            on_error=on_error,
            counters=self._counters,
        )

    def _make_source(
        self, container: str, models_container: str, encoding: str
    ) -> SpanSource:
        limits = self._options.span_limits
        raw = RawSource(
            self._connection,
            container,
            self._pool,
            self._frozen.input_shape,
            limits,
            self._counters,
        )
        if self.cut == 0:
            return raw
        check_encoding(encoding)
        self._connection.require_hapi()
        model, sent_bytes = self._frozen.store(
            self._connection, models_container
        )
        self._counters.add(package_bytes=sent_bytes)
        gate = PushGate(
            time.monotonic,
            self._options.pause_seconds,
            self._options.most_pause_seconds,
        )
        return PushedSource(
            self._connection,
            container,
            PushPlan(
                model, self.cut, encoding, self._frozen.cut_shape(self.cut)
            ),
            raw,
            gate,
            limits,
            self._counters,
        )

    @property
    def num_cuts(self) -> int:
        """Cut ``num_cuts`` is the whole frozen region."""
        return self._frozen.num_cuts

    @property
    def num_samples(self) -> int:
        """Samples of the data set."""
        return sum(len(span.rows) for span in self._plan.spans)

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return 1 + max(
            (int(each.max()) for each in self._plan.labels), default=-1
        )

    @property
    def stats(self) -> JobStats:
        """Figures so far."""
        traffic = self._connection.traffic.count() - self._traffic_before
        stats = self._counters.snapshot()
        return replace(
            stats,
            bytes=traffic.total_bytes - stats.package_bytes,
            retries=stats.retries + traffic.retries,
        )

    def loader(
        self, epoch: int | None = None, *, drop_last: bool = False
    ) -> FeatureLoader:
        """One pass over the data set.

        Args:
            epoch: number of the training epoch; with the job's seed it
                fixes the order.  None for the index's order, without
                shuffling, as evaluation wants it.
            drop_last: leave out a shorter last batch.
        """
        batch_size, seed = self._order_arguments
        sizes = [len(span.rows) for span in self._plan.spans]
        if epoch is None:
            order = index_order(sizes, batch_size, drop_last=drop_last)
        else:
            order = shuffled_order(
                sizes,
                batch_size,
                seed=seed,
                epoch=epoch,
                buffer_spans=self._options.buffer_spans,
                drop_last=drop_last,
            )
        loader = FeatureLoader(
            self._plan, order, self._open_spans, self._frozen.device
        )
        self._loaders.add(loader)
        return loader

    def _open_spans(self, spans: Sequence[Span]) -> Fetcher:
        return Fetcher(self._connection, self._source, spans, self._options)

    def close(self) -> None:
        """Ends all requests and threads of the job."""
        for loader in list(self._loaders):
            loader.close()
        self._pool.close()
        if self._owns_connection:
            self._connection.close()

    def __enter__(self) -> TransferJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
