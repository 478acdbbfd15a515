"""Opens the data of a job, and reads the first of them early."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

from hapi_client.data.labels import Labels
from hapi_client.data.splits import (
    TRAIN,
    Data,
    DataSet,
    load_splits,
    num_classes_of,
)
from hapi_client.job.options import JobConfig
from hapi_client.loading.early_reads import EarlyReads
from hapi_client.loading.read_config import ReadConfig
from hapi_client.sampling.distributed import this_rank
from hapi_client.sampling.epochs import EpochOptions, Epochs, ReaderShare
from hapi_client.sampling.partition import Reader
from hapi_client.swift.connection import Connection
from hapi_client.swift.traffic_counters import TrafficCount
from hapi_protocol.errors import ClientError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
"""Maximum wait for mistakes in the data before a model is split."""


@dataclass
class OpenedData:
    """The data of a job.

    Attributes:
        connection: connection to the account.
        owns_connection: True if it ends with the job.
        traffic_before: traffic of the connection before the job.
        splits: the data sets by split, with ``train``.
        epochs: orders of the training data's epochs.
        options: their batch size, seed and partition.
        early: spans that were read early; None for none.
    """

    connection: Connection
    owns_connection: bool
    traffic_before: TrafficCount
    splits: Mapping[str, DataSet]
    epochs: Epochs
    options: EpochOptions
    early: EarlyReads | None = None

    @property
    def num_classes(self) -> int:
        """One more than the largest label of any split."""
        return num_classes_of(self.splits)

    @property
    def num_samples(self) -> int:
        """Number of samples of the training data."""
        return self.splits[TRAIN].num_samples

    def split(self, name: str) -> DataSet:
        """Returns the data set of a split.

        Raises:
            ClientError: ``bad_configuration`` naming the splits.
        """
        if name not in self.splits:
            raise ClientError(
                "bad_configuration",
                f"there is no split {name!r}; data has "
                f"{', '.join(map(repr, self.splits))}",
            )
        return self.splits[name]

    def share(
        self, split: str, epoch: int | None, reader: Reader, *, drop_last: bool
    ) -> ReaderShare:
        """Returns a reader's share of a split.

        Args:
            split: name of the split.
            epoch: number of the training epoch; None for the order of the
                index.
            reader: the reader.
            drop_last: leave out an incomplete last batch.

        Raises:
            ClientError: ``bad_configuration`` naming the value and what is
                allowed.
        """
        sizes = self.split(split).sizes
        if epoch is None:
            return self.epochs.evaluation(sizes, reader, drop_last=drop_last)
        check_shuffled(split)
        return self.epochs.training(epoch, reader, drop_last=drop_last)

    def num_steps(self, split: str) -> int:
        """Steps of this rank in a whole pass over a split."""
        epoch = self.epochs.epoch if split == TRAIN else None
        reader = this_rank(os.environ).reader()
        return self.share(split, epoch, reader, drop_last=False).num_steps

    def check_outputs(self, num_outputs: int | None) -> None:
        """Warns if cross entropy does not take these labels.

        Args:
            num_outputs: numbers that the tail yields for a sample; None if
                unknown.  One may be a logit of two classes.
        """
        if num_outputs is not None and 1 < num_outputs < self.num_classes:
            logger.warning(
                "the data has labels up to %d, but the tail yields %d numbers "
                "for a sample, too few for cross entropy; give the model %d "
                "outputs, or the job other labels",
                self.num_classes - 1,
                num_outputs,
                self.num_classes,
            )

    def close(self) -> None:
        """Ends the early reads, and the connection if it is the job's."""
        if self.early is not None:
            self.early.close()
        if self.owns_connection:
            self.connection.close()


def check_shuffled(split: str) -> None:
    """Refuses training epochs of another split than ``train``.

    Raises:
        ClientError: ``bad_configuration`` naming the split.
    """
    if split != TRAIN:
        raise ClientError(
            "bad_configuration",
            f"split {split!r} is not shuffled; give shuffle=False",
        )


def open_data(
    data: Data,
    labels: Labels,
    batch_size: int,
    seed: int,
    config: JobConfig,
) -> OpenedData:
    """Connects and loads the indexes.

    Args:
        data: as for :class:`hapi_client.TransferJob`.
        labels: as for :class:`hapi_client.TransferJob`.
        batch_size: samples of a step, of all ranks together.
        seed: seed of the sample order and of random changes of images.
        config: options of the job; labels must not exceed its
            ``num_classes``.

    Raises:
        HapiError: naming what is wrong and the remedy.
    """
    read, connection = config.read, config.connection
    options = EpochOptions(batch_size, seed, read.partition, read.buffer_spans)
    opened = connection or Connection()
    try:
        traffic_before = opened.traffic.count()
        splits = load_splits(opened, data, labels)
        train = splits[TRAIN]
        job_data = OpenedData(
            opened,
            connection is None,
            traffic_before,
            splits,
            Epochs(train.sizes, train.digest(), options),
            options,
        )
        num_classes_of(splits, config.num_classes)
    except BaseException:
        if connection is None:
            opened.close()
        raise
    return job_data


class EarlyOpening:
    """Opens and reads data in a thread, while the caller splits a model.

    Args:
        opening: opens the data.
        read: options of reading; None to read nothing early.
    """

    def __init__(
        self, opening: Callable[[], OpenedData], read: ReadConfig | None
    ) -> None:
        self._opening = opening
        self._read = read
        self._opened: Future[OpenedData] = Future()
        self._may_read: Future[bool] = Future()
        Thread(target=self._run, name="hapi-open", daemon=True).start()

    def begin_reading(self) -> None:
        """Begins to read: the split takes seconds, as it is not cached.

        Raises:
            HapiError: as :func:`open_data`, if it has failed already.
        """
        self._decide(reads=True)
        if wait([self._opened], CHECK_SECONDS).done:
            self._opened.result()

    def _decide(self, reads: bool) -> None:
        if not self._may_read.done():
            self._may_read.set_result(reads)

    def _run(self) -> None:
        try:
            opened = self._opening()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        if self._may_read.result() and self._read is not None:
            # A loader reports what is wrong with its share.
            with suppress(ClientError):
                opened.early = _early_reads(opened, self._read)
        self._opened.set_result(opened)

    def result(self) -> OpenedData:
        """Waits for the data.

        Raises:
            HapiError: as :func:`open_data`.
        """
        self._decide(reads=False)
        return self._opened.result()

    def discard(self) -> None:
        """Ends what has begun, when it is there."""
        self._decide(reads=False)
        self._opened.add_done_callback(_close)


def _early_reads(opened: OpenedData, read: ReadConfig) -> EarlyReads:
    """Begins to read this rank's share of the first epoch."""
    train = opened.splits[TRAIN]
    reader = this_rank(os.environ).reader()
    share = opened.share(TRAIN, 0, reader, drop_last=False)
    spans = [
        train.spans[piece.span].part(piece.first, piece.stop)
        for piece in share.read_plan.pieces
    ]
    return EarlyReads(opened.connection, spans, read)


def _close(opened: Future[OpenedData]) -> None:
    if opened.exception() is None:
        opened.result().close()
