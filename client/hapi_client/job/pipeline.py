"""Loaders of a job's splits, with their plan, reports and position."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from hapi_client.data.splits import TRAIN
from hapi_client.job.job_plan import JobPlan
from hapi_client.job.opened_data import OpenedData
from hapi_client.job.options import JobConfig
from hapi_client.loading.feature_loader import FeatureLoader
from hapi_client.loading.loader_factory import LoaderFactory, open_host_cache
from hapi_client.loading.loader_plan import EmptySteps
from hapi_client.loading.sample_dataset import DatasetConfig, SampleDataset
from hapi_client.metrics.events import JobStats
from hapi_client.model.frozen_region import FrozenRegion
from hapi_client.model.split_arguments import AUTO
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.progress import progress_wanted
from hapi_client.reports.epoch_history import EpochHistory
from hapi_client.sampling.augmentation_schedule import AugmentationSchedule
from hapi_client.sampling.distributed import Rank, this_rank
from hapi_client.sampling.epochs import ReaderShare
from hapi_client.sampling.partition import Reader
from hapi_protocol.errors import ClientError
from hapi_splitter.planner.problem import RAW_ROUTE

logger = logging.getLogger(__name__)


class FeaturePipeline:
    """Loads features of a job's splits at the freeze point.

    Args:
        frozen: frozen region; jobs may share it.
        opening: opens the data; the pipeline closes it.
        config: options of the job.

    Attributes:
        frozen: the frozen region, with the limits of this job.
        data: the opened data.
        plan: routes of the spans.
        history: reports of the epochs.

    Raises:
        HapiError: naming what is wrong and the remedy.
    """

    def __init__(
        self,
        frozen: FrozenRegion,
        opening: Callable[[], OpenedData],
        config: JobConfig,
    ) -> None:
        self._config = config
        read = config.read
        wanted = progress_wanted(os.environ)
        # A copy: jobs may share a region, and read with other limits.
        self.frozen = frozen = frozen.with_limits(
            read.max_pixels, read.forward_samples
        )
        self.plan = JobPlan(frozen, config)
        self.data = opened = opening()
        opened.check_outputs(frozen.num_outputs)
        self._augmented = AugmentationSchedule(
            frozen.transform.augmentation is not None,
            opened.options.seed,
            frozen.augment_period_epochs,
        )
        self._factory = LoaderFactory(
            opened.connection,
            frozen,
            read,
            CacheTracker(config.cache.store, self._augmented.variants),
            open_host_cache(
                opened.connection,
                frozen,
                opened.splits.values(),
                config.cache,
                self.plan.encodings,
                self._augmented.variants,
            ),
            opened.early,
            link_limits=self.plan.link_limits,
        )
        self.history = EpochHistory(
            wanted,
            self._factory.scheduler,
            self._factory.recorder,
            lambda: self.plan.planner,
        )
        self._read_whole: set[str] = set()
        self._is_closed = self._has_warned = False
        self._pid = os.getpid()
        try:
            self.plan.start(opened, self._factory, self._augmented)
        except BaseException:
            self.close()
            raise

    @property
    def is_own(self) -> bool:
        """True in the process that made it; a fork has none of its threads."""
        return self._pid == os.getpid()

    @property
    def stats(self) -> JobStats:
        """Counters of the job so far."""
        traffic = self.data.connection.traffic.count()
        traffic -= self.data.traffic_before
        stats = self._factory.recorder.counters.count()
        return replace(
            stats,
            bytes=traffic.total_bytes - stats.package_bytes,
            retries=stats.retries + traffic.retries,
        )

    def loader(
        self,
        epoch: int | None = None,
        *,
        split: str = TRAIN,
        drop_last: bool = False,
        shared: bool = True,
    ) -> FeatureLoader:
        """Returns a loader of one epoch of a split.

        Args:
            epoch: number of the training epoch; with the job's seed it
                determines the order and the random changes of images.  If
                a state was loaded, its epoch continues with the next step,
                once; further loaders of that epoch start at its beginning.
                None for the index's order without random changes, as
                evaluation needs it.
            split: name of the split.
            drop_last: leave out a shorter last batch.
            shared: True if each rank (of torch.distributed, or else of
                torchrun's ``RANK`` and ``WORLD_SIZE``) gets its part of
                every batch; False if each gets all of it.

        Raises:
            ClientError: ``bad_configuration`` naming the value and what is
                allowed.
        """
        rank = this_rank(os.environ) if shared else Rank()
        return self.loader_of_share(
            self.data.share(split, epoch, rank.reader(), drop_last=drop_last),
            epoch,
            split=split,
            num_ranks=rank.world_size,
            empty_steps="raise" if rank.world_size > 1 else "skip",
        )

    def loader_of_share(
        self,
        share: ReaderShare,
        epoch: int | None,
        *,
        split: str,
        num_ranks: int,
        empty_steps: EmptySteps,
        device: torch.device | None = None,
    ) -> FeatureLoader:
        """Returns a loader of a share of an epoch.

        Args:
            share: pieces to read, and batches to deliver.
            epoch: as in :meth:`loader`.
            split: name of the split.
            num_ranks: number of ranks that share the epoch.
            empty_steps: what becomes of a step whose samples are all bad,
                with ``on_error="skip"``.
            device: device of the batches; None for that of ``frozen``.
        """
        self._check_open()
        self.plan.begin(num_ranks=None if epoch is None else num_ranks)
        return self._factory.loader(
            self.data.split(split),
            share,
            self._augmented.training(epoch),
            on_error=self._config.read.on_error,
            empty_steps=empty_steps,
            device=device,
            span_arrived=self.plan.span_arrived,
            # Shown by the first rank, even if each reads all batches.
            recorder=self.history.begin(
                epoch, split, shown=not this_rank(os.environ).rank
            ),
        )

    def node_loader(
        self, share: ReaderShare, epoch: int | None, split: str, reader: Reader
    ) -> FeatureLoader:
        """Returns a loader of virtual nodes: on the CPU, with empty steps.

        A node's samples reach the device in its turn.

        Args:
            share: as for :meth:`loader_of_share`.
            epoch: as in :meth:`loader`.
            split: name of the split.
            reader: reader of the share, whose ranks are virtual nodes.
        """
        is_trained = epoch is not None and reader.num_ranks > 1
        if is_trained and self._config.cut == AUTO and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "cut='auto' chooses by measurements, and features of client "
                "and worker differ in their last bits: the trained model will "
                "too; for equal bits choose cut='freeze', 'stream' or a number"
            )
        return self.loader_of_share(
            share,
            epoch,
            split=split,
            num_ranks=reader.num_readers,
            empty_steps="deliver",
            device=torch.device("cpu"),
        )

    def samples(self, split: str, epoch: int | None) -> SampleDataset:
        """Returns single samples by number, for torch's samplers.

        With ``on_error="skip"``, the first call reads the split once, in
        order, to leave out samples that cannot be decoded.

        Args:
            split: name of the split.
            epoch: number of the training epoch whose random changes the
                images have; None for none.
        """
        left_out: Sequence[int] = ()
        if self._config.read.on_error == "skip":
            if split not in self._read_whole:
                with closing(self.loader(split=split, shared=False)) as loader:
                    deque(loader, maxlen=0)
                self._read_whole.add(split)
            left_out = self._factory.skipped.numbers(self.data.split(split))
        return SampleDataset(
            self.dataset_config(split),
            self._augmented.training(epoch),
            left_out,
        )

    def dataset_config(self, split: str) -> DatasetConfig:
        """Facts by which another process reads the same features."""
        self._check_open()
        sources, connection = self._factory.sources, self.data.connection
        sources.early.stop()
        return DatasetConfig(
            credentials=connection.credentials,
            connection_options=connection.options,
            data=self.data.split(split),
            region=self.frozen.on_cpu(),
            # Without a package yet, all features are cached on this host.
            mix=self._factory.scheduler.weights
            if sources.model
            else {RAW_ROUTE: 1.0},
            model=sources.model,
            cache=self._config.cache,
            read=self._config.read,
            encodings=self.plan.encodings,
            augmented=self._augmented,
            skipped=self._factory.skipped,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of :attr:`data`'s epochs.

        Raises:
            ClientError: ``bad_state``.
        """
        self.data.epochs.load_state_dict(state)
        self.plan.state_loaded()

    def features_facts(self) -> dict[str, Any]:
        """Facts that determine the features of all epochs, fit for JSON."""
        return {
            **self.frozen.facts,
            "augment_epochs": self._augmented.period,
        }

    def close(self) -> None:
        """Ends all requests and threads of the job."""
        self._is_closed = True
        self._factory.interrupt()
        self.history.close()
        self.plan.close()
        self._factory.close()
        self.data.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientError(
                "not_connected",
                "this data set or job was closed; make a new one",
            )
