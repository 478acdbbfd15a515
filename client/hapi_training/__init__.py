"""Training on top of ``hapi_client``: virtual nodes and checkpoints.

::

    from hapi_training import CheckpointManager, VirtualNodes

The names below are imported on first use, so that ``import hapi_training``
stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hapi_training.checkpoints.manager import CheckpointManager
    from hapi_training.checkpoints.sharded import (
        SwiftStorageReader,
        SwiftStorageWriter,
    )
    from hapi_training.checkpoints.uploads import CheckpointStats
    from hapi_training.partial_backward import PartialBackward
    from hapi_training.turns import DeviceQueue
    from hapi_training.virtual_nodes.step import Step
    from hapi_training.virtual_nodes.virtual_nodes import VirtualNodes

__all__ = [
    "CheckpointManager",
    "CheckpointStats",
    "DeviceQueue",
    "PartialBackward",
    "Step",
    "SwiftStorageReader",
    "SwiftStorageWriter",
    "VirtualNodes",
]

_HOMES = {
    "CheckpointManager": "hapi_training.checkpoints.manager",
    "CheckpointStats": "hapi_training.checkpoints.uploads",
    "DeviceQueue": "hapi_training.turns",
    "PartialBackward": "hapi_training.partial_backward",
    "SwiftStorageReader": "hapi_training.checkpoints.sharded",
    "SwiftStorageWriter": "hapi_training.checkpoints.sharded",
    "Step": "hapi_training.virtual_nodes.step",
    "VirtualNodes": "hapi_training.virtual_nodes.virtual_nodes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
