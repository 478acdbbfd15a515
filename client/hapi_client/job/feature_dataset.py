"""``FeatureDataset``: features of a data set, for loops and DataLoaders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset
from typing_extensions import Self

from hapi_client.caching.cache_config import CacheConfig
from hapi_client.data.labels import Labels
from hapi_client.data.splits import TRAIN
from hapi_client.job.job_view import JobView
from hapi_client.job.loop_position import LoopPosition
from hapi_client.job.opened_data import check_shuffled, open_data
from hapi_client.job.options import JobConfig, PlanConfig
from hapi_client.job.pipeline import FeaturePipeline
from hapi_client.loading.feature_loader import FeatureLoader
from hapi_client.loading.loader_plan import LabelledBatch
from hapi_client.loading.read_config import ReadConfig
from hapi_client.loading.sample_dataset import (
    DatasetConfig,
    SampleDataset,
    open_factory,
)
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.model.split_arguments import AUTO
from hapi_client.option_checks import check_types
from hapi_client.sampling.distributed import Rank, this_rank
from hapi_client.sampling.epochs import ReaderShare
from hapi_client.sampling.partition import Reader
from hapi_client.swift.connection import Connection

_FLAGS = {"shuffle": (bool,), "drop_last": (bool,), "shared": (bool,)}


class FeatureDataset(JobView, IterableDataset[LabelledBatch]):
    """Batches of features at the freeze point, epoch after epoch.

    ::

        frozen, tail = split_model(model, "avgpool")
        data = FeatureDataset("swift://photos/train", frozen, batch_size=64)
        for epoch in range(5):
            data.set_epoch(epoch)
            for features, labels in data:
                loss = criterion(tail(features), labels)

    Yields ``(features, labels)``: ``[n, *shape]`` in the model's dtype, which
    is mostly float32, and int64 ``[n]``.
    The basic form: one data set, one loop.  :class:`TransferJob` has several
    splits in one object.

    Iterated as it is, reading, decoding and planning run in threads of this
    process, and batches are on the device of ``frozen``.  In torch's
    ``DataLoader(data, batch_size=None, num_workers=4)`` each worker process
    reads its share of the batches and yields CPU tensors; spans take the
    routes of the plan at the time of the last :meth:`set_epoch`, and workers
    do not plan or report.  Batches have the same samples in the same order
    with any number of workers that divides the ``step_partitions`` of
    :attr:`ReadConfig.partition`, if it is given.  ``batch_size=None`` is
    required, since the data set yields whole batches.

    Sharded by rank (of torch.distributed, or else of torchrun's ``RANK`` and
    ``WORLD_SIZE``).  A step whose samples are all bad is an error, also with
    ``on_error="skip"``: the loop counts steps.

    Args:
        data: ``swift://container/prefix`` of an indexed data set,
            ``swift://container/shard-{000..031}.tar``, or a list of these.
        frozen: frozen region, of :func:`hapi_client.split_model`.
        batch_size: samples of a step, of all ranks together.
        seed: seed of the sample order and of random changes of images; not
            negative.
        labels: mapping from keys of samples or names of classes (texts; a
            key comes first) to integers; a function of the key; a source
            such as ``"cls"``, ``"json:FIELD"`` or :class:`JsonLabels`, which
            has to be that of the index; None for the labels of the index;
            ``"optional"`` for those that it has, and -1 for other samples.
        shuffle: False for the index's order, also without the random
            changes of ``augment``, as evaluation needs it.
        drop_last: leave out a shorter last batch.
        shared: False if each rank gets all of every batch, instead of its
            part.
        cut: as :attr:`JobConfig.cut`.
        plan: options of planning.
        read: options of reading and decoding.
        cache: options of the caches.
        connection: as :attr:`JobConfig.connection`.
        models_container: as :attr:`JobConfig.models_container`.

    Raises:
        HapiError: naming what is wrong and the remedy.
    """

    def __init__(
        self,
        data: str | Sequence[str],
        frozen: FrozenRegion,
        *,
        batch_size: int = 32,
        seed: int = 0,
        labels: Labels = None,
        shuffle: bool = True,
        drop_last: bool = False,
        shared: bool = True,
        cut: int | str = AUTO,
        plan: PlanConfig | None = None,
        read: ReadConfig | None = None,
        cache: CacheConfig | None = None,
        connection: Connection | None = None,
        models_container: str = DEFAULT_MODELS_CONTAINER,
    ) -> None:
        check_types({"frozen": (FrozenRegion,), **_FLAGS}, locals())
        config = JobConfig(
            cut=cut,
            plan=PlanConfig() if plan is None else plan,
            read=ReadConfig() if read is None else read,
            cache=CacheConfig() if cache is None else cache,
            connection=connection,
            models_container=models_container,
        )
        opening = partial(open_data, data, labels, batch_size, seed, config)
        pipeline = FeaturePipeline(frozen, opening, config)
        self._attach(pipeline, TRAIN, shuffle, drop_last, shared)

    @classmethod
    def of_pipeline(
        cls,
        pipeline: FeaturePipeline,
        split: str,
        *,
        shuffle: bool,
        drop_last: bool,
        shared: bool,
    ) -> Self:
        """A split of a job, whose threads it shares."""
        check_types(_FLAGS, locals())
        if shuffle:
            check_shuffled(split)
        dataset = cls.__new__(cls)
        dataset._attach(pipeline, split, shuffle, drop_last, shared)
        return dataset

    def _attach(
        self,
        pipeline: FeaturePipeline,
        split: str,
        shuffle: bool,
        drop_last: bool,
        shared: bool,
    ) -> None:
        self._pipeline: FeaturePipeline | None = pipeline
        self._loader: FeatureLoader | None = None
        self._split = split
        self._shuffle = shuffle
        self._rank = this_rank(os.environ) if shared else Rank()
        self._config = pipeline.dataset_config(split)
        self._position = LoopPosition(
            pipeline.data.epochs,
            pipeline.data.split(split).sizes,
            self._rank,
            shuffle=shuffle,
            drop_last=drop_last,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None, "_loader": None}

    @property
    def batch_size(self) -> int:
        """Samples of a step, of all ranks together."""
        return self._position.batch_size

    @property
    def drop_last(self) -> bool:
        """True if a shorter last batch is left out."""
        return self._position.drop_last

    @property
    def num_ranks(self) -> int:
        """Ranks that share each batch; 1 with ``shared=False``."""
        return self._rank.world_size

    @property
    def epoch(self) -> int:
        """The epoch that is delivered next."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that is delivered next.

        As of torch's distributed sampler: without it, each epoch has the
        same order.

        Raises:
            ClientError: ``bad_configuration`` naming the value.
        """
        self._position.set_epoch(epoch)
        if self._pipeline is not None:
            self._config = self._pipeline.dataset_config(self._split)

    @property
    def first_step(self) -> int:
        """First step of the epoch; not 0 after a resume."""
        return self._position.first_step

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Position of training in its data, fit for JSON, between two steps.

        Args:
            step: number of steps of the epoch that were taken; None for
                those that this process has delivered.  Required with a
                ``DataLoader``, whose workers read ahead of the loop::

                    for epoch in range(data.epoch, 5):
                        data.set_epoch(epoch)
                        for step, batch in enumerate(loader, data.first_step):
                            …
                            state = data.state_dict(step + 1)

        Raises:
            ClientError: ``bad_configuration`` for a missing step, one beyond
                the epoch, or ``shuffle=False``.
        """
        return self._position.state_dict(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state, also with other numbers of ranks and
        workers, as long as they divide the partitions of the epoch.

        Call it before a ``DataLoader`` is made.  After the epoch that is
        continued, call :meth:`set_epoch` before the next one.

        Raises:
            ClientError: ``bad_state``.
        """
        self._position.check_shuffled()
        if self._pipeline is not None:
            self._pipeline.load_state_dict(state)
            self._position.start_at(self._pipeline.data.epochs)
        else:
            self._position.load_state_dict(state)

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the samples of the last batch that this process has read.

        Batches from the workers of a ``DataLoader`` have none: iterate over
        the data set itself, with ``shared=False`` for all on one rank.
        """
        return self._loader.keys if self._loader else []

    def samples(self) -> SampleDataset:
        """Single samples by number, for torch's samplers.

        In the order of the index; if the data set is shuffled, images have
        the random changes of :attr:`epoch`.  With ``on_error="skip"``, the
        first call reads the split once to leave out samples that cannot be
        decoded.
        """
        return self.pipeline.samples(
            self._split, self.epoch if self._shuffle else None
        )

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self._position.num_steps

    def __iter__(self) -> Iterator[LabelledBatch]:
        share, epoch = self._position.begin()
        if self._pipeline is not None and self._pipeline.is_own:
            loader = self._pipeline.loader_of_share(
                share,
                epoch,
                split=self._split,
                num_ranks=self._rank.world_size,
                empty_steps="raise",
            )
            self._loader = loader
            with closing(loader):
                yield from loader
        else:
            yield from self._iterate_elsewhere(share, epoch)

    @property
    def is_training(self) -> bool:
        """False for the order of the index, as evaluation needs it."""
        return self._shuffle

    def process_config(self) -> DatasetConfig:
        """Facts by which another process reads; internal, for Ray."""
        return self.pipeline.dataset_config(self._split)

    def node_loader(self, reader: Reader) -> FeatureLoader:
        """A loader of virtual nodes; internal, for ``hapi_training``."""
        share, epoch = self._position.begin(reader)
        self._loader = self.pipeline.node_loader(
            share, epoch, self._split, reader
        )
        return self._loader

    def _iterate_elsewhere(
        self, share: ReaderShare, epoch: int | None
    ) -> Iterator[LabelledBatch]:
        with open_factory(self._config) as factory:
            loader = factory.loader(
                self._config.data,
                share,
                self._config.augmented.training(epoch),
                on_error=self._config.read.on_error,
                empty_steps="raise",
            )
            with closing(loader):
                yield from loader

    def close(self) -> None:
        """Ends all requests and threads of this process.

        Statistics, reports and state stay; iterating is an error.
        """
        if self._pipeline is not None and self._pipeline.is_own:
            self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
