"""accelerate's loader of features, of which each rank reads its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import Dataset

from hapi_client.job.feature_dataset import FeatureDataset
from hapi_client.loading.loader_plan import LabelledBatch
from hapi_client.option_checks import check_types


class FeatureDataLoader(DataLoaderShard):  # type: ignore[misc]  # untyped
    """Batches of a data set, for ``prepare`` and the rest of accelerate.

    ``prepare`` leaves it as it is, since each rank reads its share of every
    batch.  Batches that ``skip_first_batches`` skips are not read.  After a
    whole epoch comes the next one.  It reads one batch ahead of the loop, and
    its own state, not that of the data set, is the position of the loop.

    Args:
        data: data set, which begins with the step of a loaded state.
        collate: makes a batch for the loop of ``(features, labels)``; None
            for these.
        from_start: True for all steps of an epoch, also with a loaded state,
            for loops that skip those that were taken.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        data: FeatureDataset,
        collate: Callable[[LabelledBatch], Any] | None = None,
        *,
        from_start: bool = False,
    ) -> None:
        check_types({"data": (FeatureDataset,)}, {"data": data})
        self._data = data
        super().__init__(
            _Batches(data),
            batch_sampler=_Steps(data, from_start),
            collate_fn=collate or tuple,
            # accelerate would take samples from the last batch of ranks.
            _drop_last=True,
        )
        self.set_epoch(data.epoch)

    def __iter__(self) -> Iterator[Any]:
        first = self._data.first_step + 1
        for self._step, batch in enumerate(super().__iter__(), first):
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that is delivered next."""
        super().set_epoch(epoch)
        self._step = self._data.first_step

    def state_dict(self) -> dict[str, Any]:
        """Position of the loop, as :meth:`.FeatureDataset.state_dict`."""
        return self._data.state_dict(self._step % len(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues as :meth:`.FeatureDataset.load_state_dict`."""
        self._data.load_state_dict(state)
        self.set_epoch(self._data.epoch)

    @property
    def iteration(self) -> int:
        """The epoch that is delivered next."""
        return self._data.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        """Does nothing: a pass sets the next epoch at its end."""


class _Batches(Dataset[LabelledBatch]):
    """A data set whose items are read by functions, of :class:`_Steps`."""

    def __init__(self, data: FeatureDataset) -> None:
        self.set_epoch, self._num_samples = data.set_epoch, data.num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitems__(self, read: Callable[[], LabelledBatch]) -> LabelledBatch:
        return read()


class _Steps:
    """Yields a function that reads the batch, for each step of an epoch."""

    even_batches = False

    def __init__(self, data: FeatureDataset, from_start: bool) -> None:
        self._data, self._from_start = data, from_start
        self.batch_size = data.batch_size

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Callable[[], LabelledBatch]]:
        data = self._data
        batches: Iterator[LabelledBatch] | None = None

        def read(step: int) -> LabelledBatch:
            nonlocal batches
            if batches is None:
                if data.is_training and step != data.first_step:
                    data.load_state_dict(data.state_dict(step))
                skipped = 0 if data.is_training else step
                batches = islice(data, skipped, None)
            return next(batches)

        first = 0 if self._from_start else data.first_step
        for step in range(first, len(data)):
            yield partial(read, step)
        # The pass ends, and the next one is another epoch.
        next(batches or iter(()), None)
        if data.is_training:
            data.set_epoch(data.epoch + 1)
