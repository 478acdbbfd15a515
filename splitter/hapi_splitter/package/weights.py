"""Writes and reads the tensors of a safetensors file without a copy.

Tensors that are read are views of the file's bytes, which may be mapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from hapi_protocol.errors import PackageError, bad_package
from hapi_splitter.package.header import (
    MAX_DIMS,
    are_sizes,
    encode_header,
)

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
"""By the names of the format, in the order in which its library writes: the
largest first, so that each tensor is aligned to its own size."""


def file_pieces(
    documents: Mapping[str, Any], weights: Mapping[int, torch.Tensor]
) -> Iterator[bytes | memoryview]:
    """Yields a file in pieces; equal content gives equal bytes.

    Only tensors that are not contiguous, or not on the CPU, are copied, one
    at a time.

    Args:
        documents: content of ``hapi.json`` and ``graph.json``.
        weights: weights by id, with dtypes that a package can hold.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    order = list(_DTYPES.values())
    ordered = sorted(
        weights.items(),
        key=lambda item: (order.index(item[1].dtype), str(item[0])),
    )
    entries, end = {}, 0
    for node, weight in ordered:
        start, end = end, end + weight.nbytes
        entries[str(node)] = {
            "dtype": names[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [start, end],
        }
    yield encode_header(documents, entries)
    for _, weight in ordered:
        yield tensor_bytes(weight)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor's elements in order of its indices."""
    values = tensor.detach().cpu().contiguous().flatten()
    return values.view(torch.uint8).numpy().data


def read_weights(
    entries: Mapping[str, Any], data: memoryview, count: int
) -> dict[int, torch.Tensor]:
    """Returns weights 1 to ``count`` as views of ``data``.

    Args:
        entries: entries of the tensors in the header, not checked.
        data: bytes after the header; writable, and must not change while the
            tensors are in use.
        count: number of the program's weights.

    Raises:
        PackageError: naming the tensor and its fault.
    """
    if set(entries) != {str(node) for node in range(1, count + 1)}:
        raise _error(f"tensors must be named 1 to {count}, each once")
    tensors: dict[int, torch.Tensor] = {}
    spans = []
    for name, entry in entries.items():
        dtype, shape, start, end = _read_entry(name, entry)
        if end > len(data):
            raise _error(f"tensor {name} ends after the file")
        spans.append((start, end))
        tensors[int(name)] = _view(name, data[start:end], dtype, shape)
    _check_spans(sorted(spans), len(data))
    return tensors


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
    if not are_sizes(shape) or len(shape) > MAX_DIMS:
        raise _error(f"tensor {name} has the invalid shape {shape!r:.80}")
    if not are_sizes(offsets) or len(offsets) != 2:
        raise _error(f"tensor {name} has invalid offsets {offsets!r:.80}")
    start, end = offsets
    size_bytes = _DTYPES[dtype].itemsize
    if math.prod(shape) * size_bytes != end - start or start % size_bytes:
        raise _error(f"tensor {name}: shape and offsets do not match")
    return _DTYPES[dtype], tuple(shape), start, end


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
    return bad_package(f"weights of the package: {message}")
