"""Random augmentation of training images, identical on every tier.

All randomness of a sample comes from Philox4x64-10 (Salmon et al., *Parallel
Random Numbers: As Easy as 1, 2, 3*, SC'11), keyed by seed, epoch and the
sample's key, so that batch, order, thread and machine have no influence.  A
sample has :data:`NUM_WORDS` words of 64 bits in blocks of four.  Every step
has its block even if it is off, so that changing one setting does not shift
the draws of the others.

======  ==============================================================
block   words
======  ==============================================================
0 to 9  one attempt of the crop each: area, ratio, top, left
10      horizontal flip, vertical flip, two unused words
11      sort keys of brightness, contrast, saturation and hue
12      amounts of brightness, contrast, saturation and hue
======  ==============================================================

Words become parameters by operations that IEEE 754 rounds correctly: no
logarithm or exponential, whose last bit depends on the C library.

Pixels are bytes between all steps.  torch resizes bytes with integers, and
colour steps use float32 operations that are each rounded correctly, so that
the result depends neither on threads nor on the processor.  torchvision's
float resizing, fused sums and float32 means do depend on them and are avoided;
contrast and saturation differ from torchvision by at most one level.
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

from hapi_protocol.json_messages import strict_fields
from hapi_protocol.transforms import Training

NUM_ATTEMPTS = 10
"""Attempts to draw a crop inside the image, as in torchvision."""
NUM_WORDS = 4 * (NUM_ATTEMPTS + 3)

MAX_AUGMENTED_SIDE = 2048
"""Largest ``crop_size`` with augmentation, which then costs no more than the
largest resize of evaluation."""
MAX_FACTOR = 10.0
"""Largest factor of brightness, contrast and saturation."""
MAX_RATIO = 10.0
"""Largest aspect ratio of a crop, in either direction."""
MAX_HUE = 0.5

JITTER = ("brightness", "contrast", "saturation", "hue")
"""Colour steps, in the order of their words."""

_STRIP_PIXELS = 1 << 16
"""Hue is adjusted in strips of this many pixels to bound temporary memory."""

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
_PROBABILITIES = ("horizontal_flip", "vertical_flip")

Range = tuple[float, float]
"""Smallest and largest value of a uniform draw."""


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Settings of random augmentation, with torchvision's usual steps.

    A crop of random area and shape (``RandomResizedCrop``), flips
    (``RandomHorizontalFlip``, ``RandomVerticalFlip``), then colour steps in
    random order (``ColorJitter``).  The defaults are the crops and the flip
    with which ImageNet models are trained.  With ``scale=(1, 1)`` and
    ``ratio=(1, 1)`` the crop is the largest central square.

    Args:
        scale: range of the cropped fraction of the image's area; above 0, up
            to 1.
        ratio: range of a crop's width divided by its height, 0.1 to 10, drawn
            uniformly in its logarithm.
        horizontal_flip: probability.
        vertical_flip: probability.
        brightness: range of the factor, 0 to 10; ``(1, 1)`` turns it off.
        contrast: range of the factor, 0 to 10; ``(1, 1)`` turns it off.
        saturation: range of the factor, 0 to 10; ``(1, 1)`` turns it off.
        hue: range of the rotation, as a fraction of the colour circle, -0.5
            to 0.5; ``(0, 0)`` turns it off.

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
        for name in _PROBABILITIES:
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise ValueError(
                    f"{name} must be a probability, 0 to 1, not {value!r:.80}"
                )
            object.__setattr__(self, name, float(value))

    def to_json(self) -> dict[str, Any]:
        ranges = {name: list(getattr(self, name)) for name in _LIMITS}
        return ranges | {name: getattr(self, name) for name in _PROBABILITIES}

    @classmethod
    def from_json(cls, document: Any) -> Augmentation:
        """Parses the output of :meth:`to_json`, which may be untrusted.

        Raises:
            ValueError: naming the field that is wrong, missing or unknown.
        """
        return cls(**strict_fields(cls, document))

    def draw(
        self, training: Training, key: str, height: int, width: int
    ) -> SampleAugmentation:
        """Draws the random parameters of one sample.

        Args:
            training: seed and epoch.
            key: key of the sample.
            height: height of the image, in pixels.
            width: width of the image, in pixels.
        """
        words = random_words(training, key)
        flips = words[4 * NUM_ATTEMPTS :]
        order = words[4 * (NUM_ATTEMPTS + 1) :]
        amounts = words[4 * (NUM_ATTEMPTS + 2) :]
        steps = []
        for number in sorted(range(4), key=order.__getitem__):
            name = JITTER[number]
            low, high = getattr(self, name)
            if not low == high == (0.0 if name == "hue" else 1.0):
                amount = min(low + (high - low) * _unit(amounts[number]), high)
                steps.append((name, amount))
        return SampleAugmentation(
            self._crop(words, height, width),
            _unit(flips[0]) < self.horizontal_flip,
            _unit(flips[1]) < self.vertical_flip,
            tuple(steps),
        )

    def _crop(self, words: Sequence[int], height: int, width: int) -> Crop:
        low, high = self.scale
        for number in range(NUM_ATTEMPTS):
            area, ratio, top, left = words[4 * number : 4 * number + 4]
            pixels = height * width * (low + (high - low) * _unit(area))
            shape = _log_uniform(*self.ratio, ratio)
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
        """Returns the largest central crop whose aspect ratio is allowed."""
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
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class SampleAugmentation:
    """The augmentation drawn for one sample; fields in order of application.

    Attributes:
        crop: rectangle that is resized.
        horizontal_flip: True if the crop is flipped left to right.
        vertical_flip: True if the crop is flipped top to bottom.
        jitter: colour steps in order: a name of :data:`JITTER` and an amount.
    """

    crop: Crop
    horizontal_flip: bool
    vertical_flip: bool
    jitter: tuple[tuple[str, float], ...]

    def apply(
        self,
        image: torch.Tensor,
        size: tuple[int, int],
        interpolation: str,
        antialias: bool,
    ) -> torch.Tensor:
        """Returns the augmented pixels.

        Args:
            image: uint8 ``[3, H, W]`` of the height and width drawn for.
            size: height and width of the result, in pixels.
            interpolation: mode of :func:`torch.nn.functional.interpolate`.
            antialias: for ``bilinear``, ``bicubic`` and ``lanczos`` only.

        Returns:
            uint8 ``[3, *size]``.
        """
        crop = self.crop
        cropped = image.narrow(1, crop.top, crop.height)
        cropped = cropped.narrow(2, crop.left, crop.width)
        # torchvision's resized_crop uses floats on some processors.
        pixels: torch.Tensor = interpolate(
            cropped[None],
            size,
            mode=interpolation,
            antialias=antialias,
        )[0]
        if self.horizontal_flip:
            pixels = pixels.flip(-1)
        if self.vertical_flip:
            pixels = pixels.flip(-2)
        for name, amount in self.jitter:
            pixels = _ADJUST[name](pixels, amount)
        return pixels


def random_words(training: Training, key: str) -> list[int]:
    """Returns the :data:`NUM_WORDS` random 64-bit words of a sample.

    Philox's key is (seed, epoch).  Of the counter's four words the lowest
    counts blocks from 1, and the others are the first 24 bytes of the SHA-256
    of the sample's key in UTF-8, little-endian.
    """
    digest = hashlib.sha256(key.encode()).digest()
    high_words = struct.unpack("<3Q", digest[:24])
    # NumPy keeps raw bits stable across its versions (NEP 19).
    philox = np.random.Philox(
        key=np.array([training.seed, training.epoch], np.uint64),
        counter=np.array([0, *high_words], np.uint64),
    )
    words: list[int] = philox.random_raw(NUM_WORDS).tolist()
    return words


def _unit(word: int) -> float:
    """Maps a word to a uniform number in [0, 1)."""
    return (word >> 11) * 2.0**-53


def _below(limit: int, word: int) -> int:
    """Maps a word to a uniform integer in [0, limit)."""
    return (word * limit) >> 64


def _log_uniform(low: float, high: float, word: int) -> float:
    """Maps a word to ``low * (high / low) ** u`` with a uniform ``u``.

    Square roots, one per bit of ``u`` (the upper 32 bits of the word), take
    the place of the power because IEEE 754 rounds them correctly.
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
    # A float64 sum of integers is exact; float32 would depend on threads.
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
    """Returns torchvision's grey levels, integers in float32 ``[H, W]``.

    Products and sums are separate operations, here and in :func:`_blended`,
    because only some processors fuse them.
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
    minimum, maximum = limits
    is_valid = (
        isinstance(value, tuple)
        and len(value) == 2
        and all(_is_number(bound) for bound in value)
        and minimum <= value[0] <= value[1] <= maximum
    )
    if not is_valid:
        raise ValueError(
            f"{name} must be two numbers from {minimum:g} to {maximum:g}, "
            f"the larger one second, not {value!r:.80}"
        )
    return float(value[0]), float(value[1])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
