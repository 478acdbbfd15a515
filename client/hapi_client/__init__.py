"""Features of data in OpenStack Swift, for training jobs.

::

    from hapi_client import FeatureDataset, split_model

The names below are imported on first use, so that ``import hapi_client``
and the command line stay quick: torch is loaded only when it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hapi_client.caching.cache_config import CacheConfig
    from hapi_client.data.label_texts import JsonLabels
    from hapi_client.job.feature_dataset import FeatureDataset
    from hapi_client.job.options import JobConfig, PlanConfig
    from hapi_client.job.transfer_job import TransferJob
    from hapi_client.loading.read_config import ReadConfig
    from hapi_client.model.frozen_region import FrozenRegion, split_model
    from hapi_client.sampling.partition import EpochPartition
    from hapi_client.swift.connection import Connection
    from hapi_client.swift.credentials import Credentials
    from hapi_protocol.errors import HapiError
    from hapi_splitter.inputs.array_transform import ArrayTransform
    from hapi_splitter.inputs.augmentation import Augmentation
    from hapi_splitter.inputs.image_transform import ImageTransform
    from hapi_splitter.inputs.named_arrays import NamedArrays

__all__ = [
    "ArrayTransform",
    "Augmentation",
    "CacheConfig",
    "Connection",
    "Credentials",
    "EpochPartition",
    "FeatureDataset",
    "FrozenRegion",
    "HapiError",
    "ImageTransform",
    "JobConfig",
    "JsonLabels",
    "NamedArrays",
    "PlanConfig",
    "ReadConfig",
    "TransferJob",
    "split_model",
]

_HOMES = {
    "ArrayTransform": "hapi_splitter.inputs.array_transform",
    "Augmentation": "hapi_splitter.inputs.augmentation",
    "CacheConfig": "hapi_client.caching.cache_config",
    "Connection": "hapi_client.swift.connection",
    "Credentials": "hapi_client.swift.credentials",
    "EpochPartition": "hapi_client.sampling.partition",
    "FeatureDataset": "hapi_client.job.feature_dataset",
    "FrozenRegion": "hapi_client.model.frozen_region",
    "HapiError": "hapi_protocol.errors",
    "ImageTransform": "hapi_splitter.inputs.image_transform",
    "JobConfig": "hapi_client.job.options",
    "JsonLabels": "hapi_client.data.label_texts",
    "NamedArrays": "hapi_splitter.inputs.named_arrays",
    "PlanConfig": "hapi_client.job.options",
    "ReadConfig": "hapi_client.loading.read_config",
    "TransferJob": "hapi_client.job.transfer_job",
    "split_model": "hapi_client.model.frozen_region",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
