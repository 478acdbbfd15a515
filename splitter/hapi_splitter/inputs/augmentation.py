"""Random changes of training images, the same on every tier.

All that is random about a sample comes from Philox4x64-10 (Salmon et al.,
*Parallel Random Numbers: As Easy as 1, 2, 3*, SC'11): a function of seed,
epoch and the sample's key, so that neither the batch nor the order, thread or
machine that a sample meets has a part in it.  A sample has :data:`NUM_WORDS`
words of 64 bits, a block of four for each step, whether it is used or not:
changing one setting does not shift what the others draw.

======  ==============================================================
block   its words
======  ==============================================================
0 to 9  a try of the crop each: area, ratio, top, left
10      horizontal flip, vertical flip, two that nothing uses
11      places of brightness, contrast, saturation and hue in the order
12      amounts of brightness, contrast, saturation and hue
======  ==============================================================

Parameters are made of the words by operations that IEEE 754 rounds correctly:
no logarithm or exponential, whose last bit depends on the C library.

Pixels are bytes between all steps.  torch resizes bytes with integers, and
colours change by steps of float32 that are each rounded correctly, so that the
result depends neither on threads nor on the processor.  The ways of
torchvision that do (floats when resizing, fused sums, means of float32) are
not taken; contrast and saturation differ from its by one level at most.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from hapi_protocol.transforms import Training

NUM_TRIES = 10
"""Of a crop that lies inside the image, as torchvision's."""
NUM_WORDS = 4 * (NUM_TRIES + 3)

MAX_AUGMENTED_SIDE = 2048
"""Largest ``crop_size``: all steps together then cost no more than the largest
resize of evaluation."""
MAX_FACTOR = 10.0
"""Of brightness, contrast and saturation."""
MAX_RATIO = 10.0
"""Of a crop's width to its height, or its height to its width."""
MAX_HUE = 0.5

JITTER = ("brightness", "contrast", "saturation", "hue")
"""Steps of colour, in the order of their words."""

_STRIP_PIXELS = 1 << 16
"""That change their hue at a time: it takes many floats for each."""

_MAX_BYTE = 255

_LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "scale": (0.0, 1.0),
        "ratio": (1 / MAX_RATIO, MAX_RATIO),
        "brightness": (0.0, MAX_FACTOR),
        "contrast": (0.0, MAX_FACTOR),
        "saturation": (0.0, MAX_FACTOR),
        "hue": (-MAX_HUE, MAX_HUE),
    }
)
_CHANCES = ("horizontal_flip", "vertical_flip")

Range = tuple[float, float]
"""Least and largest value; a uniform draw lies between them."""


