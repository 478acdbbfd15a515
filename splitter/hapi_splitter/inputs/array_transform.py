"""Samples that are NumPy arrays: audio features, token ids.

A model takes arrays of one shape, as float32 or int64; stored they may be
narrower. NumPy reads the header, of bounded length, and nothing is unpickled.
What the header states is compared with what the model takes, and with the
bytes that there are, before anything is allocated.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from hapi_protocol.shards import ARRAY, Medium
from hapi_splitter.inputs.image_decode import SampleError

MAX_DIMS = 5
MAX_SIDE = 1 << 20
MAX_BYTES = 1 << 30
"""Of one array, as the model takes it."""
MAX_HEADER_BYTES = 1024
"""NumPy writes 118 for arrays of numbers."""

STORED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "float32": ("float32", "float16", "int16", "int8", "uint16", "uint8"),
        "int64": (
            *("int64", "int32", "int16", "int8"),
            *("uint32", "uint16", "uint8"),
        ),
    }
)
"""What arrays may be stored as: all of whose values the other can hold."""

_FORMAT_START = 8
_READERS: Mapping[tuple[int, int], tuple[int, Callable[..., Any]]] = (
    MappingProxyType(
        {
            (1, 0): (2, np.lib.format.read_array_header_1_0),
            (2, 0): (4, np.lib.format.read_array_header_2_0),
        }
    )
)
"""Of each version: bytes of the header's length, and what reads it."""


@dataclass(frozen=True, slots=True)
class ArrayTransform:
    """Arrays of one shape and dtype, as they are stored (``.npy``).

    ::

        ArrayTransform((1, 64, 100))  # log-mel features, float32
        ArrayTransform((128,), dtype="int64")  # token ids

    Args:
        shape: of one array, up to five sizes.
        dtype: ``float32`` or ``int64``; see :data:`STORED` for what may be
            stored in their place.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        fine = (
            isinstance(self.shape, tuple)
            and 1 <= len(self.shape) <= MAX_DIMS
            and all(type(s) is int and 1 <= s <= MAX_SIDE for s in self.shape)
        )
        if not fine:
            raise ValueError(
                f"shape must be a tuple of 1 to {MAX_DIMS} whole numbers from "
                f"1 to {MAX_SIDE}, not {self.shape!r:.80}"
            )
        if not isinstance(self.dtype, str) or self.dtype not in STORED:
            raise ValueError(
                f"dtype must be one of {', '.join(STORED)}, not "
                f"{self.dtype!r:.80}"
            )
        if self.num_bytes > MAX_BYTES:
            raise ValueError(
                f"arrays of shape {self.shape} as {self.dtype} take "
                f"{self.num_bytes} bytes each; at most {MAX_BYTES}"
            )

    @property
    def medium(self) -> Medium:
        """How samples are stored."""
        return ARRAY

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.shape

    @property
    def output_dtype(self) -> torch.dtype:
        """Likewise."""
        return {"float32": torch.float32, "int64": torch.int64}[self.dtype]

    @property
    def augmentation(self) -> None:
        """Nothing is random about arrays."""
        return None

    @property
    def num_bytes(self) -> int:
        """Of one sample."""
        return math.prod(self.shape) * self.output_dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, document: Any) -> ArrayTransform:
        """Reads what :meth:`to_json` wrote, from anybody.

        Raises:
            ValueError: naming the field that is wrong, missing or unknown.
        """
        if not isinstance(document, dict):
            raise ValueError(f"a transform is an object, not {document!r:.80}")
        if set(document) != {"shape", "dtype"}:
            raise ValueError(
                "a transform of arrays has the fields shape and dtype, not "
                f"{sorted(map(str, document))!r:.200}"
            )
        shape = document["shape"]
        if not isinstance(shape, list):
            raise ValueError(f"shape must be a list, not {shape!r:.80}")
        return cls(tuple(shape), document["dtype"])

    def read(
        self, data: bytes, limits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """From the bytes of a ``.npy`` file to a sample.

        Fortran's order becomes C's; values, NaN among them, stay.

        Args:
            data: all of them.
            limits: of whole numbers that a model looks up, as of
                :func:`hapi_splitter.graph.index_bounds.id_limits`; None for
                any.

        Raises:
            SampleError: naming what was found and what is expected.
        """
        found = _read_header(data)
        self._check(found, len(data))
        count = math.prod(self.shape)
        values = np.frombuffer(data, found.dtype, count, found.offset)
        ordered = values.reshape(self.shape, order=found.order)
        sample = torch.from_numpy(ordered.astype(self.dtype, order="C"))
        if limits is not None:
            _check_ids(sample, limits)
        return sample

    def _check(self, found: _Header, num_bytes: int) -> None:
        stored = STORED[self.dtype]
        if found.dtype.name not in stored:
            raise SampleError(
                f"an array of {found.dtype.name:.80}; the model takes "
                f"{self.dtype}, for which may be stored: {', '.join(stored)}"
            )
        if found.shape != self.shape:
            raise SampleError(
                f"an array of shape {found.shape!r:.200}; the model takes "
                f"{self.shape}"
            )
        expected = math.prod(self.shape) * found.dtype.itemsize
        values = num_bytes - found.offset
        if values != expected:
            what = "truncated" if values < expected else "damaged"
            raise SampleError(
                f"{what} .npy: {values} bytes of values, and {self.shape} of "
                f"{found.dtype.name} are {expected}"
            )


def array_file(array: np.ndarray[Any, Any]) -> bytes:
    """What NumPy would save."""
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=False)
    return sink.getvalue()


@dataclass(frozen=True)
class _Header:
    """What an array says of itself.

    Attributes:
        offset: where its values begin.
    """

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]
    offset: int

    @property
    def order(self) -> Any:
        return "F" if self.is_fortran else "C"


def _read_header(data: bytes) -> _Header:
    start = io.BytesIO(data[: _FORMAT_START + 4 + MAX_HEADER_BYTES])
    try:
        version = np.lib.format.read_magic(start)
    except ValueError as error:
        raise SampleError("not a NumPy array (.npy)") from error
    if version not in _READERS:
        raise SampleError(
            f"a .npy of format {version[0]}.{version[1]}; 1.0 and 2.0 are "
            "read, which NumPy writes for arrays of numbers"
        )
    length_bytes, read = _READERS[version]
    first = _FORMAT_START + length_bytes
    length = int.from_bytes(data[_FORMAT_START:first], "little")
    if length > MAX_HEADER_BYTES:
        raise SampleError(
            f"a .npy header of {length} bytes; at most {MAX_HEADER_BYTES}"
        )
    offset = first + length
    if len(data) < offset:
        raise SampleError("truncated .npy: it ends in its header")
    if b"L" in data[first:offset]:
        # NumPy warns of these; that must not depend on a process's filters.
        raise SampleError("a .npy header of Python 2; save the array anew")
    try:
        shape, is_fortran, dtype = read(
            start, max_header_size=MAX_HEADER_BYTES
        )
    except Exception as error:  # its parser raises whatever a text made fail
        raise SampleError("damaged .npy: unreadable header") from error
    return _Header(shape, is_fortran, dtype, offset)


def _check_ids(sample: torch.Tensor, limits: torch.Tensor) -> None:
    bad = (limits > 0) & ((sample < 0) | (sample >= limits))
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise SampleError(
            f"the id {int(sample[place])} at {list(place)}; there the model "
            f"has the ids 0 to {int(limits[place]) - 1}"
        )
