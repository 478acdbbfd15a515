"""The input transform of models that take images.

It follows torchvision's classification preset, and has the other resizes and
crops of timm, open_clip and Hugging Face transformers. By default bytes are
resized with integers, as in Pillow, which gives the pixels that most training
sees, on every processor. With floats the result equals
``weights.transforms()`` of a tensor bit for bit.

torchvision takes seconds to import and is imported inside functions: a process
that only validates packages does not need it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from hapi_protocol.json_messages import strict_fields
from hapi_protocol.samples import IMAGE, Medium
from hapi_protocol.transforms import Training
from hapi_splitter.inputs.augmentation import MAX_AUGMENTED_SIDE, Augmentation
from hapi_splitter.inputs.image_resize import (
    MAX_BYTE,
    ImageResize,
    is_antialiased,
)

MAX_SIDE = 4096
"""Largest ``resize_size`` and ``crop_size``."""

_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic") + (
    # Older releases of torch have none.
    ("lanczos",) if hasattr(torch.ops.aten, "_upsample_lanczos2d_aa") else ()
)
_MEMBER = re.compile(r"[^./\s][^/\s]{0,255}")
_FITS = (None, "cover", "contain")
_EXIF = ("ignore", "turn")
_OPTIONAL: Mapping[str, Any] = MappingProxyType(
    {
        "augmentation": None,
        "integer_resize": False,
        "fit": None,
        "fill": (0, 0, 0),
        "floor_crop": False,
        "member": None,
        "exif": "ignore",
    }
)
"""Fields that JSON omits if they have these values."""

Size: TypeAlias = int | tuple[int, int]
"""One number of pixels, or height and width."""


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """A resize, a central crop and a normalisation as plain values.

    Args:
        resize_size: pixels of the shorter side after the resize, or height
            and width, to which images are then stretched; see ``fit``.
        crop_size: pixels of both sides of the central crop, or height and
            width.
        mean: mean of each channel, subtracted from values in 0 to 1.
        std: standard deviation of each channel; values are divided by it.
        interpolation: ``nearest``, ``nearest-exact``, ``bilinear``,
            ``bicubic``, or ``lanczos`` if torch has it.
        antialias: True if the resize smooths.
        augmentation: random augmentation of training images; None for none.
        integer_resize: True to resize bytes with integers, as Pillow and
            torchvision's v2 do: the same on every processor, and on
            photographs one value in 500 differs from Pillow, by 1 of 255.
            Images are resized in width first; Pillow from release 13 starts
            with the height where that is faster, so that stretched images
            differ more from it than from earlier ones.
            False to resize with floats, as torchvision's presets do for
            tensors: several times slower, one value in six differs.
        fit: ``cover`` or ``contain`` to keep the aspect ratio: the smallest
            image that covers ``resize_size`` (a square if it is one number),
            or the largest inside it, with sides rounded to the nearest
            pixel.  None to resize the shorter side and round the longer one
            down, or to stretch.
        fill: colour of the borders of images smaller than the crop, three
            bytes.
        floor_crop: True to round the crop's top and left down, as Hugging
            Face's processors do; False to round to even, as torchvision does.
        member: extension of the member that is the image, such as
            ``left.jpg``; None for a sample's only image.
        exif: ``ignore`` the orientation in EXIF data, as ``ImageFolder`` and
            torchvision do, or ``turn`` images as people see them in a browser.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    resize_size: Size
    crop_size: Size
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"
    antialias: bool = True
    augmentation: Augmentation | None = None
    integer_resize: bool = True
    fit: str | None = None
    fill: tuple[int, int, int] = (0, 0, 0)
    floor_crop: bool = False
    member: str | None = None
    exif: str = "ignore"

    def __post_init__(self) -> None:
        for name, is_valid, allowed in _CHECKS:
            value = getattr(self, name)
            if not is_valid(value):
                raise ValueError(
                    f"{name} must be {allowed}, not {value!r:.80}"
                )
        if not np.asarray(self.std, np.float32).all():
            raise ValueError(f"std must not be zero, it is {self.std}")
        if self.interpolation == "lanczos" and not (
            self.antialias and self.integer_resize
        ):
            raise ValueError(
                "interpolation is lanczos, which needs antialias and "
                "integer_resize"
            )
        if self.augmentation and max(self._crop_sides) > MAX_AUGMENTED_SIDE:
            raise ValueError(
                f"crop_size must be 1 to {MAX_AUGMENTED_SIDE} pixels with an "
                f"augmentation, not {self.crop_size}"
            )
        # Equal transforms have equal JSON.
        if len({*self._crop_sides}) == 1:
            object.__setattr__(self, "crop_size", self._crop_sides[0])
        if self.member is not None:
            object.__setattr__(self, "member", self.member.lower())

    @classmethod
    def from_preset(cls, preset: Any) -> ImageTransform:
        """Converts a transform of another library.

        Args:
            preset: torchvision's ``weights.transforms()``, that function
                itself, a ``Compose`` of ``Resize``, ``CenterCrop``,
                ``ToTensor`` (or an equivalent) and ``Normalize`` in that
                order, timm's or open_clip's transform for evaluation, or an
                image processor of Hugging Face transformers.

        Raises:
            TypeError: for anything else, naming it and the remedy.
            ValueError: for a value that no field can have.
        """
        from torchvision.transforms._presets import ImageClassification

        from hapi_splitter.inputs import (
            huggingface_processor,
            torchvision_compose,
        )

        if huggingface_processor.is_processor(preset):
            return cls(**huggingface_processor.transform_fields(preset))
        if torchvision_compose.is_composition(preset):
            return cls(**torchvision_compose.transform_fields(preset))
        if (
            isinstance(preset, functools.partial)
            and preset.func is ImageClassification
        ):
            preset = preset()
        if not isinstance(preset, ImageClassification):
            raise TypeError(
                f"transform is {preset!r:.80}, which is not supported, "
                "because the store does not run a user's code; give a "
                "transform of timm or open_clip for evaluation, an image "
                "processor of Hugging Face, or a Compose: "
                f"{torchvision_compose.REMEDY}"
            )
        return cls(
            resize_size=_size(preset.resize_size),
            crop_size=_size(preset.crop_size),
            mean=tuple(preset.mean),
            std=tuple(preset.std),
            interpolation=preset.interpolation.value,
            antialias=bool(preset.antialias),
        )

    @property
    def medium(self) -> Medium:
        """Returns the storage medium of the samples, images."""
        return replace(IMAGE, member=self.member)

    @property
    def turns(self) -> bool:
        """True if images are turned as their EXIF data say."""
        return self.exif == "turn"

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of one sample, 3 and the crop's height and width."""
        return (3, *self._crop_sides)

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of one sample."""
        return torch.float32

    def to_json(self) -> dict[str, Any]:
        fields = {n: getattr(self, n) for n in self.__dataclass_fields__}
        for name, value in fields.items():
            if isinstance(value, tuple):
                fields[name] = list(value)
        if self.augmentation is not None:
            fields["augmentation"] = self.augmentation.to_json()
        for name, default in _OPTIONAL.items():
            if getattr(self, name) == default:
                del fields[name]
        return fields

    @classmethod
    def from_json(cls, document: Any) -> ImageTransform:
        """Parses the output of :meth:`to_json`, which may be untrusted.

        Raises:
            ValueError: naming the field that is wrong, missing or unknown.
        """
        fields = strict_fields(cls, document, _OPTIONAL)
        if "augmentation" in document:
            given = document["augmentation"]
            fields["augmentation"] = Augmentation.from_json(given)
        return cls(**fields)

    def resizing_bytes(self, height: int, width: int) -> int:
        """Upper bound of the memory of :meth:`sample` for such an image."""
        num_bytes = ImageResize(self).num_bytes
        if self.turns:
            return max(num_bytes(height, width), num_bytes(width, height))
        return num_bytes(height, width)

    def sample(
        self, image: torch.Tensor, key: str, training: Training | None
    ) -> torch.Tensor:
        """Converts uint8 ``[3, H, W]`` to float32, :attr:`output_shape`.

        Args:
            image: decoded by :func:`decode_image`.
            key: key of the sample.
            training: seed and epoch; None for evaluation.

        Raises:
            SampleError: in evaluation, if the resized image is too large.
            ValueError: in training, if there is no augmentation.
        """
        if training is None:
            return self(image)
        return self._normalize(self.training_pixels(image, key, training))

    def training_pixels(
        self, image: torch.Tensor, key: str, training: Training
    ) -> torch.Tensor:
        """Returns augmented pixels, uint8, :attr:`output_shape`.

        Raises:
            ValueError: if there is no augmentation.
        """
        if self.augmentation is None:
            raise ValueError("this transform has no augmentation")
        drawn = self.augmentation.draw(training, key, *image.shape[-2:])
        return drawn.apply(
            image, self._crop_sides, self.interpolation, is_antialiased(self)
        )

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Converts uint8 ``[3, H, W]`` to float32, :attr:`output_shape`.

        Raises:
            SampleError: if the resize would need more than
                :data:`~hapi_splitter.inputs.image_resize.MAX_RESIZED_PIXELS`.
        """
        return self._normalize(ImageResize(self).pixels(image))

    def _normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        mean, std = _channels(self.mean), _channels(self.std)
        floats = pixels.to(torch.float32)
        return floats.div_(MAX_BYTE).sub_(mean).div_(std)

    @property
    def _crop_sides(self) -> tuple[int, int]:
        size = self.crop_size
        return size if isinstance(size, tuple) else (size, size)


