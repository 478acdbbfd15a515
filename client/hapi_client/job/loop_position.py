"""Position of a loop and its loader workers in a split's epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from hapi_client.sampling.distributed import Rank
from hapi_client.sampling.epochs import Epochs, ReaderShare, check_epoch
from hapi_client.sampling.partition import Reader
from hapi_protocol.errors import ClientError


class LoopPosition:
    """Position in the epochs of a split, in memory that workers share.

    Args:
        epochs: orders of the training data, and where training continues.
        sizes: samples of each span of the split.
        rank: rank of this process among those that share the split.
        shuffle: True for training epochs; False for the index's order, in
            which no position is kept.
        drop_last: leave out an incomplete last batch.
    """

    def __init__(
        self,
        epochs: Epochs,
        sizes: Sequence[int],
        rank: Rank,
        *,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self._sizes = sizes
        self._rank = rank
        self._shuffle = shuffle
        self.drop_last = drop_last
        # Workers that persist see these change.
        self._epoch = _shared(1)
        self.num_workers = _shared(1)
        self.start_at(epochs)

    def start_at(self, epochs: Epochs) -> None:
        """Continues where training does by its epochs."""
        # A copy: other loops move the pipeline's.
        self._start = epochs.for_workers(1)
        # As far as this process has iterated.
        self._delivered = self._start
        loaded = self._start.loaded
        self._epoch[0] = self._start.epoch
        # For each worker, whether it has delivered the rest of the epoch.
        self._resumed = _shared(loaded.step_partitions if loaded else 1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for tensor in (self._epoch, self.num_workers, self._resumed):
            # A copy has its own; what was shared with the process that made
            # the original stays shared.
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def batch_size(self) -> int:
        """Samples of a step, of all ranks together."""
        return self._start.batch_size

    @property
    def epoch(self) -> int:
        """The epoch that is delivered next."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that is delivered next.

        Raises:
            ClientError: ``bad_configuration`` naming the value.
        """
        self._epoch[0] = check_epoch(epoch)
        self._resumed.zero_()

    @property
    def first_step(self) -> int:
        """First step of the epoch; not 0 after a resume."""
        return self._epochs().first_step(self.epoch) if self._shuffle else 0

    @property
    def num_steps(self) -> int:
        """Steps of this rank in a whole epoch."""
        return self._share(self._epochs(), self._reader()).num_steps

    def begin(
        self, reader: Reader | None = None
    ) -> tuple[ReaderShare, int | None]:
        """Begins a pass in this process.

        Args:
            reader: reader instead of this rank's, such as its virtual nodes.

        Returns:
            This reader's share, and the epoch of training; None for the
            order of the index.

        Raises:
            ClientError: ``bad_state`` if the rest of a resumed epoch was
                delivered already.
        """
        info = get_worker_info()
        self.num_workers[0] = info.num_workers if info else 0
        epochs = self._epochs()
        share = self._share(epochs, reader or self._reader())
        if not self._shuffle:
            return share, None
        self._check_resumed_once(epochs)
        if info:
            # Workers read ahead of the loop, which alone knows its steps.
            share = replace(share, delivered=lambda step: None)
        else:
            self._delivered = epochs
        return share, self.epoch

    def state_dict(self, step: int | None) -> dict[str, Any]:
        """Position before ``step``; None for what was delivered.

        Raises:
            ClientError: ``bad_configuration`` for a missing step, one beyond
                the epoch, or the order of the index.
        """
        self.check_shuffled()
        if step is not None:
            return self._epochs().state_at(
                self.epoch, step, self._reader(), drop_last=self.drop_last
            )
        if int(self.num_workers):
            raise ClientError(
                "bad_configuration",
                "loader workers read ahead of the loop: give state_dict the "
                "number of steps that were taken, state_dict(step + 1)",
            )
        return self._delivered.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state.

        Raises:
            ClientError: ``bad_state``.
        """
        self._start.load_state_dict(state)
        self.start_at(self._start)

    def check_shuffled(self) -> None:
        """Refuses the order of the index.

        Raises:
            ClientError: ``bad_configuration``.
        """
        if not self._shuffle:
            raise ClientError(
                "bad_configuration",
                "only training has a position to save: this data set has "
                "shuffle=False, and each pass has all its samples",
            )

    def _check_resumed_once(self, epochs: Epochs) -> None:
        epoch = self.epoch
        first = epochs.first_step(epoch)
        if not first:
            return
        worker = self._reader().worker
        if self._resumed[worker]:
            raise ClientError(
                "bad_state",
                f"epoch {epoch} was continued from step {first} already; "
                f"call set_epoch({epoch + 1}) before the next epoch, or "
                f"set_epoch({epoch}) to continue from step {first} once more",
            )
        self._resumed[worker] = 1

    def _epochs(self) -> Epochs:
        return self._start.for_workers(max(1, int(self.num_workers)))

    def _reader(self) -> Reader:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        return self._rank.reader(worker, num_workers)

    def _share(self, epochs: Epochs, reader: Reader) -> ReaderShare:
        if self._shuffle:
            return epochs.training(
                self.epoch, reader, drop_last=self.drop_last
            )
        return epochs.evaluation(self._sizes, reader, drop_last=self.drop_last)


def _shared(length: int) -> torch.Tensor:
    tensor = torch.zeros(length, dtype=torch.int64)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
