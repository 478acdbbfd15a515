"""What a model takes: transformed images, or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_transform import ImageTransform

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

    def examples(
        self, count: int, limits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[count, *shape]`` on the CPU, the same each time.

        Args:
            count: of samples.
            limits: of whole numbers, as of
                :func:`hapi_splitter.graph.index_bounds.id_limits`.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (count, *self.shape)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator)
        found = torch.randint(1 << 31, shape, generator=generator)
        if limits is None:
            return found % 2
        return found % torch.where(limits > 0, limits, 2)

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
