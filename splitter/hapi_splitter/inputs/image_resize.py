"""Resizes and crops images as an image transform says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import interpolate

from hapi_protocol.samples import SampleError

if TYPE_CHECKING:
    from hapi_splitter.inputs.image_transform import ImageTransform

MAX_RESIZED_PIXELS = 1 << 26
"""Most pixels after each of the two passes of a resize, first of the width,
then of the height.  They grow with the aspect ratio."""
MAX_BYTE = 255
_ANTIALIASED = ("bilinear", "bicubic", "lanczos")


def is_antialiased(transform: ImageTransform) -> bool:
    """Returns True if a resize smooths."""
    return transform.antialias and transform.interpolation in _ANTIALIASED


class ImageResize:
    """The resize and the central crop of a transform.

    Args:
        transform: says how.
    """

    def __init__(self, transform: ImageTransform) -> None:
        self._transform = transform
        self._rows, self._columns = transform.output_shape[1:]

    def num_bytes(self, height: int, width: int) -> int:
        """Upper bound of the memory of :meth:`pixels` for such an image."""
        sides = self._sides(height, width)
        num_pixels = max(height, sides[0]) * sides[1] + sides[0] * sides[1]
        num_pixels = min(num_pixels, 2 * MAX_RESIZED_PIXELS)
        if self._transform.integer_resize:
            return 3 * num_pixels
        # Floats; the image is converted as a whole.
        return 12 * (height * width + num_pixels)

    def pixels(self, image: torch.Tensor) -> torch.Tensor:
        """Returns whole numbers from 0 to 255, ``[3, *crop]``.

        Args:
            image: uint8 ``[3, H, W]``.

        Returns:
            uint8 of a resize with integers, else float32.

        Raises:
            SampleError: if the resize would need more than
                :data:`MAX_RESIZED_PIXELS` pixels.
        """
        height, width = image.shape[-2:]
        sides = self._sides(height, width)
        num_pixels = max(height, sides[0]) * sides[1]
        if num_pixels > MAX_RESIZED_PIXELS:
            raise SampleError(
                f"an image of {width}x{height} pixels would be resized to "
                f"{sides[1]}x{sides[0]} with {num_pixels} pixels after one "
                f"pass, more than {MAX_RESIZED_PIXELS}"
            )
        if self._transform.integer_resize:
            return self._crop(self._resize(image[None], *sides))[0]
        floats = image[None].to(torch.float32)
        pixels = self._resize_floats(floats, *sides)[0].round()
        if self._transform.interpolation == "bicubic":
            pixels.clamp_(0, MAX_BYTE)
        return pixels

    def _resize_floats(
        self, pixels: torch.Tensor, height: int, width: int
    ) -> torch.Tensor:
        """Resizes and crops floats; the result is not yet rounded.

        The preset rounds the whole resized image to bytes before its crop,
        which gives the same values.
        """
        columns = self._columns
        if is_antialiased(self._transform) and 1 < columns < width:
            # torch resizes one side after the other as well. Here columns
            # outside the crop are skipped in between. A single column is
            # excluded because torch would take it for a row.
            pixels = self._resize(pixels, pixels.shape[-2], width)
            pixels = self._narrow_to_middle(pixels, -1, columns)
            width = columns
        return self._crop(self._resize(pixels, height, width))

    def _resize(
        self, pixels: torch.Tensor, height: int, width: int
    ) -> torch.Tensor:
        if pixels.shape[-2:] == (height, width):
            return pixels
        return interpolate(
            pixels,
            (height, width),
            mode=self._transform.interpolation,
            antialias=is_antialiased(self._transform),
        )

    def _sides(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width after the resize.

        Without ``fit``, the longer side is rounded down like torchvision's.
        """
        size, fit = self._transform.resize_size, self._transform.fit
        target = size if isinstance(size, tuple) else (size, size)
        if fit is not None:
            ratios = (height / target[0], width / target[1])
            ratio = min(ratios) if fit == "cover" else max(ratios)
            return max(round(height / ratio), 1), max(round(width / ratio), 1)
        if isinstance(size, tuple):
            return target
        shorter, longer = sorted((height, width))
        side = int(target[0] * longer / shorter)
        return (target[0], side) if height <= width else (side, target[0])

    def _crop(self, pixels: torch.Tensor) -> torch.Tensor:
        """Crops the centre and adds borders like torchvision.

        Args:
            pixels: ``[1, 3, H, W]``.
        """
        rows, columns = self._rows, self._columns
        pixels = self._narrow_to_middle(pixels, -2, rows)
        pixels = self._narrow_to_middle(pixels, -1, columns)
        height, width = pixels.shape[-2:]
        if (height, width) == (rows, columns):
            return pixels
        colour = torch.tensor(self._transform.fill, dtype=pixels.dtype).view(
            1, 3, 1, 1
        )
        bordered = colour.repeat(1, 1, rows, columns)
        top, left = (rows - height) // 2, (columns - width) // 2
        bordered[..., top : top + height, left : left + width] = pixels
        return bordered

    def _narrow_to_middle(
        self, pixels: torch.Tensor, dim: int, size: int
    ) -> torch.Tensor:
        excess = pixels.shape[dim] - size
        if excess <= 0:
            return pixels
        is_floored = self._transform.floor_crop
        start = excess // 2 if is_floored else round(excess / 2)
        return pixels.narrow(dim, start, size)
