"""The state of a run, for other workers and for checkpoints."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, MutableMapping
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
        name: value.state_dict() if _is_object(value) else value
        for name, value in state.items()
    }
    try:
        loaded(dumped(_small(content)))
    except Exception as error:  # of pickle, torch or a value's own methods
        leaves = [(keystr(p), v) for p, v in tree_leaves_with_path(content)]
        # Of a container that is refused, all leaves may be good.
        refused = _refused(leaves) or _refused(content.items())
        if not refused:
            raise
        raise ClientError(
            "bad_configuration",
            f"{what} cannot be loaded again, for {' and '.join(refused[:5])}; "
            "give objects with state_dict and load_state_dict, dense tensors, "
            "numbers, texts, and lists and dicts of them",
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


def _is_object(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _small(content: Any) -> Any:
    """Returns a content with one tensor of each type, and without bytes.

    Thousands of tensors would take seconds.
    """
    known: dict[type, torch.Tensor] = {}

    def small(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_nested:
            raise TypeError("it is sparse or nested")
        if type(tensor) not in known:
            known[type(tensor)] = tensor.new_empty(0)
        return known[type(tensor)]

    return tree_map_only(torch.Tensor, small, content)


def _refused(values: Iterable[tuple[str, Any]]) -> list[str]:
    return [
        f"{path} of type {type(value).__name__}"
        for path, value in values
        if not _is_loadable(value)
    ]


def _is_loadable(value: Any) -> bool:
    try:
        loaded(dumped(_small(value)))
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
