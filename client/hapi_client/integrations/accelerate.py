"""accelerate's loader of features, of which each rank reads its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    batch.  After a whole epoch comes the next one.  Batches that
    ``skip_first_batches`` skips are not read.

    Args:
        data: data set, which begins with the step of a loaded state.
        collate: makes a batch of ``(features, labels)``; None for these.
        from_start: True to begin with step 0, also with a loaded state, for
            loops that skip steps themselves.
    """

    _is_accelerate_prepared = True
    # A pass chooses the next epoch at its end.
    iteration = property(lambda self: self._data.epoch, lambda *_: None)

    def __init__(
        self,
        data: FeatureDataset,
        collate: Callable[[LabelledBatch], Any] | None = None,
        *,
        from_start: bool = False,
    ) -> None:
        check_types({"data": (FeatureDataset,)}, {"data": data})
        self._data = data
        steps = self._steps = _Steps(data, from_start)
        collate = collate or tuple
        # Without _drop_last, accelerate cuts the last batch of ranks.
        super().__init__(
            _Batches(data),
            batch_sampler=steps,
            collate_fn=collate,
            _drop_last=True,
        )

    def __iter__(self) -> Iterator[Any]:
        """Reads no batch ahead of the loop: the data set has its state."""
        self.begin()
        try:
            first = self._steps.first_step + 1
            for step, batch in enumerate(self.base_dataloader, first):
                self.end_of_dataloader = step == len(self)
                yield batch
        finally:
            self.end()


class _Batches(Dataset[LabelledBatch]):
    """Has as many samples as a data set; functions read its batches."""

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

    @property
    def first_step(self) -> int:
        return 0 if self._from_start else self._data.first_step

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Callable[[], LabelledBatch]]:
        data, is_training = self._data, self._data.is_training
        batches: Iterator[LabelledBatch] | None = None

        def read(step: int) -> LabelledBatch:
            nonlocal batches
            if batches is None:
                if is_training and step != data.first_step:
                    data.load_state_dict(data.state_dict(step))
                batches = islice(data, 0 if is_training else step, None)
            return next(batches)

        for step in range(self.first_step, len(data)):
            yield partial(read, step)
        next(batches or iter(()), None)
        if is_training:
            data.set_epoch(data.epoch + 1)
