"""Loaders of a data set's features: planning, push-down, reports, state."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import Self

from hapi_client.data.augmentation_schedule import AugmentationSchedule
from hapi_client.data.labels import Labels
from hapi_client.data.splits import TRAIN, Data, DataSet
from hapi_client.job.opened_data import OpenedData, open_data
from hapi_client.job.options import (
    PlanConfig,
    SwiftConfig,
    check_cache,
)
from hapi_client.job.wiring import make_planner
from hapi_client.loading.feature_loader import FeatureLoader
from hapi_client.loading.loader_factory import LoaderFactory, feature_caches
from hapi_client.loading.prefetcher import ReadConfig
from hapi_client.loading.sample_dataset import DatasetConfig, SampleDataset
from hapi_client.metrics.events import JobStats
from hapi_client.model.frozen_region import (
    AUTO,
    FrozenRegion,
    check_cut,
)
from hapi_client.planning.cache_tracker import CacheTracker
from hapi_client.planning.job_planner import JobPlanner
from hapi_client.planning.replanner import PlanChange
from hapi_client.progress import progress_wanted
from hapi_client.reports.epoch_history import EpochHistory
from hapi_client.reports.epoch_report import EpochReport
from hapi_client.reports.run_page import write_reports
from hapi_client.reports.run_report import DEFAULT_TITLE
from hapi_client.sampling.distributed import Rank, this_rank
from hapi_client.sampling.epochs import Epochs, ReaderShare
from hapi_client.sampling.partition import Reader
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import CACHE_OFF
from hapi_splitter.cuts import Cut
from hapi_splitter.planner.plan import Plan, Problem
from hapi_splitter.planner.problem import LINK, Route


class FeaturePipeline:
    """Reads a data set in Swift and yields features at the freeze point.

    Args:
        frozen: frozen region, of :func:`hapi_client.split_model`.
        data: ``swift://container/prefix`` of an indexed data set,
            ``swift://container/shard-{000..031}.tar``, or a list of these;
            or a mapping of splits to them, ``train`` among them.
        batch_size: samples of a step, of all ranks together.
        seed: seed of the sample order; not negative.
        labels: class name or key to integer, or a function of the key; None
            for the integers of the index; ``"optional"`` for those that
            it has, and -1 for samples without.
        cut: as :attr:`hapi_client.job.options.JobConfig.cut`.
        cache: as :attr:`hapi_client.job.options.JobConfig.cache`.
        plan: options of planning.
        read: options of reading and decoding.
        swift: options of the store.
        opening: opens the data; None for :func:`.open_data`.

    Attributes:
        frozen: the frozen region.
        cut: its number, or ``"auto"``.

    Raises:
        HapiError: naming what is wrong and the remedy.
    """

    def __init__(
        self,
        frozen: FrozenRegion,
        data: Data,
        *,
        batch_size: int = 32,
        seed: int = 0,
        labels: Labels = None,
        cut: int | str = AUTO,
        cache: str = CACHE_OFF,
        plan: PlanConfig | None = None,
        read: ReadConfig | None = None,
        swift: SwiftConfig | None = None,
        opening: Callable[[], OpenedData] | None = None,
    ) -> None:
        check_cut(cut)
        check_cache(cache)
        plan, swift = plan or PlanConfig(), swift or SwiftConfig()
        self._read = read or ReadConfig()
        self._plan = plan
        wanted = progress_wanted(self._read.progress, os.environ)
        # A copy: jobs may share a region, and read with other limits.
        self.frozen = frozen = frozen.with_limits(
            self._read.max_pixels, self._read.forward_samples
        )
        self.cut: int | str = AUTO if cut == AUTO else frozen.cut_number(cut)
        self._augmented = AugmentationSchedule(
            frozen.transform.augmentation is not None,
            seed,
            frozen.augment_period_epochs,
        )
        frozen.check_encodings(plan.encodings)
        self._opened = opened = (
            opening()
            if opening
            else open_data(
                data, labels, batch_size, seed, self._read, swift.connection
            )
        )
        opened.check_outputs(frozen.num_outputs)
        self._connection = opened.connection
        self._splits = opened.splits
        self._epochs = opened.epochs
        self._cache = cache
        train = self._splits[TRAIN]
        self._factory = LoaderFactory(
            self._connection,
            frozen,
            self._read,
            CacheTracker(cache, self._augmented.variants),
            feature_caches(
                self._connection,
                frozen,
                self._splits.values(),
                self._read.cache_options,
                self.encodings,
                self._augmented.variants,
            ),
            opened.early,
        )
        self._history = EpochHistory(
            wanted, self._factory.scheduler, self._factory.recorder
        )
        self._planner: JobPlanner | None = None
        self._read_whole: set[str] = set()
        self._num_ranks = 1
        self._samples_at_load = 0
        self._batch_size = batch_size
        try:
            if self.cut == AUTO:
                self._start_planner(plan, swift.models_container)
            elif self.cut:
                self._factory.prepare_reading(
                    train,
                    self._augmented.training(0),
                    partial(
                        self._push,
                        Route(frozen.cut_number(cut), self.encodings[0]),
                        swift.models_container,
                    ),
                )
        except BaseException:
            self.close()
            raise

    def _start_planner(self, plan: PlanConfig, models_container: str) -> None:
        train = self._splits[TRAIN]
        self._planner = make_planner(
            self._connection,
            self.frozen,
            self._factory,
            train,
            [each.spans for each in self._splits.values()],
            models_container=models_container,
            encodings=plan.encodings,
            epochs=plan.epochs,
            options=self._read,
            replan=plan.replan_options,
            samples_so_far=self._samples_so_far,
            earlier_samples=self._earlier_samples,
            early_samples=self._early_samples,
        )
        self._factory.sources.link_limits = self._link_limits
        self._history.follow(self._planner)

    def _link_limits(self) -> bool:
        plan = self.plan
        return plan is None or LINK in plan.binding

    def _samples_so_far(self) -> int:
        """Samples delivered to the training loops of all ranks."""
        return (
            self._num_ranks * self._factory.recorder.counters.count().samples
        )

    def _early_samples(self) -> int:
        """Samples that all ranks have read before their turn."""
        return self._num_ranks * self._factory.sources.early.num_samples

    def _earlier_samples(self) -> int:
        """Samples delivered by the run that this one continues, or 0."""
        loaded = self._epochs.loaded
        if loaded is None:
            return 0
        steps = loaded.step * self._batch_size
        done = loaded.epoch * self.num_samples + steps
        return done - self._samples_at_load

    def _push(self, route: Route, models_container: str) -> None:
        self._connection.require_hapi()
        model, sent_bytes = self.frozen.store(
            self._connection, models_container
        )
        self._factory.recorder.counters.add(package_bytes=sent_bytes)
        self._factory.push(model, {route: 1.0})

    def _span_arrived(self) -> None:
        if self._planner is not None:
            self._planner.span_arrived()

    @property
    def plan(self) -> Plan | None:
        """The current plan; None if the cut is fixed or there is none yet.

        Until there is one, all samples are read raw.
        """
        return self._planner.plan if self._planner else None

    @property
    def no_plan_reason(self) -> str | None:
        """Reason for which :attr:`plan` is None; None if there is a plan."""
        if self._planner is None:
            return "the cut is fixed"
        return None if self.plan else self._planner.no_plan_reason

    @property
    def problem(self) -> Problem | None:
        """The problem that :attr:`plan` solves, with current conditions."""
        return self._planner.problem if self._planner else None

    @property
    def plan_changes(self) -> Sequence[PlanChange]:
        """All plans so far, oldest first."""
        return self._planner.changes if self._planner else ()

    @property
    def num_cuts(self) -> int:
        """Number of cuts; the last one is the whole frozen region."""
        return self.frozen.num_cuts

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one sample at the freeze point."""
        return self.frozen.cut_shape(self.num_cuts)

    @property
    def encodings(self) -> Sequence[str]:
        """Encodings that features may have on the wire."""
        cuts: Sequence[Cut] = self.frozen.device_graph.cuts
        if isinstance(self.cut, int) and self.cut:
            cuts = [cuts[self.cut - 1]]
        texts = (each for c in cuts for each in self._plan.encodings(c.dtype))
        return tuple(dict.fromkeys(texts))

    @property
    def num_samples(self) -> int:
        """Number of samples of the training data."""
        return self._splits[TRAIN].num_samples

    @property
    def num_classes(self) -> int:
        """Number of classes, one more than the largest label of any split."""
        return self._opened.num_classes

    @property
    def epochs(self) -> Epochs:
        """Orders of the training data's epochs, and the position in them."""
        return self._epochs

    def num_steps(self, split: str = TRAIN) -> int:
        """Steps of this rank in a whole pass over a split."""
        data = self._split(split, None)
        epoch = self.epoch if split == TRAIN else None
        return self._share(
            data, epoch, this_rank(os.environ), drop_last=False
        ).num_steps

    def data_set(self, split: str = TRAIN) -> DataSet:
        """Spans, labels and class names of a split.

        Raises:
            ClientError: ``bad_configuration`` naming the splits.
        """
        return self._split(split, None)

    @property
    def stats(self) -> JobStats:
        """Counters of the job so far."""
        before = self._opened.traffic_before
        traffic = self._connection.traffic.count() - before
        stats = self._factory.recorder.counters.count()
        return replace(
            stats,
            bytes=traffic.total_bytes - stats.package_bytes,
            retries=stats.retries + traffic.retries,
        )

    @property
    def reports(self) -> list[EpochReport]:
        """Time and traffic of each epoch on this rank, oldest first.

        The current epoch is included as far as it got.
        """
        return self._history.reports

    def write_report(
        self, path: str | os.PathLike[str], title: str = DEFAULT_TITLE
    ) -> None:
        """Writes :attr:`reports` to a file.

        Args:
            path: file name that ends in ``.json``, or in ``.html`` for
                tables and figures in one file.
            title: title of the page.

        Raises:
            ClientError: ``bad_configuration`` for another suffix, or a file
                that cannot be written.
        """
        write_reports(path, self.reports, title)

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
        share = self._share(self._split(split, epoch), epoch, rank, drop_last)
        return self.loader_of_share(
            share,
            epoch,
            split=split,
            num_ranks=rank.world_size,
            needs_every_step=rank.world_size > 1,
        )

    def loader_of_share(
        self,
        share: ReaderShare,
        epoch: int | None,
        *,
        split: str = TRAIN,
        num_ranks: int,
        needs_every_step: bool,
    ) -> FeatureLoader:
        """Returns a loader of a share of an epoch.

        Args:
            share: pieces to read, and batches to deliver.
            epoch: as in :meth:`loader`.
            split: name of the split.
            num_ranks: number of ranks that share the epoch.
            needs_every_step: True if a step whose samples are all bad is an
                error even with ``on_error="skip"``.
        """
        if epoch is not None:
            self._num_ranks = num_ranks
        if self._planner is not None:
            self._planner.begin(is_training=epoch is not None)
        return self._factory.loader(
            self._split(split, epoch),
            share,
            self._augmented.training(epoch),
            on_error=self._read.on_error,
            needs_every_step=needs_every_step,
            span_arrived=self._span_arrived,
            # Shown by the first rank, even if each reads all batches.
            recorder=self._history.begin(
                epoch, split, shown=not this_rank(os.environ).rank
            ),
        )

    def samples(
        self, split: str = TRAIN, *, epoch: int | None = None
    ) -> SampleDataset:
        """Returns single samples by number, for torch's samplers.

        With ``on_error="skip"``, the first call reads the split once, in
        order, to leave out samples that cannot be decoded.

        Args:
            split: name of the split.
            epoch: number of the training epoch whose random changes the
                images have; None for none.
        """
        data = self._split(split, epoch)
        left_out: Sequence[int] = ()
        if self._read.on_error == "skip":
            if split not in self._read_whole:
                with closing(self.loader(split=split, shared=False)) as loader:
                    deque(loader, maxlen=0)
                self._read_whole.add(split)
            left_out = self._factory.skipped.numbers(data)
        return SampleDataset(
            self.dataset_config(data),
            self._augmented.training(epoch),
            left_out,
        )

    def dataset_config(self, data: DataSet) -> DatasetConfig:
        """Facts by which another process reads the same features."""
        self._factory.sources.early.stop()
        return DatasetConfig(
            credentials=self._connection.credentials,
            connection_options=self._connection.options,
            data=data,
            region=self.frozen.on_cpu(),
            mix=self._factory.scheduler.weights,
            model=self._factory.sources.model,
            cache=self._cache,
            on_error=self._read.on_error,
            options=self._read,
            encodings=self.encodings,
            augmented=self._augmented,
            skipped=self._factory.skipped,
        )

    def _split(self, name: str, epoch: int | None) -> DataSet:
        if name not in self._splits:
            raise ClientError(
                "bad_configuration",
                f"there is no split {name!r}; data has "
                f"{', '.join(map(repr, self._splits))}",
            )
        if epoch is not None and name != TRAIN:
            raise ClientError(
                "bad_configuration",
                f"split {name!r} is not shuffled; leave out epoch={epoch}",
            )
        return self._splits[name]

    def _share(
        self, data: DataSet, epoch: int | None, rank: Rank, drop_last: bool
    ) -> ReaderShare:
        reader = Reader(rank.rank, rank.world_size)
        if epoch is None:
            return self._epochs.evaluation(
                data.sizes, reader, drop_last=drop_last
            )
        return self._epochs.training(epoch, reader, drop_last=drop_last)

    @property
    def epoch(self) -> int:
        """Epoch in which training continues; 0 without a loaded state."""
        return self._epochs.epoch

    @property
    def step(self) -> int:
        """Step with which training continues in that epoch."""
        return self._epochs.step

    def state_dict(self) -> dict[str, Any]:
        """Position of training in its data, fit for JSON.

        Call it between two steps: batches that a training loader has
        delivered count as trained on.  The same on all ranks.
        """
        return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state, also with another number of ranks.

        ``job.loader(job.epoch)`` then starts with the first step that was
        not delivered, and delivers exactly the remaining samples.

        Raises:
            ClientError: ``bad_state`` naming what is wrong with the state,
                or does not match this job.
        """
        self._epochs.load_state_dict(state)
        self._samples_at_load = self._samples_so_far()

    def features_facts(self) -> dict[str, Any]:
        """Facts that determine the features of all epochs, fit for JSON.

        Cut and encoding are not among them.  A tail that was trained on
        features of other facts does not match this job.
        """
        return {
            **self.frozen.facts,
            "augment_epochs": self._augmented.period,
        }

    def close(self) -> None:
        """Ends all requests and threads of the job."""
        self._factory.interrupt()
        self._history.close()
        if self._planner is not None:
            self._planner.close()
        self._factory.close()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
