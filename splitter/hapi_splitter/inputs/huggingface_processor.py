"""Converts image processors of Hugging Face transformers to plain values.

transformers is never imported: the class of a processor has done that.  Its
two backends share all steps, so that attributes say what a processor does
unless its class replaces a step.  Such a class is refused unless it is listed
here.
"""

from __future__ import annotations

import math
import sys
from types import FunctionType
from typing import Any

from PIL.Image import Resampling

_BACKENDS = "transformers.image_processing_backends"
_MODELS = "transformers.models."
_KNOWN = frozenset(
    {
        *("BeitImageProcessor", "MobileNetV2ImageProcessor"),
        *("ConvNextImageProcessor", "PoolFormerImageProcessor"),
        *("DINOv3ViTImageProcessor", "LevitImageProcessor"),
        "SegformerImageProcessor",
    }
)
"""Classes that replace steps, with what they do taken into account here, or
only in segmentation maps."""
_WITHOUT_CROP = frozenset(
    {"ConvNextImageProcessor", "SegformerImageProcessor"}
)
_SWITCHES = frozenset(
    {
        *("do_resize", "do_center_crop", "do_rescale", "do_normalize"),
        *("do_convert_rgb", "default_to_square", "disable_grouping"),
    }
)
"""Attributes that may be on.  Images are always decoded to RGB."""
_STRETCHED_SIDE = 384
"""Sides from which ConvNeXt stretches instead of cropping."""

_REMEDY = "use an ImageTransform"


def is_processor(transform: object) -> bool:
    return any(isinstance(transform, backend) for backend in _backends())


def transform_fields(processor: Any) -> dict[str, Any]:
    """Returns the fields of an equivalent ``ImageTransform``.

    Raises:
        TypeError: naming the attribute or step that is not supported.
    """
    for name, value in sorted(vars(processor).items()):
        is_on = value is True or (value and name.startswith("do_"))
        if is_on and name not in _SWITCHES:
            _refuse(processor, f"{name} is on")
    names = _class_names(processor)
    if not processor.do_resize:
        _refuse(processor, "do_resize is off")
    if processor.do_center_crop and names & _WITHOUT_CROP:
        _refuse(processor, "do_center_crop is on, which it ignores or repeats")
    fields = _sizes(processor, names)
    fields |= {"interpolation": _interpolation(processor), "antialias": True}
    if "DINOv3ViTImageProcessor" in names:
        # It resizes floats, and does not round or clamp them.
        if fields["interpolation"] not in ("bilinear", "nearest-exact"):
            _refuse(processor, f"its resample is {processor.resample}")
        fields["integer_resize"] = False
    return fields | _normalisation(processor)


def _backends() -> list[type]:
    module = sys.modules.get(_BACKENDS)
    return [module.TorchvisionBackend, module.PilBackend] if module else []


def _class_names(processor: Any) -> set[str]:
    """Returns the names of its listed classes, without Pillow's suffix.

    Raises:
        TypeError: naming a step that another class replaces.
    """
    backend = next(b for b in _backends() if isinstance(processor, b))
    names = set()
    for base in type(processor).__mro__:
        if base in backend.__mro__:
            continue
        name = base.__name__.removesuffix("Pil")
        if base.__module__.startswith(_MODELS) and name in _KNOWN:
            names.add(name)
            continue
        for step, value in vars(base).items():
            is_step = isinstance(value, FunctionType) and step != "__init__"
            if is_step and hasattr(backend, step):
                _refuse(processor, f"{base.__name__} replaces {step}")
    return names


def _sizes(processor: Any, names: set[str]) -> dict[str, Any]:
    size = dict(processor.size or {})
    if set(size) == {"shortest_edge"}:
        side = size["shortest_edge"]
        if "ConvNextImageProcessor" in names:
            if side >= _STRETCHED_SIDE:
                return {"resize_size": (side, side), "crop_size": side}
            resized = int(side / processor.crop_pct)
            return _cropped(processor, resized, (side, side))
        if "LevitImageProcessor" in names:
            side = int(256 / 224 * side)
        if "PoolFormerImageProcessor" in names and processor.crop_pct:
            side = int(side / processor.crop_pct)
        if not processor.do_center_crop:
            _refuse(processor, f"its size is {size} without do_center_crop")
        return _cropped(processor, side, _pair(processor.crop_size))
    is_stretched = set(size) == {"height", "width"}
    if not is_stretched or "PoolFormerImageProcessor" in names:
        _refuse(processor, f"its size is {size}")
    sides = _pair(size)
    if not processor.do_center_crop:
        return {"resize_size": sides, "crop_size": sides}
    return _cropped(processor, sides, _pair(processor.crop_size))


def _cropped(
    processor: Any, size: int | tuple[int, int], crop: tuple[int, int]
) -> dict[str, Any]:
    limits = size if isinstance(size, tuple) else (size, size)
    if crop[0] > limits[0] or crop[1] > limits[1]:
        _refuse(processor, f"crop_size {crop} is larger than size {size}")
    return {"resize_size": size, "crop_size": crop, "floor_crop": True}


def _pair(size: Any) -> tuple[int, int]:
    return size["height"], size["width"]


def _interpolation(processor: Any) -> str:
    resample = processor.resample
    if resample is None:
        return "bilinear"
    if not isinstance(resample, int):
        _refuse(processor, f"its resample is {resample}")
    name = Resampling(resample).name.lower()
    if name != "nearest":
        return name
    if processor.backend == "pil":
        _refuse(processor, "the nearest pixels of Pillow are not torch's")
    return "nearest-exact"


def _normalisation(processor: Any) -> dict[str, Any]:
    """Returns mean and std of values in 0 to 1.

    ``(x * factor - mean) / std`` of a byte ``x`` equals ``(x / 255 - mean /
    scale) / (std / scale)`` with ``scale = 255 * factor``.
    """
    factor = processor.rescale_factor if processor.do_rescale else 1
    scale = 255 * factor
    if math.isclose(scale, 1):
        scale = 1
    if not scale > 0:
        _refuse(processor, f"its rescale_factor is {factor}")
    if not processor.do_normalize:
        return {"mean": (0.0,) * 3, "std": (1 / scale,) * 3}
    return {
        "mean": _channels(processor.image_mean, scale),
        "std": _channels(processor.image_std, scale),
    }


def _channels(values: Any, scale: float) -> tuple[float, ...]:
    channels = [values] * 3 if isinstance(values, int | float) else values
    return tuple(float(value / scale) for value in channels)


def _refuse(processor: Any, reason: str) -> None:
    raise TypeError(
        f"the transform's {type(processor).__name__} is not supported: "
        f"{reason}; {_REMEDY}"
    )
