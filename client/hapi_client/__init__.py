"""What a training job imports: feature loading from OpenStack Swift.

::

    from hapi_client import TransferJob

The names below are imported on first use, so that ``import hapi_client``
and the command line stay quick: torch is loaded only with the job.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hapi_client.job.transfer_job import TransferJob
    from hapi_client.loading.prefetcher import FetchOptions
    from hapi_client.planning.replanner import ReplanOptions
    from hapi_client.sampling.partition import EpochPartition
    from hapi_client.swift.connection import Connection
    from hapi_client.swift.credentials import Credentials
    from hapi_protocol.errors import HapiError
    from hapi_splitter.inputs.array_transform import ArrayTransform
    from hapi_splitter.inputs.augmentation import Augmentation
    from hapi_splitter.inputs.image_transform import ImageTransform

__all__ = [
    "ArrayTransform",
    "Augmentation",
    "Connection",
    "Credentials",
    "EpochPartition",
    "FetchOptions",
    "HapiError",
    "ImageTransform",
    "ReplanOptions",
    "TransferJob",
]


def __getattr__(name: str) -> Any:
    homes = {
        "ArrayTransform": "hapi_splitter.inputs.array_transform",
        "Augmentation": "hapi_splitter.inputs.augmentation",
        "Connection": "hapi_client.swift.connection",
        "Credentials": "hapi_client.swift.credentials",
        "FetchOptions": "hapi_client.loading.prefetcher",
        "HapiError": "hapi_protocol.errors",
        "ImageTransform": "hapi_splitter.inputs.image_transform",
        "EpochPartition": "hapi_client.sampling.partition",
        "ReplanOptions": "hapi_client.planning.replanner",
        "TransferJob": "hapi_client.job.transfer_job",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no {name!r}")
    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
