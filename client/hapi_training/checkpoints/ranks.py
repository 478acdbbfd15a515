"""Objects that all ranks exchange; without torch.distributed there is one."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from hapi_training.membership import reaching_others

Value = TypeVar("Value")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(value: Value) -> list[Value]:
    """Returns the values of all ranks, in their order.

    Raises:
        ClientError: ``worker_lost``.
    """
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    with reaching_others("a checkpoint"):
        dist.all_gather_object(values, value)
    return values


def broadcast(value: Value, sender: int = 0) -> Value:
    """Returns a rank's value on all ranks.

    Raises:
        ClientError: ``worker_lost``.
    """
    if size() == 1:
        return value
    values = [value if rank() == sender else None]
    with reaching_others("a checkpoint"):
        dist.broadcast_object_list(values, sender)
    return values[0]  # type: ignore[return-value]
