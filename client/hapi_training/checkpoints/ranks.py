"""Objects that all ranks exchange; without torch.distributed there is one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hapi_protocol.errors import HapiError, make_error
from hapi_training.membership import reaching_others

Value = TypeVar("Value")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def group_end() -> Callable[[], bool]:
    """Returns a function that is True when today's group has ended.

    Its other ranks then do nothing any more of what was begun in it.
    """
    if not dist.is_initialized():
        return lambda: False
    # Not the group: it would not end before the reference to it.
    group = weakref.ref(dist.group.WORLD)
    return lambda: group() is None or group() is not dist.group.WORLD


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


def together(function: Callable[[], Value]) -> list[Value]:
    """Calls a function on all ranks; if one fails, all of them do.

    Returns:
        What all ranks have returned.

    Raises:
        HapiError: the error of a rank that has failed.
    """
    if size() == 1:
        return [function()]
    value, failure, own = None, None, None
    try:
        value = function()
    except HapiError as error:
        failure = error.code, error.message
    except Exception as error:  # of a user's state: the others must not wait
        own, failure = error, ("bad_state", f"{type(error).__name__}: {error}")
    outcomes = gathered((value, failure))
    if own is not None:
        raise own
    failures = [
        make_error(failure[0], f"rank {number}: {failure[1]}")
        for number, (_, failure) in enumerate(outcomes)
        if failure is not None
    ]
    if failures:
        # A rank is lost to the others because it has failed.
        raise min(failures, key=lambda error: error.code == "worker_lost")
    return [value for value, _ in outcomes]  # type: ignore[misc]


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
