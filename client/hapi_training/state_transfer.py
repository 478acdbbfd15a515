"""The state of a run, for other workers and for checkpoints."""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only

from hapi_protocol.errors import ClientError

_LOAD_ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of loading state with missing parts or other shapes."""


def values_of(state: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns the content of objects with ``state_dict``, and of values.

    Args:
        state: objects and values, by name.
        what: the state, for the message.

    Raises:
        ClientError: ``bad_configuration`` naming the values that
            ``torch.load(weights_only=True)`` refuses, by their paths.
    """
    content = {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in state.items()
    }
    # The bytes of tensors do not matter.
    small = tree_map_only(torch.Tensor, lambda t: t.new_empty(0), content)
    try:
        loaded(dumped(small))
    except Exception as error:  # of pickle, torch or a value's own methods
        refused = [
            f"{keystr(path)} of type {type(value).__name__}"
            for path, value in tree_leaves_with_path(small)
            if not _is_loadable(value)
        ]
        if not refused:
            raise
        raise ClientError(
            "bad_configuration",
            f"{what} cannot be loaded again, for {' and '.join(refused[:5])}; "
            "give objects with state_dict, tensors, numbers, texts, and lists "
            "and mappings of them",
        ) from error
    return content


def load_values(
    state: MutableMapping[str, Any], values: Mapping[str, Any], whose: str
) -> None:
    """Gives objects and values the content of another worker or run.

    Args:
        state: objects and values, by name.
        values: what :func:`values_of` has returned.
        whose: the owner of the values, for the message.

    Raises:
        ClientError: ``bad_configuration`` for other names, ``bad_state`` for
            a value that does not fit.
    """
    if values.keys() != state.keys():
        raise ClientError(
            "bad_configuration",
            f"the state has {sorted(state)}, but that of {whose} has "
            f"{sorted(values)}; give the same names",
        )
    for name, value in values.items():
        if not hasattr(state[name], "load_state_dict"):
            state[name] = value
            continue
        try:
            state[name].load_state_dict(value)
        except _LOAD_ERRORS as error:
            raise ClientError(
                "bad_state",
                f"{name!r} of {whose} belongs to another model or release: "
                f"{type(error).__name__}: {error}",
            ) from error


def broadcast(
    content: bytes | None, sender: int, device: torch.device
) -> bytes:
    """Returns the sender's content on all ranks."""
    size = torch.tensor([len(content or b"")], device=device)
    dist.broadcast(size, sender)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if content is not None:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, sender)
    return data.cpu().numpy().tobytes()


def _is_loadable(value: Any) -> bool:
    try:
        loaded(dumped(value))
    except Exception:  # as above
        return False
    return True


def dumped(content: Any) -> bytes:
    """Returns the bytes of ``torch.save``."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    """Returns the content of bytes, on the CPU."""
    file = io.BytesIO(data)
    return torch.load(file, map_location="cpu", weights_only=True)
