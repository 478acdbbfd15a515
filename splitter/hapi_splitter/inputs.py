"""What a model takes: transformed images, or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hapi_splitter.arrays import ArrayTransform
from hapi_splitter.transforms import ImageTransform

InputTransform: TypeAlias = ImageTransform | ArrayTransform
"""From what is stored to a sample."""


@dataclass(frozen=True, slots=True)
class SampleForm:
    """Of one sample, without the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls, transform: InputTransform | None, shape: Sequence[int]
    ) -> SampleForm:
        """What a transform yields; without one, float32 of that shape."""
        if transform is None:
            return cls(tuple(shape))
        return cls(transform.output_shape, transform.output_dtype)

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def examples(self, count: int, num_ids: int | None = None) -> torch.Tensor:
        """``[count, *shape]`` on the CPU, the same each time.

        Args:
            count: of samples.
            num_ids: whole numbers are below it.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (count, *self.shape)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator)
        most = 2 if num_ids is None else num_ids
        return torch.randint(most, shape, generator=generator)

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        """``[count, *shape]``; 0 is an id that each embedding has."""
        return torch.zeros(
            (count, *self.shape), dtype=self.dtype, device=device
        )


def transform_from_json(document: Any) -> InputTransform:
    """Reads what a transform's ``to_json`` wrote, from anybody.

    Raises:
        ValueError: naming the field that is wrong, missing or unknown.
    """
    if isinstance(document, dict) and "shape" in document:
        return ArrayTransform.from_json(document)
    return ImageTransform.from_json(document)
