"""Reads samples of several arrays, such as token ids and their mask.

A sample is an ``.npz`` archive. Its arrays are joined to one flat tensor, so
that a package has one input; the model gets them back by name.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hapi_protocol.samples import ARCHIVE, Medium, SampleError
from hapi_splitter.inputs.array_transform import (
    MAX_HEADER_BYTES,
    STORABLE_DTYPES,
    ArrayTransform,
    check_ids,
)

MAX_ARRAYS = 16
_END = struct.Struct("<4s4H2IH")
_MAX_DIRECTORY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class NamedArrays(ArrayTransform):
    """The input transform of ``.npz`` samples with arrays of fixed shapes.

    ::

        NamedArrays.of(
            input_ids=ArrayTransform((128,), "int64"),
            attention_mask=ArrayTransform((128,), "int64"),
        )

    The model is called with the arrays as keyword arguments. Other arrays of
    an archive are ignored.

    Args:
        shape: shape of the joined arrays, one size.
        dtype: int64 if all arrays are, else float32.
        arrays: name and transform of each array.

    Raises:
        ValueError: naming the array, its value and what is allowed.
    """

    arrays: tuple[tuple[str, ArrayTransform], ...] = ()

    @classmethod
    def of(cls, **arrays: ArrayTransform) -> NamedArrays:
        """Returns the transform of arrays by the names of arguments."""
        if not 1 <= len(arrays) <= MAX_ARRAYS:
            raise ValueError(
                f"a sample has 1 to {MAX_ARRAYS} arrays, not {len(arrays)}"
            )
        for name, array in arrays.items():
            if type(array) is not ArrayTransform or not name.isidentifier():
                raise ValueError(
                    f"array {name!r:.80} must be the name of an argument and "
                    f"an ArrayTransform, not {array!r:.80}"
                )
        size = sum(math.prod(array.shape) for array in arrays.values())
        is_integer = all(array.dtype == "int64" for array in arrays.values())
        return cls(
            (size,), "int64" if is_integer else "float32", (*arrays.items(),)
        )

    @property
    def medium(self) -> Medium:
        """Returns the storage medium of the samples, archives of arrays."""
        return ARCHIVE

    def to_json(self) -> dict[str, Any]:
        return {
            "arrays": [
                {"name": name, **array.to_json()}
                for name, array in self.arrays
            ]
        }

    @classmethod
    def from_json(cls, document: Any) -> NamedArrays:
        """Parses the output of :meth:`to_json`, which may be untrusted.

        Raises:
            ValueError: naming the field that is wrong, missing or unknown.
        """
        entries = document["arrays"] if set(document) == {"arrays"} else None
        if not isinstance(entries, list):
            raise ValueError(
                "a transform of named arrays has the field arrays, a list, "
                f"not {document!r:.200}"
            )
        arrays: dict[str, ArrayTransform] = {}
        for entry in entries[: MAX_ARRAYS + 1]:
            named = dict(entry) if isinstance(entry, dict) else {}
            name = named.pop("name", None)
            if not isinstance(name, str) or name in arrays:
                raise ValueError(
                    f"each array needs a name of its own, not {entry!r:.80}"
                )
            arrays[name] = ArrayTransform.from_json(named)
        return cls.of(**arrays)

    def read(
        self, data: bytes, limits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts the content of an ``.npz`` file to a sample.

        Args:
            data: the whole file.
            limits: exclusive upper bounds of ids; None allows any value.

        Raises:
            SampleError: naming the array, what was found and what is
                expected.
        """
        files = self._files(data)
        parts = []
        for name, array in self.arrays:
            try:
                parts.append(array.read(files[name]).flatten())
            except SampleError as error:
                raise SampleError(f"array {name!r}: {error}") from None
        sample = torch.cat([part.to(self.output_dtype) for part in parts])
        if limits is not None:
            check_ids(sample, limits)
        return sample

    def _files(self, data: bytes) -> dict[str, bytes]:
        """Returns the content of each array's file, of bounded length."""
        _check_directory(data)
        contents, slack = {}, 2 * MAX_HEADER_BYTES
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for name, array in self.arrays:
                    width = max(
                        np.dtype(stored).itemsize
                        for stored in STORABLE_DTYPES[array.dtype]
                    )
                    limit = math.prod(array.shape) * width
                    with archive.open(f"{name}.npy") as file:
                        contents[name] = file.read(limit + slack)
        except KeyError:
            raise SampleError(
                f"has no array {name!r}; the model takes "
                f"{', '.join(name for name, _ in self.arrays)}"
            ) from None
        except (
            zipfile.BadZipFile,
            zlib.error,
            OSError,
            EOFError,
            NotImplementedError,  # an unknown compression
            RuntimeError,  # encrypted
            ValueError,
        ) as error:
            raise SampleError(f"damaged .npz: {error!s:.200}") from error
        return contents

    def join(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Joins a batch of each array to ``[B, n]``."""
        return torch.cat(
            [
                values[name]
                .reshape(len(values[name]), -1)
                .to(self.output_dtype)
                for name, _ in self.arrays
            ],
            1,
        )

    def separate(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns a batch of each array from the joined ``[B, n]``."""
        sizes = [math.prod(array.shape) for _, array in self.arrays]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return {
            name: samples[:, start : start + size]
            .reshape(samples.shape[0], *array.shape)
            .to(array.output_dtype)
            for (name, array), start, size in zip(
                self.arrays, starts, sizes, strict=True
            )
        }

    def encode(self, sample: torch.Tensor) -> bytes:
        """Returns a joined sample as the content of an ``.npz`` file."""
        sink = io.BytesIO()
        arrays: dict[str, Any] = {
            name: array[0].numpy()
            for name, array in self.separate(sample[None]).items()
        }
        np.savez(sink, **arrays)
        return sink.getvalue()


def _check_directory(data: bytes) -> None:
    """Refuses archives whose directory would take much memory to read."""
    end = _END.unpack(data[-_END.size :]) if len(data) >= _END.size else None
    if end is None or end[0] != b"PK\x05\x06" or end[-1]:
        raise SampleError("not a complete archive of NumPy arrays (.npz)")
    if end[5] > _MAX_DIRECTORY_BYTES or data[-42:-38] == b"PK\x06\x07":
        raise SampleError(
            f"an .npz with a directory of more than {_MAX_DIRECTORY_BYTES} "
            "bytes; store only the arrays that the model takes"
        )
