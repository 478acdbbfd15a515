"""accelerate's loader of features, of which each rank reads its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import Dataset

from hapi_client.job.feature_dataset import FeatureDataset
from hapi_client.loading.loader_plan import LabelledBatch
from hapi_client.option_checks import check_types

_Step: TypeAlias = tuple["_Pass", int]


class FeatureDataLoader(DataLoaderShard):  # type: ignore[misc]  # untyped
    """Batches of a data set, for ``prepare`` and the rest of accelerate.

    ``prepare`` leaves it as it is, since each rank reads its share of every
    batch.  Batches that ``skip_first_batches`` skips are not read.  It reads
    one batch ahead of the loop, so that ``data.state_dict`` needs the number
    of steps that were taken.  After a whole epoch comes the next one.

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
        super().__init__(
            _Batches(data),
            batch_sampler=_Steps(data, from_start),
            collate_fn=collate or tuple,
            # accelerate would take samples from the last batch of ranks.
            _drop_last=True,
        )

    @property
    def iteration(self) -> int:
        """The epoch that is delivered next."""
        return int(self.dataset.data.epoch)

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        """Does nothing: a pass sets the next epoch at its end."""


class _Batches(Dataset[LabelledBatch]):
    """A data set whose items are the batches of a pass, by step."""

    def __init__(self, data: FeatureDataset) -> None:
        self.data = data
        self.set_epoch = data.set_epoch

    def __len__(self) -> int:
        return self.data.num_samples

    def __getitems__(self, step: _Step) -> LabelledBatch:
        return step[0].read(step[1])


class _Steps:
    """Numbers of the steps of an epoch, in place of a sampler's batches."""

    even_batches = False

    def __init__(self, data: FeatureDataset, from_start: bool) -> None:
        self._data, self._from_start = data, from_start
        self.batch_size = data.batch_size

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[_Step]:
        one_pass = _Pass(self._data)
        first = 0 if self._from_start else self._data.first_step
        for step in range(first, len(self)):
            yield one_pass, step
        one_pass.finish()


class _Pass:
    """One pass, which begins with the first step that is read."""

    def __init__(self, data: FeatureDataset) -> None:
        self._data = data
        self._batches: Iterator[LabelledBatch] | None = None

    def read(self, step: int) -> LabelledBatch:
        if self._batches is None:
            data, skipped = self._data, step
            if data.is_training:
                skipped = 0
                if step != data.first_step:
                    data.load_state_dict(data.state_dict(step))
            self._batches = islice(data, skipped, None)
        return next(self._batches)

    def finish(self) -> None:
        """Ends the pass after its last step, and chooses the next epoch."""
        next(self._batches or iter(()), None)
        if self._data.is_training:
            self._data.set_epoch(self._data.epoch + 1)
