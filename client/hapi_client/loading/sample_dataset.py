"""Data sets for torch's ``DataLoader``, usable in any process.

They hold configuration only: connections, threads and device memory belong to
the process that iterates.  So they can be pickled and forked at any time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hapi_client.caching.cache_config import CacheConfig
from hapi_client.data.splits import DataSet
from hapi_client.loading.loader_factory import LoaderFactory, open_host_cache
from hapi_client.loading.read_config import ReadConfig
from hapi_client.loading.skipped_samples import SkippedSamples
from hapi_client.model.client_region import ClientRegion
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.sampling.augmentation_schedule import AugmentationSchedule
from hapi_client.sampling.epochs import ReaderShare
from hapi_client.sampling.sampler import single_batch_plan
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import ConnectionOptions
from hapi_protocol.data_index import Span
from hapi_protocol.headers import ModelPath
from hapi_protocol.transforms import Training
from hapi_splitter.planner.problem import Route


@dataclass(frozen=True)
class DatasetConfig:
    """Configuration by which a process reads features.

    Attributes:
        credentials: credentials of the account; None for those of the
            environment.
        connection_options: options of the connection.
        data: the data set.
        region: computes frozen layers on the CPU.
        mix: weights by route.
        model: path of the package; None without push-down.
        cache: options of the caches.
        read: options of reading.
        encodings: encodings in which features may arrive.
        augmented: random changes of the epochs.
        skipped: samples that the job leaves out.
    """

    credentials: Credentials | None
    connection_options: ConnectionOptions
    data: DataSet
    region: ClientRegion
    mix: Mapping[Route, float]
    model: ModelPath | None
    cache: CacheConfig
    read: ReadConfig
    encodings: Sequence[str]
    augmented: AugmentationSchedule
    skipped: SkippedSamples


@contextmanager
def open_factory(parts: DatasetConfig) -> Iterator[LoaderFactory]:
    with (
        Connection(parts.credentials, parts.connection_options) as connection,
        closing(
            LoaderFactory(
                connection,
                parts.region,
                parts.read,
                CacheTracker(parts.cache.store, parts.augmented.variants),
                open_host_cache(
                    connection,
                    parts.region,
                    [parts.data],
                    # A worker process may end after each epoch, and reads
                    # other samples in the next.
                    replace(parts.cache, memory_bytes=0),
                    parts.encodings,
                    parts.augmented.variants,
                ),
                skipped=parts.skipped,
            )
        ) as factory,
    ):
        factory.set_routes(parts.model, parts.mix)
        yield factory


class SampleDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Single samples by number, in the order of the index.

    For ``DataLoader(…, batch_size=32, sampler=…)``, whose sampler does the
    sharding.  Items are ``(features, label)``: ``[*shape]`` at the freeze
    point, int64 ``[]``.  Neighbours of a batch are read in one request.  A
    shuffled batch needs a request per sample, so that training is several
    times as fast with :class:`FeatureDataset`.

    Args:
        parts: configuration of the process.
        training: seed and epoch of random changes; None for none.
        left_out: positions in the index of samples that have no number here.
    """

    def __init__(
        self,
        parts: DatasetConfig,
        training: Training | None = None,
        left_out: Collection[int] = (),
    ) -> None:
        self._parts = parts
        self._training = training
        self._kept = np.setdiff1d(
            np.arange(parts.data.num_samples), list(left_out)
        )
        self._ends = torch.tensor([0, *parts.data.sizes]).cumsum(0)
        self._opened = self._inherited = ExitStack()
        self._factory: LoaderFactory | None = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        nothing = {"_opened": ExitStack(), "_inherited": ExitStack()}
        return {**self.__dict__, **nothing, "_factory": None}

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns features and label of a sample.

        Raises:
            IndexError: for a number out of range.
            ClientError: ``bad_sample`` naming a sample that cannot be
                decoded.
            HapiError: if the sample cannot be read.
        """
        return self.__getitems__([number])[0]

    def __getitems__(
        self, numbers: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns several samples in order; called by ``DataLoader``."""
        places = [self._place(number) for number in numbers]
        if not places:
            return []
        once = list(dict.fromkeys(places))
        loader = self._open().loader(
            self._parts.data,
            ReaderShare(single_batch_plan(once), 1),
            self._training,
            on_error="raise",
            remedy=self._remedy,
        )
        with closing(loader):
            ((features, labels),) = loader
        samples = dict(
            zip(once, zip(features, labels, strict=True), strict=True)
        )
        return [samples[place] for place in places]

    def close(self) -> None:
        """Closes the connection of this process; reading reopens it."""
        if self._pid == os.getpid():
            self._opened.close()
        self._factory = None

    def _open(self) -> LoaderFactory:
        if self._factory is None or self._pid != os.getpid():
            # A forked child must not close its parent's connection, as
            # dropping the last reference would.
            self._inherited = self._opened
            self._opened, self._pid = ExitStack(), os.getpid()
            self._factory = self._opened.enter_context(
                open_factory(self._parts)
            )
        return self._factory

    def _remedy(self, span: Span, row: int) -> str:
        wanted = span.path, span.rows[row].sample
        places = (
            (span.path, row.sample)
            for span in self._parts.data.spans
            for row in span.rows
        )
        position = next(n for n, place in enumerate(places) if place == wanted)
        number = int(np.searchsorted(self._kept, position))
        return (
            f"remove its number, {number}, from the sampler, or repair it, or "
            "leave such samples out with on_error='skip'"
        )

    def _place(self, number: int) -> tuple[int, int]:
        """Returns span and row of a sample."""
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"sample {number} of {count}")
        number = int(self._kept[number])
        span = int(torch.searchsorted(self._ends, number, right=True)) - 1
        return span, number - int(self._ends[span])