@dataclass(frozen=True, slots=True)
class Augmentation:
    """What is random about training images: torchvision's usual steps.

    A crop of random area and shape (``RandomResizedCrop``), flips
    (``RandomHorizontalFlip``, ``RandomVerticalFlip``), then changes of colour
    in random order (``ColorJitter``).  By default the crops and the flip that
    ImageNet's models are trained with.

    Args:
        scale: least and largest part of the image's area that is cropped;
            above 0, up to 1.
        ratio: of a crop's width to its height, 0.1 to 10, drawn uniformly in
            its logarithm.
        horizontal_flip: its probability.
        vertical_flip: likewise.
        brightness: factor, 0 to 10; ``(1, 1)`` leaves it out, as for the
            next two.
        contrast: likewise.
        saturation: likewise.
        hue: part of the circle that it is turned by, -0.5 to 0.5;
            ``(0, 0)`` leaves it out.

    With ``scale=(1, 1)`` and ``ratio=(1, 1)`` the crop is the largest central
    square.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    horizontal_flip: float = 0.5
    vertical_flip: float = 0.0
    brightness: Range = (1.0, 1.0)
    contrast: Range = (1.0, 1.0)
    saturation: Range = (1.0, 1.0)
    hue: Range = (0.0, 0.0)

    def __post_init__(self) -> None:
        for name, limits in _LIMITS.items():
            checked = _checked_range(name, getattr(self, name), limits)
            object.__setattr__(self, name, checked)
        if self.scale[0] == 0:
            raise ValueError(f"scale must begin above 0, not {self.scale}")
        for name in _CHANCES:
            chance = getattr(self, name)
            if not _is_number(chance) or not 0 <= chance <= 1:
                raise ValueError(
                    f"{name} must be a probability, 0 to 1, not {chance!r:.80}"
                )
            object.__setattr__(self, name, float(chance))

    def to_json(self) -> dict[str, Any]:
        ranges = {name: list(getattr(self, name)) for name in _LIMITS}
        return ranges | {name: getattr(self, name) for name in _CHANCES}

    @classmethod
    def from_json(cls, document: Any) -> Augmentation:
        """Reads what :meth:`to_json` wrote, from anybody.

        Raises:
            ValueError: naming the field that is wrong, missing or unknown.
        """
        if not isinstance(document, dict):
            raise ValueError(
                f"an augmentation is an object, not {document!r:.80}"
            )
        expected = set(cls.__dataclass_fields__)
        if set(document) != expected:
            raise ValueError(
                f"an augmentation has the fields {sorted(expected)}, not "
                f"{sorted(map(str, document))!r:.200}"
            )
        ranges = {name: document[name] for name in _LIMITS}
        for name, value in ranges.items():
            if not isinstance(value, list):
                raise ValueError(f"{name} must be a list, not {value!r:.80}")
            ranges[name] = tuple(value)
        return cls(**document | ranges)

    def draw(
        self, training: Training, key: str, height: int, width: int
    ) -> Drawn:
        """What is done to one sample.

        Args:
            training: seed and epoch.
            key: of the sample.
            height: of its image.
            width: likewise.
        """
        words = random_words(training, key)
        flips = words[4 * NUM_TRIES :]
        order = words[4 * (NUM_TRIES + 1) :]
        amounts = words[4 * (NUM_TRIES + 2) :]
        steps = []
        for number in sorted(range(4), key=order.__getitem__):
            name = JITTER[number]
            low, high = getattr(self, name)
            if not low == high == (0.0 if name == "hue" else 1.0):
                amount = min(low + (high - low) * _unit(amounts[number]), high)
                steps.append((name, amount))
        return Drawn(
            self._crop(words, height, width),
            _unit(flips[0]) < self.horizontal_flip,
            _unit(flips[1]) < self.vertical_flip,
            tuple(steps),
        )

    def _crop(self, words: Sequence[int], height: int, width: int) -> Crop:
        low, high = self.scale
        for number in range(NUM_TRIES):
            area, ratio, top, left = words[4 * number : 4 * number + 4]
            pixels = height * width * (low + (high - low) * _unit(area))
            shape = _between_by_ratio(*self.ratio, ratio)
            columns = round(math.sqrt(pixels * shape))
            rows = round(math.sqrt(pixels / shape))
            if 0 < columns <= width and 0 < rows <= height:
                return Crop(
                    _below(height - rows + 1, top),
                    _below(width - columns + 1, left),
                    rows,
                    columns,
                )
        return self._central_crop(height, width)

    def _central_crop(self, height: int, width: int) -> Crop:
        """The largest whose shape is allowed."""
        low, high = self.ratio
        rows, columns = height, width
        if width / height < low:
            rows = max(round(width / low), 1)
        elif width / height > high:
            columns = max(round(height * high), 1)
        top, left = (height - rows) // 2, (width - columns) // 2
        return Crop(top, left, rows, columns)


@dataclass(frozen=True, slots=True)
class Crop:
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is done to one sample, in this order.

    Attributes:
        crop: that is resized.
        horizontal_flip: whether it is flipped.
        vertical_flip: likewise.
        jitter: steps of colour in their order, each of :data:`JITTER` and its
            amount; without those that are left out.
    """

    crop: Crop
    horizontal_flip: bool
    vertical_flip: bool
    jitter: tuple[tuple[str, float], ...]

    def apply(
        self,
        image: torch.Tensor,
        size: int,
        interpolation: str,
        antialias: bool,
    ) -> torch.Tensor:
        """The changed pixels.

        Args:
            image: uint8 ``[3, H, W]`` of the height and width drawn for.
            size: of both sides of the result.
            interpolation: as torch names it.
            antialias: for ``bilinear`` and ``bicubic`` only.

        Returns:
            uint8 ``[3, size, size]``.
        """
        crop = self.crop
        part = image[
            :,
            crop.top : crop.top + crop.height,
            crop.left : crop.left + crop.width,
        ]
        # Not torchvision's resized_crop, which takes floats on processors
        # where they are faster.
        pixels: torch.Tensor = interpolate(
            part[None], (size, size), mode=interpolation, antialias=antialias
        )[0]
        if self.horizontal_flip:
            pixels = pixels.flip(-1)
        if self.vertical_flip:
            pixels = pixels.flip(-2)
        for name, amount in self.jitter:
            pixels = _ADJUST[name](pixels, amount)
        return pixels


