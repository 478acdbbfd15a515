"""``TransferJob``: a split model and the features of its data, in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import cached_property, partial
from typing import Any

import torch

from hapi_client.data.labels import Labels
from hapi_client.data.splits import TRAIN, Data
from hapi_client.job.feature_dataset import FeatureDataset
from hapi_client.job.opened_data import EarlyOpening, open_data
from hapi_client.job.options import JobConfig
from hapi_client.job.pipeline import FeaturePipeline
from hapi_client.loading.loader_plan import LabelledBatch
from hapi_client.model.frozen_region import AUTO, STREAM, FrozenRegion
from hapi_splitter.freezing.freeze_selector import Freeze

_READING_CUTS = (AUTO, STREAM, 0)
"""Cuts with which a job begins with raw reads."""
VAL = "val"
"""Split of the data that :attr:`TransferJob.val_loader` reads."""


class TransferJob(FeaturePipeline):
    """Trains a tail on features of a data set in Swift.

    ::

        with TransferJob(model, freeze="avgpool",
                         data="swift://photos/train") as job:
            optimizer = torch.optim.SGD(job.tail.parameters(), lr=0.01)
            for epoch in range(5):
                job.train_loader.set_epoch(epoch)
                for features, labels in job.train_loader:
                    loss = criterion(job.tail(features), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    Args:
        model: the whole network, with the weights to use; or two modules
            ``(frozen, tail)``.
        freeze: what is frozen, as for :func:`hapi_client.split_model`: the
            name of the last frozen module, a list of modules, a function, or
            ``"auto"``; None for two modules.
        data: as for :class:`FeaturePipeline`; the splits ``train`` and
            ``val`` of a mapping have loaders of their own.
        batch_size: samples of a step, of all ranks together.
        transform: as for :func:`hapi_client.split_model`.
        labels: as for :class:`FeaturePipeline`.
        seed: seed of the sample order; not negative.
        config: the other options.

    Raises:
        HapiError: naming what is wrong and the remedy.
    """

    def __init__(
        self,
        model: torch.nn.Module | tuple[torch.nn.Module, torch.nn.Module],
        *,
        freeze: Freeze | None = None,
        data: Data,
        batch_size: int = 32,
        transform: Any = None,
        labels: Labels = None,
        seed: int = 0,
        config: JobConfig | None = None,
    ) -> None:
        config = config or JobConfig()
        reads_early = config.read.read_early and config.cut in _READING_CUTS
        early = EarlyOpening(
            partial(
                open_data,
                data,
                labels,
                batch_size,
                seed,
                config.read,
                config.swift.connection,
                config.num_classes,
            ),
            config.read if reads_early else None,
        )
        try:
            frozen = FrozenRegion(
                model,
                freeze,
                transform,
                config.device,
                augment=config.augment,
                image=config.image,
                exif=config.exif,
                augment_period_epochs=config.augment_period_epochs,
                cache_directory=config.split_cache_directory,
                exporting=early.begin_reading,
            )
            super().__init__(
                frozen,
                data,
                batch_size=batch_size,
                seed=seed,
                labels=labels,
                cut=config.cut,
                cache=config.cache,
                plan=config.plan,
                read=config.read,
                swift=config.swift,
                opening=early.result,
            )
        except BaseException:
            early.discard()
            raise
        self.train_loader = EpochLoader(self, TRAIN)

    @cached_property
    def tail(self) -> torch.nn.Module:
        """The trainable rest of the model, with the model's parameters.

        There is a warning if none of them is to be trained.
        """
        return self.frozen.trainable_tail()

    @property
    def val_loader(self) -> EpochLoader:
        """The split ``val`` of the data, in the order of its index.

        Raises:
            ClientError: ``bad_configuration`` if the data has no such split.
        """
        self.data_set(VAL)
        return EpochLoader(self, VAL)

    def dataset(self, *, drop_last: bool = False) -> FeatureDataset:
        """Training epochs for torch's ``DataLoader(…, batch_size=None)``.

        Args:
            drop_last: leave out a shorter last batch.
        """
        return FeatureDataset.of_pipeline(self, drop_last=drop_last)


class EpochLoader:
    """Batches of a split, epoch after epoch.

    Iterating yields ``(features, labels)`` of one epoch; :meth:`set_epoch`
    chooses the next one, as with torch's distributed sampler.  It begins
    with the epoch of a loaded state.

    Attributes:
        sampler: this object, for trainers that look for ``set_epoch`` there.
        batch_sampler: None; trainers ask for it where there is a sampler.
    """

    batch_sampler = None

    def __init__(self, job: FeaturePipeline, split: str) -> None:
        self._job = job
        self._split = split
        self._epoch: int | None = None

    @property
    def sampler(self) -> EpochLoader:
        return self

    @property
    def epoch(self) -> int:
        """The epoch that is delivered next."""
        return self._job.epoch if self._epoch is None else self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that is delivered next.

        Without it, each epoch has the same order.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        """Steps of this rank in a whole epoch."""
        return self._job.num_steps(self._split)

    def __iter__(self) -> Iterator[LabelledBatch]:
        # Begins with the first batch: trainers ask for an iterator more
        # often than they use one.
        if self._split == TRAIN:
            loader = self._job.loader(self.epoch)
        else:
            loader = self._job.loader(split=self._split)
        with closing(loader):
            yield from loader
