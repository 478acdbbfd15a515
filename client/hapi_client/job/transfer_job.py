"""``TransferJob``: a split model and the features of its data, in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cached_property, partial
from typing import Any

import torch
from typing_extensions import Self

from hapi_client.data.labels import Labels
from hapi_client.data.splits import TRAIN, Data
from hapi_client.job.feature_dataset import FeatureDataset
from hapi_client.job.job_view import JobView
from hapi_client.job.opened_data import EarlyOpening, open_data
from hapi_client.job.options import JobConfig
from hapi_client.job.pipeline import FeaturePipeline
from hapi_client.loading.feature_loader import FeatureLoader
from hapi_client.loading.loader_plan import LabelledBatch
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.split_arguments import AUTO, STREAM
from hapi_client.option_checks import check_types
from hapi_client.sampling.epochs import check_epoch
from hapi_client.sampling.partition import Reader
from hapi_splitter.freezing.freeze_selector import Freeze

READING_CUTS = (AUTO, STREAM, 0)
"""Cuts with which a job begins with raw reads."""
VAL = "val"
"""Split of the data that :attr:`TransferJob.val_loader` reads."""


class TransferJob(JobView):
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
        data: ``swift://container/prefix`` of an indexed data set,
            ``swift://container/shard-{000..031}.tar``, or a list of these;
            or a mapping of splits to them, ``train`` among them; ``train``
            and ``val`` have loaders of their own.
        batch_size: samples of a step, of all ranks together.
        transform: as for :func:`hapi_client.split_model`.
        labels: mapping from keys of samples or names of classes (texts; a
            key comes first) to integers; a function of the key; a source
            such as ``"cls"``, ``"json:FIELD"`` or :class:`JsonLabels`, which
            has to be that of the index; None for the labels of the index;
            ``"optional"`` for those that it has, and -1 for other samples.
        seed: seed of the sample order and of random changes of images; not
            negative.
        config: the other options.

    Attributes:
        train_loader: the split ``train``, an :class:`.EpochLoader`.

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
        config = JobConfig() if config is None else config
        check_types({"config": (JobConfig,)}, {"config": config})
        early = EarlyOpening(
            partial(open_data, data, labels, batch_size, seed, config),
            config.read if config.cut in READING_CUTS else None,
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
                split_directory=config.cache.split_directory,
                exporting=early.begin_reading,
                precision=config.precision,
            )
            self._pipeline = FeaturePipeline(frozen, early.result, config)
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
        self.pipeline.data.split(VAL)
        return EpochLoader(self, VAL)

    def dataset(
        self,
        split: str = TRAIN,
        *,
        shuffle: bool | None = None,
        drop_last: bool = False,
        shared: bool = True,
    ) -> FeatureDataset:
        """A split as a data set, which shares the job's threads.

        For torch's ``DataLoader(…, batch_size=None)``, single samples, and
        splits with other names than ``train`` and ``val``.

        Args:
            split: name of the split.
            shuffle: as for :class:`FeatureDataset`; None for True with
                ``train``, which alone can be shuffled.
            drop_last: leave out a shorter last batch.
            shared: as for :class:`FeatureDataset`.
        """
        return FeatureDataset.of_pipeline(
            self.pipeline,
            split,
            shuffle=split == TRAIN if shuffle is None else shuffle,
            drop_last=drop_last,
            shared=shared,
        )

    @property
    def epoch(self) -> int:
        """Epoch in which training continues; 0 without a loaded state."""
        return self.pipeline.data.epochs.epoch

    @property
    def step(self) -> int:
        """Step with which training continues in that epoch."""
        return self.pipeline.data.epochs.step

    def state_dict(self) -> dict[str, Any]:
        """Position of training in its data, fit for JSON.

        Call it between two steps: batches that :attr:`train_loader` has
        delivered count as trained on.  The same on all ranks.
        """
        return self.pipeline.data.epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state, also with another number of ranks.

        :attr:`train_loader` then starts with the first step that was not
        delivered, and delivers exactly the remaining samples.

        Raises:
            ClientError: ``bad_state`` naming what is wrong with the state,
                or does not match this job.
        """
        self.pipeline.load_state_dict(state)

    def close(self) -> None:
        """Ends all requests and threads of the job.

        Statistics, reports and state stay; iterating is an error.
        """
        self.pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EpochLoader:
    """Batches of a split, epoch after epoch.

    Iterating yields ``(features, labels)`` of one epoch; :meth:`set_epoch`
    chooses the next one, as with torch's distributed sampler.  It begins
    with the epoch of a loaded state.

    Attributes:
        job: the job.
        sampler: this object, for trainers that look for ``set_epoch`` there.
        batch_sampler: None; trainers ask for it where there is a sampler.
    """

    batch_sampler = None

    def __init__(self, job: TransferJob, split: str) -> None:
        self.job = job
        self._split = split
        self._epoch: int | None = None

    def __repr__(self) -> str:
        return f"Loader of {self._split!r}, epoch {self.epoch}\n{self.job!r}"

    @property
    def sampler(self) -> EpochLoader:
        return self

    @property
    def epoch(self) -> int:
        """The epoch that is delivered next."""
        return self.job.epoch if self._epoch is None else self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that is delivered next.

        Without it, each epoch has the same order.

        Raises:
            ClientError: ``bad_configuration`` naming the value.
        """
        self._epoch = check_epoch(epoch)

    @property
    def is_training(self) -> bool:
        """False for the order of the index, as evaluation needs it."""
        return self._split == TRAIN

    def node_loader(self, reader: Reader) -> FeatureLoader:
        """A loader of virtual nodes; internal, for ``hapi_training``."""
        epoch = self.epoch if self.is_training else None
        share = self.job.pipeline.data.share(
            self._split, epoch, reader, drop_last=False
        )
        pipeline = self.job.pipeline
        return pipeline.node_loader(share, epoch, self._split, reader)

    def __len__(self) -> int:
        """Steps of this rank in a whole epoch."""
        return self.job.pipeline.data.num_steps(self._split)

    def __iter__(self) -> Iterator[LabelledBatch]:
        # Begins with the first batch: trainers ask for an iterator more
        # often than they use one.
        epoch = self.epoch if self.is_training else None
        with closing(
            self.job.pipeline.loader(epoch, split=self._split)
        ) as loader:
            yield from loader