def random_words(training: Training, key: str) -> list[int]:
    """The 64-bit words of a sample, :data:`NUM_WORDS` of them.

    Philox has the key (seed, epoch) and a counter of four words, of which the
    lowest counts the blocks, from 1 on, and the others are the first 24 bytes
    of the SHA-256 of the sample's key in UTF-8, little-endian.
    """
    digest = hashlib.sha256(key.encode()).digest()
    places = struct.unpack("<3Q", digest[:24])
    # Raw bits: NumPy keeps those stable over its versions (NEP 19).
    philox = np.random.Philox(
        key=np.array([training.seed, training.epoch], np.uint64),
        counter=np.array([0, *places], np.uint64),
    )
    words: list[int] = philox.random_raw(NUM_WORDS).tolist()
    return words


def _unit(word: int) -> float:
    """Uniform in [0, 1)."""
    return (word >> 11) * 2.0**-53


def _below(limit: int, word: int) -> int:
    """A whole number from 0 to below ``limit``."""
    return (word * limit) >> 64


def _between_by_ratio(low: float, high: float, word: int) -> float:
    """Uniform in its logarithm: ``low * (high / low) ** u``.

    ``u`` has the upper 32 bits of the word; each that is set stands for a
    square root of the one before it.
    """
    value, factor = low, high / low
    for bit in range(63, 31, -1):
        factor = math.sqrt(factor)
        if word >> bit & 1:
            value *= factor
    return min(value, high)


def _adjust_brightness(pixels: torch.Tensor, factor: float) -> torch.Tensor:
    return _bytes(pixels.to(torch.float32).mul_(factor))


def _adjust_contrast(pixels: torch.Tensor, factor: float) -> torch.Tensor:
    # Whole numbers, whose sum is exact: float32 would depend on the threads.
    mean = _greys(pixels).mean(dtype=torch.float64).to(torch.float32)
    return _blended(pixels, mean, factor)


def _adjust_saturation(pixels: torch.Tensor, factor: float) -> torch.Tensor:
    return _blended(pixels, _greys(pixels), factor)


def _adjust_hue(pixels: torch.Tensor, amount: float) -> torch.Tensor:
    from torchvision.transforms.v2.functional import adjust_hue

    rows = max(_STRIP_PIXELS // pixels.shape[-1], 1)
    strips = torch.split(pixels, rows, -2)
    changed: list[torch.Tensor] = [adjust_hue(s, amount) for s in strips]
    joined: torch.Tensor = torch.cat(changed, -2)
    return joined


_ADJUST: Mapping[str, Callable[[torch.Tensor, float], torch.Tensor]] = (
    MappingProxyType(
        {
            "brightness": _adjust_brightness,
            "contrast": _adjust_contrast,
            "saturation": _adjust_saturation,
            "hue": _adjust_hue,
        }
    )
)


def _greys(pixels: torch.Tensor) -> torch.Tensor:
    """Torchvision's, whole numbers in float32 ``[H, W]``.

    Products and sums are steps of their own, here and in :func:`_blended`:
    some processors round the two of them once, others twice.
    """
    red, green, blue = pixels.to(torch.float32).unbind()
    greys = red.mul(0.2989).add_(green.mul(0.587)).add_(blue.mul(0.114))
    return greys.floor_()


def _blended(
    pixels: torch.Tensor, others: torch.Tensor, factor: float
) -> torch.Tensor:
    own = pixels.to(torch.float32).mul_(factor)
    return _bytes(own.add_(others.mul(1.0 - factor)))


def _bytes(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.clamp_(0, _MAX_BYTE).to(torch.uint8)


def _checked_range(name: str, value: Any, limits: Range) -> Range:
    least, most = limits
    fine = (
        isinstance(value, tuple)
        and len(value) == 2
        and all(_is_number(each) for each in value)
        and least <= value[0] <= value[1] <= most
    )
    if not fine:
        raise ValueError(
            f"{name} must be two numbers, the larger one second, from "
            f"{least:g} to {most:g}, not {value!r:.80}"
        )
    return float(value[0]), float(value[1])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
