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
    from hapi_client.connection import Connection
    from hapi_client.credentials import Credentials
    from hapi_client.fetch import FetchOptions
    from hapi_client.job import TransferJob
    from hapi_client.order import Lanes
    from hapi_client.replan import ReplanOptions
    from hapi_protocol.errors import HapiError
    from hapi_splitter.arrays import ArrayTransform
    from hapi_splitter.augmentation import Augmentation
    from hapi_splitter.transforms import ImageTransform

__all__ = [
    "ArrayTransform",
    "Augmentation",
    "Connection",
    "Credentials",
    "FetchOptions",
    "HapiError",
    "ImageTransform",
    "Lanes",
    "ReplanOptions",
    "TransferJob",
]


def __getattr__(name: str) -> Any:
    homes = {
        "ArrayTransform": "hapi_splitter.arrays",
        "Augmentation": "hapi_splitter.augmentation",
        "Connection": "hapi_client.connection",
        "Credentials": "hapi_client.credentials",
        "FetchOptions": "hapi_client.fetch",
        "HapiError": "hapi_protocol.errors",
        "ImageTransform": "hapi_splitter.transforms",
        "Lanes": "hapi_client.order",
        "ReplanOptions": "hapi_client.replan",
        "TransferJob": "hapi_client.job",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no {name!r}")
    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
