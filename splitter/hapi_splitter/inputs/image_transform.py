"""The input transform of models that take images.

It follows torchvision's classification preset. By default bytes are resized
with integers, as in Pillow, which gives the pixels that most training sees, on
every processor. With floats the result equals ``weights.transforms()`` of a
tensor bit for bit.

torchvision takes seconds to import and is imported inside functions: a process
that only validates packages does not need it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate, pad

from hapi_protocol.shards import IMAGE, Medium
from hapi_protocol.transforms import Training
from hapi_splitter.inputs.augmentation import MAX_AUGMENTED_SIDE, Augmentation
from hapi_splitter.inputs.image_decode import SampleError

MAX_RESIZED_PIXELS = 1 << 26
"""Most pixels after a resize, whose size grows with the aspect ratio."""

MAX_SIDE = 4096
"""Largest ``resize_size`` and ``crop_size``."""

MAX_BYTE = 255

_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic")
_ANTIALIASED = ("bilinear", "bicubic")
_OPTIONAL = frozenset({"augmentation", "integer_resize"})
"""Fields that JSON omits: ``augmentation`` if None, ``integer_resize`` if
False."""


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """torchvision's classification preset as plain values.

    Args:
        resize_size: pixels of the shorter side after the resize.
        crop_size: pixels of both sides of the central crop.
        mean: of each channel, subtracted from values in 0 to 1.
        std: of each channel, divided by.
        interpolation: ``nearest``, ``nearest-exact``, ``bilinear`` or
            ``bicubic``.
        antialias: of the resize.
        augmentation: random augmentation of training images; None for none.
        integer_resize: True to resize bytes with integers, as Pillow and
            torchvision's v2 do: the same on every processor, and on
            photographs one value in 500 differs from Pillow, by 1 of 255.
            False to resize with floats, as torchvision's presets do for
            tensors: several times slower, one value in six differs.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    resize_size: int
    crop_size: int
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"
    antialias: bool = True
    augmentation: Augmentation | None = None
    integer_resize: bool = True

    def __post_init__(self) -> None:
        for name in ("resize_size", "crop_size"):
            side = getattr(self, name)
            if type(side) is not int or not 1 <= side <= MAX_SIDE:
                raise ValueError(
                    f"{name} must be 1 to {MAX_SIDE} pixels, not {side!r}"
                )
        for name in ("mean", "std"):
            _check_channels(name, getattr(self, name))
        if not np.asarray(self.std, np.float32).all():
            raise ValueError(f"std must not be zero, it is {self.std}")
        if self.interpolation not in _INTERPOLATIONS:
            raise ValueError(
                f"interpolation must be one of {', '.join(_INTERPOLATIONS)}, "
                f"not {self.interpolation!r:.80}"
            )
        for name in ("antialias", "integer_resize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name} must be true or false, not"
                    f" {getattr(self, name)!r:.80}"
                )
        if self.augmentation and self.crop_size > MAX_AUGMENTED_SIDE:
            raise ValueError(
                f"crop_size must be 1 to {MAX_AUGMENTED_SIDE} pixels with an "
                f"augmentation, not {self.crop_size}"
            )

    @classmethod
    def from_preset(cls, preset: Any) -> ImageTransform:
        """Converts a transform of torchvision.

        Args:
            preset: ``weights.transforms()``, that function itself, or a
                ``Compose`` of ``Resize``, ``CenterCrop``, ``ToTensor`` (or an
                equivalent) and ``Normalize`` in that order.

        Raises:
            TypeError: for anything else, naming it and the remedy.
        """
        from torchvision.transforms._presets import ImageClassification

        from hapi_splitter.inputs import torchvision_compose

        if torchvision_compose.is_composition(preset):
            return cls(**torchvision_compose.transform_fields(preset))
        if isinstance(preset, functools.partial | FunctionType):
            preset = preset()
        if not isinstance(preset, ImageClassification):
            raise TypeError(
                f"a transform of type {type(preset).__name__} is not "
                f"supported; {torchvision_compose.REMEDY}"
            )
        return cls(
            resize_size=_single(preset.resize_size, "resize_size"),
            crop_size=_single(preset.crop_size, "crop_size"),
            mean=tuple(preset.mean),
            std=tuple(preset.std),
            interpolation=preset.interpolation.value,
            antialias=bool(preset.antialias),
        )

    @property
    def medium(self) -> Medium:
        """Returns the storage medium of the samples, images."""
        return IMAGE

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of one sample, ``(3, crop_size, crop_size)``."""
        return (3, self.crop_size, self.crop_size)

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of one sample."""
        return torch.float32

    def to_json(self) -> dict[str, Any]:
        fields = {n: getattr(self, n) for n in self.__dataclass_fields__}
        fields |= {"mean": list(self.mean), "std": list(self.std)}
        if not self.integer_resize:
            del fields["integer_resize"]
        if self.augmentation is None:
            del fields["augmentation"]
        else:
            fields["augmentation"] = self.augmentation.to_json()
        return fields

    @classmethod
    def from_json(cls, document: Any) -> ImageTransform:
        """Parses the output of :meth:`to_json`, which may be untrusted.

        Raises:
            ValueError: naming the field that is wrong, missing or unknown.
        """
        if not isinstance(document, dict):
            raise ValueError(f"a transform is an object, not {document!r:.80}")
        expected = set(cls.__dataclass_fields__)
        if set(document) | _OPTIONAL != expected:
            raise ValueError(
                f"a transform has the fields {sorted(expected)} "
                f"({' and '.join(sorted(_OPTIONAL))} are optional), not "
                f"{sorted(map(str, document))!r:.200}"
            )
        channels = {name: document[name] for name in ("mean", "std")}
        for name, value in channels.items():
            if not isinstance(value, list):
                raise ValueError(f"{name} must be a list, not {value!r:.80}")
            channels[name] = tuple(value)
        fields = {"integer_resize": False} | document | channels
        if "augmentation" in document:
            fields["augmentation"] = Augmentation.from_json(
                document["augmentation"]
            )
        return cls(**fields)

    def sample(
        self, image: torch.Tensor, key: str, training: Training | None
    ) -> torch.Tensor:
        """Converts uint8 ``[3, H, W]`` to float32 ``[3, crop, crop]``.

        Args:
            image: decoded by :func:`decode_image`.
            key: of the sample.
            training: seed and epoch; None for evaluation.

        Raises:
            SampleError: in evaluation, if the resized image is too large.
            ValueError: in training, if there is no augmentation.
        """
        if training is None:
            return self(image)
        pixels = self.training_pixels(image, key, training)
        return self._normalize(pixels.to(torch.float32))

    def training_pixels(
        self, image: torch.Tensor, key: str, training: Training
    ) -> torch.Tensor:
        """Returns augmented pixels, uint8 ``[3, crop, crop]``.

        Raises:
            ValueError: if there is no augmentation.
        """
        if self.augmentation is None:
            raise ValueError("this transform has no augmentation")
        drawn = self.augmentation.draw(training, key, *image.shape[-2:])
        return drawn.apply(
            image, self.crop_size, self.interpolation, self._is_antialiased
        )

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Converts uint8 ``[3, H, W]`` to float32 ``[3, crop, crop]``.

        Raises:
            SampleError: if the resized image would have more than
                :data:`MAX_RESIZED_PIXELS` pixels.
        """
        height, width = image.shape[-2:]
        shorter, longer = sorted((height, width))
        num_pixels = self.resize_size**2 * longer // max(shorter, 1)
        if num_pixels > MAX_RESIZED_PIXELS:
            raise SampleError(
                f"an image of {width}x{height} pixels would be resized to "
                f"{num_pixels} pixels, more than {MAX_RESIZED_PIXELS}"
            )
        if self.integer_resize:
            sides = self._resized_sides(height, width)
            resized = self._resize(image[None], *sides)
            pixels = _center_crop(resized, self.crop_size)
            return self._normalize(pixels[0].to(torch.float32))
        pixels = self._resize_floats(image[None].to(torch.float32))[0].round()
        if self.interpolation == "bicubic":
            pixels.clamp_(0, MAX_BYTE)
        return self._normalize(pixels)

    def _normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        mean, std = _channels(self.mean), _channels(self.std)
        return pixels.div_(MAX_BYTE).sub_(mean).div_(std)

    def _resize_floats(self, pixels: torch.Tensor) -> torch.Tensor:
        """Resizes and crops floats; the result is not yet rounded.

        The preset rounds the whole resized image to bytes before its crop,
        which gives the same values.
        """
        height, width = self._resized_sides(*pixels.shape[-2:])
        if self._is_antialiased and 1 < self.crop_size < width:
            # torch resizes one side after the other as well. Here columns
            # outside the crop are skipped in between. A single column is
            # excluded because torch would take it for a row.
            pixels = self._resize(pixels, pixels.shape[-2], width)
            pixels = _narrow_to_middle(pixels, -1, self.crop_size)
            width = self.crop_size
        resized = self._resize(pixels, height, width)
        return _center_crop(resized, self.crop_size)

    def _resize(
        self, pixels: torch.Tensor, height: int, width: int
    ) -> torch.Tensor:
        if pixels.shape[-2:] == (height, width):
            return pixels
        return interpolate(
            pixels,
            (height, width),
            mode=self.interpolation,
            antialias=self._is_antialiased,
        )

    @property
    def _is_antialiased(self) -> bool:
        return self.antialias and self.interpolation in _ANTIALIASED

    def _resized_sides(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width; rounds the longer side down like
        torchvision."""
        shorter, longer = sorted((height, width))
        side = int(self.resize_size * longer / shorter)
        if height <= width:
            return self.resize_size, side
        return side, self.resize_size


