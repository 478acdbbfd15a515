"""Writes and reads the weights member, in safetensors format.

Neither copies the weights.  The bytes are those that the safetensors library
writes; tensors that are read are views of the package's bytes, which may be a
mapped file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from hapi_protocol.errors import PackageError
from hapi_splitter.package.strict_json import parse_json

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "I64": torch.int64,
        "F32": torch.float32,
        "I32": torch.int32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""By the names of the format, in the order in which its library writes."""
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 16 << 20
_MAX_DIMS = 8


class WeightsFile:
    """A safetensors file in pieces; equal tensors give equal bytes.

    Only tensors that are not contiguous, or not on the CPU, are copied, one
    at a time.

    Args:
        weights: by id, with dtypes that a package can hold.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor]) -> None:
        names = {dtype: name for name, dtype in _DTYPES.items()}
        order = list(_DTYPES)
        self._weights = dict(
            sorted(
                ((str(node), weight) for node, weight in weights.items()),
                key=lambda each: (order.index(names[each[1].dtype]), each[0]),
            )
        )
        header, end = {}, 0
        for name, weight in self._weights.items():
            start, end = end, end + weight.nbytes
            header[name] = {
                "dtype": names[weight.dtype],
                "shape": list(weight.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        yield from map(tensor_bytes, self._weights.values())


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor's elements in order of its indices."""
    values = tensor.detach().cpu().contiguous().flatten()
    return values.view(torch.uint8).numpy().data


def read_weights(data: memoryview, count: int) -> dict[int, torch.Tensor]:
    """Returns weights 1 to ``count`` as views of ``data``.

    Args:
        data: writable; must not change while the tensors are in use.
        count: number of the program's weights.

    Raises:
        PackageError: naming the tensor and its fault.
    """
    header, body = _split(data)
    if set(header) != {str(node) for node in range(1, count + 1)}:
        raise _error(f"tensors must be named 1 to {count}, each once")
    tensors: dict[int, torch.Tensor] = {}
    spans = []
    for name, entry in header.items():
        dtype, shape, start, end = _read_entry(name, entry)
        if end > len(body):
            raise _error(f"tensor {name} ends after the file")
        spans.append((start, end))
        tensors[int(name)] = _view(name, body[start:end], dtype, shape)
    _check_spans(sorted(spans), len(body))
    return tensors


def _split(data: memoryview) -> tuple[dict[str, Any], memoryview]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise _error(f"its header has an invalid length, {length} bytes")
    header = parse_json(
        bytes(data[8 : 8 + length]), "weights.safetensors", _MAX_HEADER_BYTES
    )
    if not isinstance(header, dict):
        raise _error("its header is not an object")
    return header, data[8 + length :]


def _read_entry(
    name: str, entry: Any
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    fields = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != fields:
        raise _error(f"tensor {name} must have {sorted(fields)}")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _error(f"tensor {name} has the unsupported dtype {dtype!r:.40}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise _error(f"tensor {name} has the invalid shape {shape!r:.80}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _error(f"tensor {name} has invalid offsets {offsets!r:.80}")
    start, end = offsets
    if math.prod(shape) * _DTYPES[dtype].itemsize != end - start:
        raise _error(f"tensor {name}: shape and offsets do not match")
    return _DTYPES[dtype], tuple(shape), start, end


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 48 for value in values
    )


def _view(
    name: str, data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    if (
        dtype == torch.bool
        and torch.frombuffer(data, dtype=torch.uint8).gt(1).any()
    ):
        raise _error(f"tensor {name} has a bool that is neither 0 nor 1")
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _check_spans(spans: list[tuple[int, int]], length: int) -> None:
    position = 0
    for start, end in spans:
        if start != position:
            raise _error("its tensors overlap or leave gaps")
        position = end
    if position != length:
        raise _error("bytes after its last tensor")


def _error(message: str) -> PackageError:
    return PackageError("bad_package", f"weights.safetensors: {message}")