@functools.lru_cache(maxsize=64)
def _channels(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def _size(sizes: Sequence[int]) -> Size:
    """Returns torchvision's list of one or two sides as one value."""
    if len(sizes) == 1:
        return sizes[0]
    height, width = sizes
    return height, width


def _is_size(size: Any) -> bool:
    return _are_integers(
        size if isinstance(size, tuple) else (size, size), 2, 1, MAX_SIDE
    )


def _are_integers(values: Any, count: int, low: int, high: int) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) == count
        and all(type(v) is int and low <= v <= high for v in values)
    )


def _are_channels(values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) == 3
        and all(type(v) in (int, float) for v in values)
        and all(abs(v) < 1e6 and math.isfinite(v) for v in values)
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_SIZES = f"1 to {MAX_SIDE} pixels, or height and width"
_FLAGS = "true or false"
_CHECKS: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("resize_size", _is_size, _SIZES),
    ("crop_size", _is_size, _SIZES),
    ("mean", _are_channels, "three finite numbers"),
    ("std", _are_channels, "three finite numbers"),
    (
        "interpolation",
        _INTERPOLATIONS.__contains__,
        f"one of {', '.join(_INTERPOLATIONS)}",
    ),
    ("fit", _FITS.__contains__, "null, 'cover' or 'contain'"),
    (
        "fill",
        lambda value: _are_integers(value, 3, 0, MAX_BYTE),
        f"three bytes, 0 to {MAX_BYTE}",
    ),
    ("antialias", _is_flag, _FLAGS),
    ("integer_resize", _is_flag, _FLAGS),
    ("floor_crop", _is_flag, _FLAGS),
    ("exif", _EXIF.__contains__, "'ignore' or 'turn'"),
    (
        "member",
        lambda value: value is None or _MEMBER.fullmatch(str(value)),
        "an extension such as jpg or left.jpg",
    ),
)
"""Fields, functions that return True for valid values, and these in words."""
