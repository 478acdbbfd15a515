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
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hapi_client.data.augmentation_schedule import AugmentationSchedule
from hapi_client.data.splits import DataSet
from hapi_client.loading.feature_loader import LabelledBatch
from hapi_client.loading.loader_factory import LoaderFactory
from hapi_client.loading.prefetcher import FetchOptions
from hapi_client.model.client_region import ClientRegion
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.sampling.distributed import Rank
from hapi_client.sampling.epochs import Epochs, ReaderShare, to_integer
from hapi_client.sampling.partition import Reader
from hapi_client.sampling.sampler import single_batch_plan
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import ConnectionOptions
from hapi_protocol.data_index import Span
from hapi_protocol.errors import ClientError
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
    options: FetchOptions
    augmented: AugmentationSchedule


@contextmanager
def _feeding(parts: DatasetConfig) -> Iterator[LoaderFactory]:
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
        ) as feeder,
    ):
        feeder.push(parts.model, parts.mix)
        yield feeder


def _threads() -> int:
    """For decoding: this process's part of the cores."""
    info = get_worker_info()
    return max(1, int(allowed_cores()) // (info.num_workers if info else 1))


class FeatureDataset(IterableDataset[LabelledBatch]):
    """Batches of a training epoch, for ``DataLoader(…, batch_size=None)``.

    Sharded by rank and by loader worker.  Yields ``(features, labels)`` on
    the CPU, as :class:`hapi_client.loading.feature_loader.FeatureLoader` does;
    with the same lanes, batches come in the same order, of the same samples,
    with any number of workers.  Spans go the ways of the plan at the time when
    the data set was made.  A step whose samples are all bad is an error, also
    where such samples are left out: a loop counts the steps.

    Args:
        parts: what a process needs.
        epochs: their order.
        rank: of this trainer.
        drop_last: leave out a shorter last batch.
    """

    def __init__(
        self,
        parts: DatasetConfig,
        epochs: Epochs,
        rank: Rank,
        *,
        drop_last: bool = False,
    ) -> None:
        self._parts = parts
        self._epochs = epochs
        self._rank = rank
        self._drop_last = drop_last
        # In memory that workers share: those that persist see it change.
        self._epoch = _shared(1)
        self._stand()

    def _stand(self) -> None:
        loaded = self._epochs.loaded
        self._epoch[0] = self._epochs.epoch
        # Of each worker, whether it has gone on from the loaded step.
        self._begun = _shared(loaded.turns if loaded else 1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for each in (self._epoch, self._begun):
            # A copy's are its own; those that were shared with the process
            # that made them still are.
            each.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """Which one is delivered next."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """To be called before each epoch, as of torch's distributed sampler;
        without it, each epoch has the same order."""
        self._epoch[0] = to_integer("epoch", epoch)
        self._begun.zero_()

    @property
    def first_step(self) -> int:
        """With which step the epoch begins; not 0 after a resume."""
        return self._epochs.first_step(self.epoch)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Where training stands, when the steps below ``step`` were taken.

        Workers fetch ahead, so that only the loop knows, as long as batches
        come in order (``DataLoader(in_order=True)``, torch's default)::

            for epoch in range(dataset.epoch, 5):
                dataset.set_epoch(epoch)
                for step, batch in enumerate(loader, dataset.first_step):
                    …
                    state = dataset.state_dict(step + 1)

        The job's own state does not know of it.

        Raises:
            ClientError: ``bad_configuration`` for a step that there is not.
        """
        return self._epochs.state_at(
            self.epoch, step, self._reader(), drop_last=self._drop_last
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, also with other numbers of ranks and workers.

        To be called before a ``DataLoader`` is made.  Behind the pass that
        goes on, :meth:`set_epoch` has to be called before the next one.

        Raises:
            ClientError: ``bad_state``.
        """
        self._epochs.load_state_dict(state)
        self._stand()

    def __len__(self) -> int:
        """Batches of the whole epoch, those before a resume among them."""
        return self._share(self.epoch).num_steps

    def __iter__(self) -> Iterator[LabelledBatch]:
        epoch = self.epoch
        # Workers fetch ahead of the loop, which alone knows its steps.
        share = replace(self._share(epoch), delivered=lambda step: None)
        self._begin(epoch)
        with _feeding(self._parts) as feeder:
            loader = feeder.loader(
                self._parts.data,
                share,
                self._parts.augmented.training(epoch),
                on_error=self._parts.on_error,
                needs_every_step=True,
            )
            with closing(loader):
                yield from loader

    def _begin(self, epoch: int) -> None:
        first = self._epochs.first_step(epoch)
        if not first:
            return
        worker = self._reader().worker
        if self._begun[worker]:
            raise ClientError(
                "bad_state",
                f"epoch {epoch} was gone on with from step {first} already; "
                f"call set_epoch({epoch + 1}) before the next epoch, or "
                f"set_epoch({epoch}) to go on from step {first} once more",
            )
        self._begun[worker] = 1

    def _reader(self) -> Reader:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        return Reader(
            self._rank.rank, self._rank.world_size, worker, num_workers
        )

    def _share(self, epoch: int) -> ReaderShare:
        return self._epochs.training(
            epoch, self._reader(), drop_last=self._drop_last
        )


def _shared(length: int) -> torch.Tensor:
    made = torch.zeros(length, dtype=torch.int64)
    made.share_memory_()  # type: ignore[no-untyped-call]
    return made


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
        self._feeder: LoaderFactory | None = None
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
        self._feeder = None

    def _open(self) -> LoaderFactory:
        if self._feeder is None or self._pid != os.getpid():
            # What a forked child has of its parent must not be closed here,
            # as it would be when nobody refers to it.
            self._inherited = self._opened
            self._opened, self._pid = ExitStack(), os.getpid()
            self._feeder = self._opened.enter_context(_feeding(self._parts))
        return self._feeder

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
