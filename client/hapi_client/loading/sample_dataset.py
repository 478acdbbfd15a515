"""Data sets for torch's own ``DataLoader``, in any process.

They hold plain facts: connections, threads and weights are made in the process
that iterates, when it does, and end with the iteration.  So they can be
pickled, and forked, whatever the job is doing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from hapi_client.data.augmentation_schedule import AugmentationSchedule
from hapi_client.data.splits import DataSet
from hapi_client.loading.loader_factory import LoaderFactory
from hapi_client.loading.prefetcher import ReadConfig
from hapi_client.model.client_region import ClientRegion
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.sampling.epochs import ReaderShare
from hapi_client.sampling.sampler import single_batch_plan
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import ConnectionOptions
from hapi_protocol.data_index import Span
from hapi_protocol.headers import ModelPath
from hapi_protocol.transforms import Training
from hapi_splitter.host_limits import allowed_cores
from hapi_splitter.planner.problem import Route


@dataclass(frozen=True)
class DatasetConfig:
    """What a process needs to read features by itself.

    Attributes:
        credentials: of the account.
        connection_options: bounds of its waits.
        data: what there is to read.
        region: what is computed here, on the CPU.
        mix: weights of the ways that spans go.
        model: the package; None where nothing is pushed.
        cache: as
        :attr:`hapi_client.loading.feature_source.FeatureRequestSpec.cache`.
        on_error: as
        :attr:`hapi_client.loading.feature_loader.LoaderPlan.on_error`.
        options: how to fetch.
        augmented: random changes of the epochs.
    """

    credentials: Credentials
    connection_options: ConnectionOptions
    data: DataSet
    region: ClientRegion
    mix: Mapping[Route, float]
    model: ModelPath | None
    cache: str
    on_error: str
    options: ReadConfig
    augmented: AugmentationSchedule


@contextmanager
def open_factory(parts: DatasetConfig) -> Iterator[LoaderFactory]:
    threads = parts.options.decode_threads or _threads()
    with (
        Connection(parts.credentials, parts.connection_options) as connection,
        closing(
            LoaderFactory(
                connection,
                parts.region,
                parts.data.container,
                replace(parts.options, decode_threads=threads),
                CacheTracker(parts.cache, parts.augmented.variants),
            )
        ) as factory,
    ):
        factory.push(parts.model, parts.mix)
        yield factory


def _threads() -> int:
    """For decoding: this process's part of the cores."""
    info = get_worker_info()
    return max(1, int(allowed_cores()) // (info.num_workers if info else 1))


class SampleDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Single samples by their number, in the order of the index.

    For ``DataLoader(…, batch_size=32, sampler=…)``, whose sampler does the
    sharding.  Items are ``(features, label)``: float32 ``[*shape]`` at the
    freeze point, int64 ``[]``.  A batch is read in as few requests as its
    samples allow; shuffled, these are as many as samples, so that training
    is several times as fast with :class:`FeatureDataset`.

    A sample that cannot be decoded is an error, whatever the job's
    ``on_error``: what a sampler asks for cannot be left out.

    Args:
        parts: what a process needs.
        training: seed and epoch of random changes; None for none.
    """

    def __init__(
        self, parts: DatasetConfig, training: Training | None = None
    ) -> None:
        self._parts = parts
        self._training = training
        self._ends = torch.tensor([0, *parts.data.sizes]).cumsum(0)
        self._opened = self._inherited = ExitStack()
        self._factory: LoaderFactory | None = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        nothing = {"_opened": ExitStack(), "_inherited": ExitStack()}
        return {**self.__dict__, **nothing, "_feeder": None}

    def __len__(self) -> int:
        return self._parts.data.num_samples

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Raises:
            IndexError: for a number that there is not.
            ClientError: ``bad_sample`` with the number of one that cannot
                be decoded.
            HapiError: the sample cannot be had.
        """
        return self.__getitems__([number])[0]

    def __getitems__(
        self, numbers: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Several at once, in that order; so ``DataLoader`` asks for them."""
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
        found = dict(
            zip(once, zip(features, labels, strict=True), strict=True)
        )
        return [found[place] for place in places]

    def close(self) -> None:
        """Ends the connection of this process; it is opened when needed."""
        if self._pid == os.getpid():
            self._opened.close()
        self._factory = None

    def _open(self) -> LoaderFactory:
        if self._factory is None or self._pid != os.getpid():
            # What a forked child has of its parent must not be closed here,
            # as it would be when nobody refers to it.
            self._inherited = self._opened
            self._opened, self._pid = ExitStack(), os.getpid()
            self._factory = self._opened.enter_context(
                open_factory(self._parts)
            )
        return self._factory

    def _remedy(self, span: Span, row: int) -> str:
        wanted = span.shard, span.rows[row].sample
        places = (
            (each.shard, row.sample)
            for each in self._parts.data.spans
            for row in each.rows
        )
        number = next(n for n, each in enumerate(places) if each == wanted)
        return (
            f"leave its number, {number}, out of the sampler, or repair it; "
            "job.loader and job.dataset can skip such samples "
            "(on_error='skip')"
        )

    def _place(self, number: int) -> tuple[int, int]:
        """Span and row."""
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"sample {number} of {count}")
        number %= count
        span = int(torch.searchsorted(self._ends, number, right=True)) - 1
        return span, number - int(self._ends[span])