def _center_crop(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """Crops the centre and pads smaller images with zeros like torchvision."""
    pixels = _narrow_to_middle(pixels, -2, size)
    pixels = _narrow_to_middle(pixels, -1, size)
    height, width = (size - side for side in pixels.shape[-2:])
    if not height and not width:
        return pixels
    top, left = height // 2, width // 2
    return pad(pixels, [left, width - left, top, height - top])


def _narrow_to_middle(
    pixels: torch.Tensor, dim: int, size: int
) -> torch.Tensor:
    excess = pixels.shape[dim] - size
    if excess <= 0:
        return pixels
    return pixels.narrow(dim, round(excess / 2), size)


@functools.lru_cache(maxsize=64)
def _channels(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def _single(sizes: Sequence[int], name: str) -> int:
    if len(sizes) != 1:
        raise TypeError(f"{name} must be one number, not {list(sizes)}")
    return sizes[0]


def _check_channels(name: str, values: Any) -> None:
    is_valid = (
        isinstance(values, tuple)
        and len(values) == 3
        and all(type(v) in (int, float) for v in values)
        and all(abs(v) < 1e6 and math.isfinite(v) for v in values)
    )
    if not is_valid:
        raise ValueError(
            f"{name} must be three finite numbers, not {values!r:.80}"
        )
