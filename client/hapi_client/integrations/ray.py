"""Features as a data set of Ray Data, read by the tasks of a cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import pyarrow as pa

try:
    import ray
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask
except ImportError as error:
    raise ImportError(
        f"{error}; Ray is needed: pip install 'swift-hapi[client,ray]'"
    ) from error

from hapi_client.data.splits import DataSet
from hapi_client.export.extract import contents_of, record_batches
from hapi_client.export.feature_writers import Contents
from hapi_client.job.feature_dataset import FeatureDataset
from hapi_client.loading.sample_dataset import DatasetConfig, open_factory
from hapi_client.model.split_arguments import AUTO
from hapi_client.option_checks import check_types
from hapi_client.sampling.epochs import ReaderShare
from hapi_client.sampling.sampler import single_batch_plan

logger = logging.getLogger(__name__)


def read_features(data: FeatureDataset, **options: Any) -> ray.data.Dataset:
    """Returns the features of a data set as a data set of Ray.

    Rows have the columns that :func:`.extract` writes, without random
    changes of images.  A task reads some spans with a connection of its own,
    computes what is left on its CPUs, and returns one block.  It uses the
    routes that the plan of ``data`` has at this call, and the credentials in
    its environment, or those of the ``connection`` that ``data`` was given.
    The model is sent to each node once.

    ``data`` may be closed before the rows are read.

    Args:
        data: the data set; its ``on_error`` decides about samples that
            cannot be decoded.
        options: those of ``ray.data.read_datasource``, such as
            ``override_num_blocks`` and ``concurrency``.

    Raises:
        ClientError: ``bad_configuration`` for other ``data``.  Errors of a
            task are both ``RayTaskError`` and the client's, when rows are
            read.
    """
    check_types({"data": (FeatureDataset,)}, {"data": data})
    if data.cut == AUTO and data.plan is None:
        logger.warning(
            "cut='auto' has no plan yet, and tasks of Ray make none: they "
            "read all samples raw; for push-down choose cut='freeze' or a "
            "number"
        )
    return ray.data.read_datasource(_FeatureDatasource(data), **options)


class _FeatureDatasource(Datasource):  # type: ignore[misc]  # untyped
    """Divides the spans of a data set into tasks."""

    def __init__(self, data: FeatureDataset) -> None:
        super().__init__()
        config = data.process_config()
        self._data, is_own = config.data, data.pipeline.data.owns_connection
        self._contents = contents_of(data, self._data, {})
        self._config = ray.put(
            replace(
                config,
                # Each task gets its own part.
                data=DataSet((), ()),
                credentials=None if is_own else config.credentials,
            )
        )

    def estimate_inmemory_data_size(self) -> int:
        return self._contents.feature_bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,
    ) -> list[ReadTask]:
        num_spans = len(self._data.spans)
        num_tasks = max(1, min(parallelism, num_spans))
        ends = [num_spans * n // num_tasks for n in range(num_tasks + 1)]
        return [
            self._task(self._data.part(*bounds), per_task_row_limit)
            for bounds in pairwise(ends)
        ]

    def _task(self, data: DataSet, row_limit: int | None) -> ReadTask:
        contents = replace(self._contents, num_samples=data.num_samples)
        return ReadTask(
            partial(_read, self._config, data, contents),
            # Fewer rows, if samples are skipped.
            BlockMetadata(
                data.num_samples, contents.feature_bytes, None, None
            ),
            contents.schema,
            row_limit,
        )


def _read(
    config: ray.ObjectRef, data: DataSet, contents: Contents
) -> Iterator[pa.Table]:
    """Reads a block, in a task."""
    parts = replace(_loaded(config), data=data)
    rows = [
        (span, row)
        for span, size in enumerate(data.sizes)
        for row in range(size)
    ]
    plan = replace(single_batch_plan(rows), is_whole=False)
    with open_factory(parts) as factory:
        loader = factory.loader(
            data,
            ReaderShare(plan, 1),
            None,
            on_error=parts.read.on_error,
            empty_steps="deliver",
        )
        batches = [*record_batches(loader, data, contents)]
    yield pa.Table.from_batches(batches, contents.schema)


@lru_cache(maxsize=1)
def _loaded(config: ray.ObjectRef) -> DatasetConfig:
    """Loads a model once in a process, as it takes half a second."""
    loaded: DatasetConfig = ray.get(config)
    return loaded
