"""Decoding of images and the input transform of a model.

The transform takes the steps of torchvision's classification preset. Bytes are
resized with integers, as Pillow does it, so that pixels are those that most
training sees, on every processor; or, when asked for, with floats, and then it
equals ``weights.transforms()`` of a tensor to the bit. JPEG is decoded by
torchvision on the CPU, on both tiers; PNG, which leaves decoders no choice, by
Pillow. An image's size is read from its header and checked before anything is
allocated for its pixels.

torchvision is imported where it is used: it takes seconds, and a process
that only validates packages needs none of it.
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
"""Largest result of a resize: it grows with an image's aspect ratio."""

MAX_SIDE = 4096
"""Largest ``resize_size`` and ``crop_size``."""

MAX_BYTE = 255

_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic")
_ANTIALIASED = ("bilinear", "bicubic")
_OPTIONAL = frozenset({"augmentation", "integer_resize"})
"""Fields that a document may lack: the first where there is none, the second
where it is false."""


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
        augmentation: what is random about training images; None where
            nothing is.
        integer_resize: whether bytes are resized with integers, as Pillow
            and torchvision's v2 do it (of photographs, one value of 500
            differs from Pillow's, by 1 of 255), and the same on every
            processor; else with floats, as torchvision's presets do for
            tensors (one value of six), for several times the time.

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
        """Of ``weights.transforms()`` (or that function itself).

        Also of a ``Compose`` of ``Resize``, ``CenterCrop``, ``ToTensor`` (or
        its likes) and ``Normalize`` in that order.

        Raises:
            TypeError: for anything else, naming it and the remedy.
        """
        from torchvision.transforms._presets import ImageClassification

        from hapi_splitter.inputs import torchvision_compose as compositions

        if compositions.is_composition(preset):
            return cls(**compositions.values_of(preset))
        if isinstance(preset, functools.partial | FunctionType):
            preset = preset()
        if not isinstance(preset, ImageClassification):
            raise TypeError(
                f"a transform of the kind {type(preset).__name__} cannot be "
                f"taken; {compositions.REMEDY}"
            )
        return cls(
            resize_size=_only(preset.resize_size, "resize_size"),
            crop_size=_only(preset.crop_size, "crop_size"),
            mean=tuple(preset.mean),
            std=tuple(preset.std),
            interpolation=preset.interpolation.value,
            antialias=bool(preset.antialias),
        )

    @property
    def medium(self) -> Medium:
        """How samples are stored."""
        return IMAGE

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """``(3, crop_size, crop_size)``."""
        return (3, self.crop_size, self.crop_size)

    @property
    def output_dtype(self) -> torch.dtype:
        """float32."""
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
        """Reads what :meth:`to_json` wrote, from anybody.

        Raises:
            ValueError: naming the field that is wrong, missing or unknown.
        """
        if not isinstance(document, dict):
            raise ValueError(f"a transform is an object, not {document!r:.80}")
        expected = set(cls.__dataclass_fields__)
        if set(document) | _OPTIONAL != expected:
            raise ValueError(
                f"a transform has the fields {sorted(expected)} (of which "
                f"{' and '.join(sorted(_OPTIONAL))} may be left out), not "
                f"{sorted(map(str, document))!r:.200}"
            )
        channels = {name: document[name] for name in ("mean", "std")}
        for name, value in channels.items():
            if not isinstance(value, list):
                raise ValueError(f"{name} must be a list, not {value!r:.80}")
            channels[name] = tuple(value)
        fields = {"integer_resize": False} | document | channels
        if "augmentation" in document:
            stated = Augmentation.from_json(document["augmentation"])
            fields["augmentation"] = stated
        return cls(**fields)

    def sample(
        self, image: torch.Tensor, key: str, training: Training | None
    ) -> torch.Tensor:
        """From uint8 ``[3, H, W]`` to float32 ``[3, crop, crop]``.

        Args:
            image: as :func:`decode_image` gives it.
            key: of the sample.
            training: seed and epoch; None for evaluation, as by a call.

        Raises:
            SampleError: as a call, for evaluation.
            ValueError: training, without an augmentation.
        """
        if training is None:
            return self(image)
        pixels = self.training_pixels(image, key, training)
        return self._normalised(pixels.to(torch.float32))

    def training_pixels(
        self, image: torch.Tensor, key: str, training: Training
    ) -> torch.Tensor:
        """Of :meth:`sample`, uint8 ``[3, crop, crop]``.

        Raises:
            ValueError: there is no augmentation.
        """
        if self.augmentation is None:
            raise ValueError("this transform has no augmentation")
        drawn = self.augmentation.draw(training, key, *image.shape[-2:])
        return drawn.apply(
            image, self.crop_size, self.interpolation, self._is_antialiased
        )

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """From uint8 ``[3, H, W]`` to float32 ``[3, crop, crop]``.

        Raises:
            SampleError: for an image so elongated that its resized form
                is over :data:`MAX_RESIZED_PIXELS`.
        """
        height, width = image.shape[-2:]
        shorter, longer = sorted((height, width))
        resized = self.resize_size**2 * longer // max(shorter, 1)
        if resized > MAX_RESIZED_PIXELS:
            raise SampleError(
                f"an image of {width}x{height} pixels would be resized to "
                f"{resized} pixels, more than {MAX_RESIZED_PIXELS}"
            )
        if self.integer_resize:
            sides = self._resized_sides(height, width)
            pixels = _centred(
                self._resized(image[None], *sides), self.crop_size
            )
            return self._normalised(pixels[0].to(torch.float32))
        pixels = self._cropped(image[None].to(torch.float32))[0].round()
        if self.interpolation == "bicubic":
            pixels.clamp_(0, MAX_BYTE)
        return self._normalised(pixels)

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        mean, std = _channels(self.mean), _channels(self.std)
        return pixels.div_(MAX_BYTE).sub_(mean).div_(std)

    def _cropped(self, pixels: torch.Tensor) -> torch.Tensor:
        """Resized and cropped, and not yet rounded to whole numbers.

        The preset rounds all of the resized image to bytes, crops it, and
        makes floats of the bytes.
        """
        height, width = self._resized_sides(*pixels.shape[-2:])
        if self._is_antialiased and 1 < self.crop_size < width:
            # So torch resizes as well, one side after the other; columns
            # that will be cut away are left out in between.  A single one
            # it would take for a row.
            pixels = self._resized(pixels, pixels.shape[-2], width)
            pixels = _middle(pixels, -1, self.crop_size)
            width = self.crop_size
        return _centred(self._resized(pixels, height, width), self.crop_size)

    def _resized(
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
        """Torchvision's rule: the longer side is rounded down."""
        shorter, longer = sorted((height, width))
        side = int(self.resize_size * longer / shorter)
        if height <= width:
            return self.resize_size, side
        return side, self.resize_size


def _centred(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """The middle of an image, with zeros around it where it is smaller, as
    torchvision's central crop."""
    pixels = _middle(_middle(pixels, -2, size), -1, size)
    height, width = (size - side for side in pixels.shape[-2:])
    if not height and not width:
        return pixels
    top, left = height // 2, width // 2
    return pad(pixels, [left, width - left, top, height - top])


def _middle(pixels: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    spare = pixels.shape[dim] - size
    if spare <= 0:
        return pixels
    return pixels.narrow(dim, round(spare / 2), size)


@functools.lru_cache(maxsize=64)
def _channels(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def _only(sizes: Sequence[int], name: str) -> int:
    if len(sizes) != 1:
        raise TypeError(f"{name} must be one number, not {list(sizes)}")
    return sizes[0]


def _check_channels(name: str, values: Any) -> None:
    fine = (
        isinstance(values, tuple)
        and len(values) == 3
        and all(type(v) in (int, float) for v in values)
        and all(abs(v) < 1e6 and math.isfinite(v) for v in values)
    )
    if not fine:
        raise ValueError(
            f"{name} must be three finite numbers, not {values!r:.80}"
        )
