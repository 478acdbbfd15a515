"""Sends the state of a run to workers that have just joined."""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from hapi_protocol.errors import ClientError


def saved(state: Mapping[str, Any]) -> bytes:
    """Returns the content of objects with ``state_dict``, and of values.

    Raises:
        ClientError: ``bad_configuration`` naming a value that
            ``torch.load(weights_only=True)`` refuses.
    """
    content = {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in state.items()
    }
    try:
        data = _dumped(content)
        _loaded(data)
    except Exception as error:  # of pickle, torch or a value's own methods
        refused = _refused(content)
        if not refused:
            raise
        raise ClientError(
            "bad_configuration",
            f"the state of steps() cannot be sent, for {refused}; "
            "give objects with state_dict, tensors, numbers, texts, and lists "
            "and mappings of them",
        ) from error
    return data


def load(state: MutableMapping[str, Any], content: bytes) -> None:
    """Gives objects and values the content of another worker.

    Raises:
        ClientError: ``bad_configuration`` for other names.
    """
    values = _loaded(content)
    if values.keys() != state.keys():
        raise ClientError(
            "bad_configuration",
            f"the state of steps() has {sorted(state)}, but that of the other "
            f"workers has {sorted(values)}; give the same names",
        )
    for name, value in values.items():
        if hasattr(state[name], "load_state_dict"):
            state[name].load_state_dict(value)
        else:
            state[name] = value


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


def _dumped(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    file = io.BytesIO(data)
    return torch.load(file, map_location="cpu", weights_only=True)


def _refused(content: Mapping[str, Any]) -> str:
    """Names the values that cannot be sent, whatever they raise."""
    refused = []
    for name, value in content.items():
        try:
            _loaded(_dumped(value))
        except Exception:
            refused.append(f"{name!r} of type {type(value).__name__}")
    return " and ".join(refused)
