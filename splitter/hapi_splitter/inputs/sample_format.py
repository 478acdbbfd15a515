"""The format of a model's input samples: transformed images or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.named_arrays import NamedArrays

InputTransform: TypeAlias = ImageTransform | ArrayTransform
"""A transform from stored bytes to a sample."""


@dataclass(frozen=True, slots=True)
class SampleForm:
    """Shape and dtype of one sample, without the batch dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls, transform: InputTransform | None, shape: Sequence[int]
    ) -> SampleForm:
        """Returns the transform's output format.

        Args:
            transform: None means float32 samples of ``shape``.
            shape: used only without a transform.
        """
        if transform is None:
            return cls(tuple(shape))
        return cls(transform.output_shape, transform.output_dtype)

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def examples(
        self, count: int, limits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns reproducible samples ``[count, *shape]`` on the CPU.

        Args:
            count: number of samples.
            limits: exclusive upper bounds of ids, from
                :func:`hapi_splitter.graph.index_bounds.id_limits`.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (count, *self.shape)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator)
        ids = torch.randint(1 << 31, shape, generator=generator)
        if limits is None:
            return ids % 2
        return ids % torch.where(limits > 0, limits, 2)

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        """Returns ``[count, *shape]``; 0 is a valid id of any embedding."""
        return torch.zeros(
            (count, *self.shape), dtype=self.dtype, device=device
        )


def transform_from_json(document: Any) -> InputTransform:
    """Parses the output of a transform's ``to_json``; may be untrusted.

    Raises:
        ValueError: naming the field that is wrong, missing or unknown.
    """
    if isinstance(document, dict) and "arrays" in document:
        return NamedArrays.from_json(document)
    if isinstance(document, dict) and "shape" in document:
        return ArrayTransform.from_json(document)
    return ImageTransform.from_json(document)
