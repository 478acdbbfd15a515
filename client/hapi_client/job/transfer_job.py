"""A transfer-learning job: frozen layers near the data, the tail here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hapi_client.data.augmentation_schedule import AugmentationSchedule
from hapi_client.data.labels import Labels
from hapi_client.data.splits import TRAIN, Data, DataSet, load_splits
from hapi_client.job.options import (
    check_cache,
    check_cut,
    check_epochs,
    check_on_error,
    checked_encodings,
)
from hapi_client.job.wiring import make_planner
from hapi_client.loading.feature_loader import FeatureLoader
from hapi_client.loading.loader_factory import LoaderFactory
from hapi_client.loading.prefetcher import FetchOptions
from hapi_client.loading.torch_datasets import (
    DatasetConfig,
    FeatureDataset,
    SampleDataset,
)
from hapi_client.metrics.counters import JobStats
from hapi_client.model.frozen_region import AUTO, FrozenRegion
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.planning.cache_tracker import KeptFeatures
from hapi_client.planning.planner import JobPlanner
from hapi_client.planning.replanner import PlanChange, ReplanOptions
from hapi_client.reports.epoch_history import EpochHistory
from hapi_client.reports.epoch_report import EpochReport
from hapi_client.reports.progress_bar import progress_wanted
from hapi_client.reports.run_page import write_reports
from hapi_client.reports.run_report import DEFAULT_TITLE
from hapi_client.sampling.distributed import Rank, this_rank
from hapi_client.sampling.epochs import EpochOptions, Epochs, ReaderShare
from hapi_client.sampling.partition import EpochPartition, Reader
from hapi_client.swift.connection import Connection
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import CACHE_OFF
from hapi_splitter.freezing.freeze_selector import Freeze
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.planner.plan import Plan, Problem
from hapi_splitter.planner.problem import Route


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
        model: the whole network, with the weights to use; or two modules
            ``(frozen, tail)``, where torch.fx cannot trace it.
        freeze: what is frozen, as for
            :func:`hapi_splitter.freezing.split_model.split`: the name of the
            last frozen module, a list of modules, or a function; None for two
            modules.
        data: ``swift://container/prefix`` of an indexed data set,
            ``swift://container/shard-{000..031}.tar``, or a list of these;
            or a mapping of splits to them, ``train`` among them.
        batch_size: samples of a step, of all ranks together.
        transform: an ``ImageTransform``, torchvision's
            ``weights.transforms()``, or an ``ArrayTransform`` of data that
            is no images (:doc:`arrays </howto/arrays>`); None for ImageNet's
            evaluation transform.
        augment: what is random about the images of training epochs
            (:mod:`hapi_splitter.inputs.augmentation`), the same wherever it is
            computed; None for nothing.  Evaluation is never changed.
        augment_epochs: after how many epochs the random changes repeat, so
            that the store can keep features of them (``cache``); None for
            never.
        cut: how much of the frozen region the store computes:
            ``"auto"`` plans what is fastest and keeps the plan up with the
            conditions (:mod:`hapi_client.planning.planner`); ``"freeze"`` for
            all of it, ``"stream"`` or 0 for none (plain reads, all computed
            here), or a cut's number.
        encoding: of features on the wire; None leaves it to the plan, and
            means float32 with a fixed cut.
        floor: what a plan may round: ``"lossless"`` nothing, ``"half"``
            to 16 bits, ``"uint8"`` to 8.
        epochs: passes over the data that there will be, evaluations of it
            included, to judge whether one-off costs pay; None expects as
            many to come as there were already.
        labels: class name or key to integer, or a function of the key;
            None for the integers of the index; ``"optional"`` for those that
            it has, and -1 for samples without.
        on_error: ``"raise"`` for a sample that cannot be decoded, or
            ``"skip"``, counted in ``stats.skipped``; :meth:`samples` raises
            always.
        seed: of the order of samples; not negative.
        lanes: how many ranks and loader workers can share an epoch, also
            when training goes on with other numbers of them
            (:class:`hapi_client.sampling.partition.EpochPartition`); None for
            what suits.
        connection: None makes one from the environment.
        device: of the tail and the client's part of the frozen region.
        models_container: where packages are stored.
        cache: whether features are kept in the store, for later epochs and
            jobs with the same model, cut and encoding: ``off``, ``read``
            what is there, or ``readwrite``, which takes room in your
            account (:doc:`the operator </howto/operating>` has to allow it).  A
            plan reads what was kept wherever that is faster, and pushes a
            deeper cut where the ``epochs`` to come gain from it.
        options: how to fetch.
        replan: how often a plan is looked at again.
        progress: whether a line on standard error shows how far
            :meth:`loader` is, of the first rank alone; None leaves it to the
            environment (``HAPI_PROGRESS``, 0 or 1), or else shows it on a
            terminal and in a notebook.

    Attributes:
        cut: its number, or ``"auto"``.
        tail: the trainable rest of ``model``; its parameters are those of
            ``model``.

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
        augment: Augmentation | None = None,
        augment_epochs: int | None = None,
        cut: int | str = AUTO,
        encoding: str | None = None,
        floor: str = "lossless",
        epochs: float | None = None,
        labels: Labels = None,
        on_error: str = "raise",
        seed: int = 0,
        lanes: EpochPartition | None = None,
        connection: Connection | None = None,
        device: torch.device | str = "cpu",
        models_container: str = DEFAULT_MODELS_CONTAINER,
        cache: str = CACHE_OFF,
        options: FetchOptions | None = None,
        replan: ReplanOptions | None = None,
        progress: bool | None = None,
    ) -> None:
        check_on_error(on_error)
        check_cut(cut)
        self._encodings = checked_encodings(encoding, floor)
        check_epochs(epochs)
        check_cache(cache)
        wanted = progress_wanted(progress, os.environ)
        self._owns_connection = connection is None
        self._connection = connection or Connection()
        self._traffic_before = self._connection.traffic.count()
        self._options = options or FetchOptions()
        self._on_error = on_error
        self._cache = cache
        self._frozen = FrozenRegion(
            model,
            freeze,
            transform,
            torch.device(device),
            self._options.forward_samples,
            augment,
        )
        self._augmented = AugmentationSchedule(
            self._frozen.transform.augmentation is not None,
            seed,
            augment_epochs,
        )
        self.tail = self._frozen.tail
        self.cut: int | str = (
            AUTO if cut == AUTO else self._frozen.cut_number(cut)
        )
        self._splits = load_splits(self._connection, data, labels)
        train = self._splits[TRAIN]
        self._epochs = Epochs(
            train.sizes,
            train.digest(),
            EpochOptions(batch_size, seed, lanes, self._options.buffer_spans),
        )
        self._feeder = LoaderFactory(
            self._connection,
            self._frozen,
            train.container,
            self._options,
            KeptFeatures(cache, self._augmented.variants),
        )
        self._passes = EpochHistory(
            wanted, self._feeder.mixer, self._connection.traffic
        )
        self._planner: JobPlanner | None = None
        self._num_ranks = 1
        self._samples_at_load = 0
        self._batch_size = batch_size
        try:
            if self.cut == AUTO:
                self._planner = make_planner(
                    self._connection,
                    self._frozen,
                    self._feeder,
                    train,
                    models_container=models_container,
                    encodings=self._encodings,
                    epochs=epochs,
                    options=self._options,
                    replan=replan or ReplanOptions(),
                    samples_so_far=self._samples_so_far,
                    earlier_samples=self._earlier_samples,
                )
                self._feeder.sources.kept.follow(
                    train.spans,
                    [
                        span
                        for name, each in self._splits.items()
                        if name != TRAIN
                        for span in each.spans
                    ],
                )
                self._passes.follow(self._planner)
            elif self.cut:
                self._push(
                    (self._frozen.cut_number(cut), self._encodings[0]),
                    models_container,
                )
        except BaseException:
            self.close()
            raise

    def _samples_so_far(self) -> int:
        """That the training loops of all ranks have had."""
        return self._num_ranks * self._feeder.counters.snapshot().samples

    def _earlier_samples(self) -> int:
        """Likewise, of the run that is gone on with, if there is one."""
        loaded = self._epochs.loaded
        if loaded is None:
            return 0
        steps = loaded.step * self._batch_size
        done = loaded.epoch * self.num_samples + steps
        return done - self._samples_at_load

    def _push(self, way: Route, models_container: str) -> None:
        self._connection.require_hapi()
        model, sent_bytes = self._frozen.store(
            self._connection, models_container
        )
        self._feeder.counters.add(package_bytes=sent_bytes)
        self._feeder.push(model, {way: 1.0})

    def _span_came(self) -> None:
        if self._planner is not None:
            self._planner.span_came()

    @property
    def plan(self) -> Plan | None:
        """The present plan; None with a fixed cut, and until there is one.

        A job streams until then.
        """
        return self._planner.plan if self._planner else None

    @property
    def no_plan_reason(self) -> str | None:
        """Why :attr:`plan` is None; None when it is not."""
        if self._planner is None:
            return "the cut is fixed"
        return None if self.plan else self._planner.no_plan_reason

    @property
    def problem(self) -> Problem | None:
        """What :attr:`plan` solves, under the present conditions."""
        return self._planner.problem if self._planner else None

    @property
    def plan_changes(self) -> Sequence[PlanChange]:
        """All plans so far, oldest first."""
        return self._planner.changes if self._planner else ()

    @property
    def num_cuts(self) -> int:
        """Cut ``num_cuts`` is the whole frozen region."""
        return self._frozen.num_cuts

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Of one sample at the freeze point."""
        return self._frozen.cut_shape(self.num_cuts)

    @property
    def encodings(self) -> Sequence[str]:
        """In which features may travel."""
        return self._encodings

    @property
    def num_samples(self) -> int:
        """Samples of the training data."""
        return self._splits[TRAIN].num_samples

    @property
    def num_classes(self) -> int:
        """One more than the largest label of any split."""
        return max(each.num_classes for each in self._splits.values())

    def data_set(self, split: str = TRAIN) -> DataSet:
        """What there is of a split: its spans, labels and class names.

        Raises:
            ClientError: ``bad_configuration`` naming the splits.
        """
        return self._split(split, None)

    @property
    def stats(self) -> JobStats:
        """Figures so far."""
        traffic = self._connection.traffic.count() - self._traffic_before
        stats = self._feeder.counters.snapshot()
        return replace(
            stats,
            bytes=traffic.total_bytes - stats.package_bytes,
            retries=stats.retries + traffic.retries,
        )

    @property
    def reports(self) -> list[EpochReport]:
        """What each pass of :meth:`loader` took, on this rank: those that
        ended, and one under way as far as it is."""
        return self._passes.reports

    def write_report(
        self, path: str | os.PathLike[str], title: str = DEFAULT_TITLE
    ) -> None:
        """Writes :attr:`reports` to a file.

        Args:
            path: ``.json``, or ``.html``: tables and pictures in one file.
            title: of the page.

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
        """One pass over a split of the data.

        Args:
            epoch: number of the training epoch; with the job's seed it
                fixes the order, and the random changes of the images.  Where
                a state was loaded, that epoch goes on with its next step,
                once: further loaders of the epoch begin it anew.
                None for the index's order and no changes, as evaluation
                wants it.
            split: of the data.
            drop_last: leave out a shorter last batch.
            shared: each rank (of torch.distributed, or else of torchrun's
                ``RANK`` and ``WORLD_SIZE``) gets its part of every batch;
                else all of it.

        Raises:
            ClientError: ``bad_configuration`` naming the value and what is
                allowed.
        """
        rank = this_rank(os.environ) if shared else Rank()
        data = self._split(split, epoch)
        share = self._share(data, epoch, rank, drop_last)
        if epoch is not None:
            self._num_ranks = rank.world_size
            self._feeder.sources.kept.begin(epoch, rank.world_size)
        if self._planner is not None:
            self._planner.begin()
        return self._feeder.loader(
            data,
            share,
            self._augmented.training(epoch),
            on_error=self._on_error,
            needs_every_step=rank.world_size > 1,
            span_came=self._span_came,
            # Of the first rank, also where each goes through all of it.
            tally=self._passes.begin(
                epoch, split, shown=not this_rank(os.environ).rank
            ),
        )

    def dataset(
        self, *, num_workers: int = 0, drop_last: bool = False
    ) -> FeatureDataset:
        """Training epochs for torch's ``DataLoader(…, batch_size=None)``.

        Spans go the ways of the present plan (:attr:`plan`), for as long as
        the data set lasts: what workers measure, the job does not know of.
        Features are computed on the CPU.

        Args:
            num_workers: of the ``DataLoader``.
            drop_last: leave out a shorter last batch.
        """
        return FeatureDataset(
            self._reading_parts(self._splits[TRAIN]),
            self._epochs.for_workers(max(1, num_workers)),
            this_rank(os.environ),
            drop_last=drop_last,
        )

    def samples(
        self, split: str = TRAIN, *, epoch: int | None = None
    ) -> SampleDataset:
        """Single samples by number, for torch's samplers.

        Args:
            split: of the data.
            epoch: number of the training epoch, whose random changes the
                images have; None for none.
        """
        return SampleDataset(
            self._reading_parts(self._split(split, epoch)),
            self._augmented.training(epoch),
        )

    def _reading_parts(self, data: DataSet) -> DatasetConfig:
        return DatasetConfig(
            credentials=self._connection.credentials,
            connection_options=self._connection.options,
            data=data,
            region=self._frozen.on_cpu(),
            mix=self._feeder.mixer.weights,
            model=self._feeder.sources.model,
            cache=self._cache,
            on_error=self._on_error,
            options=self._options,
            augmented=self._augmented,
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
        """In which training goes on; that of a loaded state, or 0."""
        return self._epochs.epoch

    @property
    def step(self) -> int:
        """With which training goes on in that epoch."""
        return self._epochs.step

    def state_dict(self) -> dict[str, Any]:
        """Where training stands in its data, fit for JSON.

        To be asked for between two steps: what a training loader has
        delivered has been trained on.  The same on all ranks.
        """
        return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, also with another number of ranks.

        ``job.loader(job.epoch)`` then begins with the first step that was
        not delivered, and delivers exactly the samples that are left.

        Raises:
            ClientError: ``bad_state`` naming what is wrong with it, or does
                not go with this job.
        """
        self._epochs.load_state_dict(state)
        self._samples_at_load = self._samples_so_far()

    def features_facts(self) -> dict[str, Any]:
        """What the features of its epochs depend on, fit for JSON.

        Not the cut, nor the encoding.  A tail that was trained on features
        of other facts does not go with this job.
        """
        return {
            **self._frozen.facts,
            "augment_epochs": self._augmented.period,
        }

    def close(self) -> None:
        """Ends all requests and threads of the job."""
        self._feeder.interrupt()
        self._passes.close()
        if self._planner is not None:
            self._planner.close()
        self._feeder.close()
        if self._owns_connection:
            self._connection.close()

    def __enter__(self) -> TransferJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
