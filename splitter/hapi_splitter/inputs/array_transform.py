"""Reads samples that are NumPy arrays, such as audio features or token ids.

A model takes arrays of one shape, as float32 or int64; files may store
narrower types. NumPy parses the header, whose length is bounded, and nothing
is unpickled. The header is checked against the transform and the file's length
before anything is allocated.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from hapi_protocol.json_messages import strict_fields
from hapi_protocol.samples import ARRAY, Medium, SampleError

MAX_DIMS = 5
MAX_SIDE = 1 << 20
MAX_BYTES = 1 << 30
"""Largest array, in the dtype that the model takes."""
MAX_HEADER_BYTES = 1024
"""Longest header. NumPy writes 118 bytes for arrays of numbers."""

STORABLE_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "float32": ("float32", "float16", "int16", "int8", "uint16", "uint8"),
        "int64": (
            *("int64", "int32", "int16", "int8"),
            *("uint32", "uint16", "uint8"),
        ),
    }
)
"""Stored dtypes that convert without loss, by the model's dtype."""

_FORMAT_START = 8
_READERS: Mapping[tuple[int, int], tuple[int, Callable[..., Any]]] = (
    MappingProxyType(
        {
            (1, 0): (2, np.lib.format.read_array_header_1_0),
            (2, 0): (4, np.lib.format.read_array_header_2_0),
        }
    )
)
"""Size of the length field and header parser, by version of the format."""


@dataclass(frozen=True, slots=True)
class ArrayTransform:
    """The input transform of ``.npy`` samples of one shape and dtype.

    ::

        ArrayTransform((1, 64, 100))  # log-mel features, float32
        ArrayTransform((128,), dtype="int64")  # token ids

    Args:
        shape: shape of one array, up to five sizes.
        dtype: ``float32`` or ``int64``; :data:`STORABLE_DTYPES` lists the
            dtypes that files may have.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        is_valid = (
            isinstance(self.shape, tuple)
            and 1 <= len(self.shape) <= MAX_DIMS
            and all(type(s) is int and 1 <= s <= MAX_SIDE for s in self.shape)
        )
        if not is_valid:
            raise ValueError(
                f"shape must be a tuple of 1 to {MAX_DIMS} whole numbers from "
                f"1 to {MAX_SIDE}, not {self.shape!r:.80}"
            )
        if (
            not isinstance(self.dtype, str)
            or self.dtype not in STORABLE_DTYPES
        ):
            raise ValueError(
                f"dtype must be one of {', '.join(STORABLE_DTYPES)}, not "
                f"{self.dtype!r:.80}"
            )
        if self.num_bytes > MAX_BYTES:
            raise ValueError(
                f"arrays of shape {self.shape} as {self.dtype} take "
                f"{self.num_bytes} bytes each; at most {MAX_BYTES}"
            )

    @property
    def medium(self) -> Medium:
        """Returns the storage medium of the samples, arrays."""
        return ARRAY

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.shape

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of one sample."""
        return {"float32": torch.float32, "int64": torch.int64}[self.dtype]

    @property
    def augmentation(self) -> None:
        """None, because arrays are not augmented."""
        return None

    @property
    def num_bytes(self) -> int:
        """Size of one sample in the model's dtype."""
        return math.prod(self.shape) * self.output_dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, document: Any) -> ArrayTransform:
        """Parses the output of :meth:`to_json`, which may be untrusted.

        Raises:
            ValueError: naming the field that is wrong, missing or unknown.
        """
        return cls(**strict_fields(cls, document))

    def read(
        self, data: bytes, limits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts the content of a ``.npy`` file to a sample.

        Fortran order becomes C order; all values, NaN included, are kept.

        Args:
            data: the whole file.
            limits: exclusive upper bounds of ids, from
                :func:`hapi_splitter.graph.index_bounds.id_limits`; None
                allows any value.

        Raises:
            SampleError: naming what was found and what is expected.
        """
        header = _read_header(data)
        self._check(header, len(data))
        count = math.prod(self.shape)
        values = np.frombuffer(data, header.dtype, count, header.offset)
        ordered = values.reshape(self.shape, order=header.order)
        sample = torch.from_numpy(ordered.astype(self.dtype, order="C"))
        if limits is not None:
            check_ids(sample, limits)
        return sample

    def encode(self, sample: torch.Tensor) -> bytes:
        """Returns a sample as the content of a ``.npy`` file."""
        sink = io.BytesIO()
        np.save(sink, sample.numpy(), allow_pickle=False)
        return sink.getvalue()

    def _check(self, header: _Header, num_bytes: int) -> None:
        storable = STORABLE_DTYPES[self.dtype]
        dtype = header.dtype.name
        if dtype not in storable:
            raise SampleError(
                f"an array of {dtype:.80}; the model takes {self.dtype}, "
                f"which may be stored as {', '.join(storable)}"
            )
        if header.shape != self.shape:
            raise SampleError(
                f"an array of shape {header.shape!r:.200}; the model takes "
                f"{self.shape}"
            )
        expected = math.prod(self.shape) * header.dtype.itemsize
        actual = num_bytes - header.offset
        if actual != expected:
            fault = "truncated" if actual < expected else "damaged"
            raise SampleError(
                f"{fault} .npy: {actual} bytes of values, expected {expected} "
                f"for {self.shape} of {dtype}"
            )


@dataclass(frozen=True)
class _Header:
    """A parsed ``.npy`` header.

    Attributes:
        order: order of the values, as NumPy names it.
        offset: position of the first value in the file.
    """

    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype[Any]
    offset: int


def _read_header(data: bytes) -> _Header:
    start = io.BytesIO(data[: _FORMAT_START + 4 + MAX_HEADER_BYTES])
    try:
        version = np.lib.format.read_magic(start)
    except ValueError as error:
        raise SampleError("not a NumPy array (.npy)") from error
    if version not in _READERS:
        raise SampleError(
            f"a .npy of format {version[0]}.{version[1]}; supported are 1.0 "
            "and 2.0, which NumPy writes for arrays of numbers"
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
        raise SampleError("truncated .npy: the header is incomplete")
    if b"L" in data[first:offset]:
        # NumPy warns here; the result must not depend on warning filters.
        raise SampleError("a .npy header of Python 2; save the array again")
    begin = start.tell()
    try:
        try:
            parsed = read(start, max_header_size=MAX_HEADER_BYTES)
        except SystemError:
            # Python's parser of literals may fail in threads (CPython issue
            # 106905); it does not fail again.
            start.seek(begin)
            parsed = read(start, max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # NumPy's parser raises many types
        raise SampleError("damaged .npy: unreadable header") from error
    shape, is_fortran, dtype = parsed
    return _Header(shape, "F" if is_fortran else "C", dtype, offset)


def check_ids(sample: torch.Tensor, limits: torch.Tensor) -> None:
    """Checks the ids of a sample.

    Raises:
        SampleError: naming the id, its position and what is allowed.
    """
    bad = (limits > 0) & ((sample < 0) | (sample >= limits))
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise SampleError(
            f"the id {int(sample[place])} at {list(place)}; the model accepts "
            f"ids from 0 to {int(limits[place]) - 1} there"
        )
