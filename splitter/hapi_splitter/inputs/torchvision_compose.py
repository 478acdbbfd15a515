"""Converts torchvision's composed transforms to plain values.

The storage side never runs user code.  So a composition is accepted only if
:class:`hapi_splitter.inputs.image_transform.ImageTransform` does the same:
resize, crop the centre, convert to floats, normalise.  Steps of timm,
open_clip and OpenAI's clip are detected by their names, because an import of
these libraries takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

_COMPOSITIONS = (v1.Compose, v2.Compose, nn.Sequential)
_TO_TENSOR = (v1.ToTensor, v2.ToTensor)
_TO_DTYPE = (v1.ConvertImageDtype, v2.ConvertImageDtype, v2.ToDtype)
_FROM_PILLOW = (*_TO_TENSOR, v1.PILToTensor, v2.PILToTensor, v2.ToImage)
_NO_OPS = (
    *(v1.PILToTensor, v2.PILToTensor, v2.ToImage, v2.ToPureTensor, v2.RGB),
    *(nn.Identity, v2.Identity),
)
"""Steps without effect here: images are always decoded to RGB tensors."""
_TO_RGB = ("MaybeConvertMode", "_convert_to_rgb", "_convert_image_to_rgb")
_LIBRARIES = ("timm", "open_clip", "clip")
_RANDOM = (
    *("Rand", "ColorJitter", "AutoAugment", "TrivialAugment", "AugMix"),
    *("MixUp", "CutMix", "color_jitter", "gray_scale"),
)
"""Prefixes of the names of random steps."""
REMEDY = (
    "use Resize(size), CenterCrop(size), ToTensor() or "
    "ToDtype(torch.float32, scale=True), and Normalize(mean, std) in that "
    "order, or an ImageTransform"
)


def is_composition(transform: object) -> bool:
    return isinstance(transform, _COMPOSITIONS)


def transform_fields(composition: Any) -> dict[str, Any]:
    """Returns the fields of an equivalent ``ImageTransform``.

    Raises:
        TypeError: naming the unsupported step and the supported ones.
    """
    is_float = False
    steps = list(_steps(composition))
    from_pillow = [isinstance(step, _FROM_PILLOW) for step in steps]
    # Only torchvision's v1 resizes tensors with floats.
    fields: dict[str, Any] = {
        "integer_resize": any(from_pillow)
        or any(isinstance(step, v2.Resize) for step in steps)
    }
    for number, step in enumerate(steps):
        if isinstance(step, _NO_OPS) or _name(step) in _TO_RGB:
            continue
        if isinstance(step, (v1.Normalize, v2.Normalize)):
            _check(is_float, step, "it precedes the conversion to floats")
            _add(fields, step, mean=_floats(step.mean), std=_floats(step.std))
            continue
        _check("mean" not in fields, step, "it follows Normalize")
        if _converts_to_floats(step):
            is_float = True
            continue
        _check(not is_float, step, "it follows the conversion to floats")
        _add_resize_or_crop(step, fields, any(from_pillow[number:]))
    size = fields.get("resize_size")
    if isinstance(size, tuple) and "fit" not in fields:
        fields.setdefault("crop_size", size)
    for name, needed in (
        ("resize_size", "Resize"),
        ("crop_size", "CenterCrop"),
    ):
        if name not in fields:
            raise TypeError(f"the transform has no {needed}; {REMEDY}")
    if not is_float:
        raise TypeError(f"the transform has no conversion to floats; {REMEDY}")
    return {"mean": (0.0,) * 3, "std": (1.0,) * 3, **fields}


def _steps(transform: Any) -> Iterator[Any]:
    is_sequential = isinstance(transform, nn.Sequential)
    for step in transform if is_sequential else transform.transforms:
        if is_composition(step):
            yield from _steps(step)
        else:
            yield step


def _converts_to_floats(step: Any) -> bool:
    if isinstance(step, _TO_TENSOR):
        return True
    if not isinstance(step, _TO_DTYPE):
        return False
    _check(step.dtype == torch.float32, step, f"its dtype is {step.dtype}")
    _check(getattr(step, "scale", True), step, "it does not scale")
    return True


def _add_resize_or_crop(
    step: Any, fields: dict[str, Any], is_pillow: bool
) -> None:
    if isinstance(step, (v1.Resize, v2.Resize)):
        _check(step.max_size is None, step, "it has a max_size")
        sizes = [step.size] if isinstance(step.size, int) else step.size
        _add_resize(
            step,
            fields,
            is_pillow,
            resize_size=int(sizes[0]) if len(sizes) == 1 else _pair(sizes),
        )
    elif _name(step) == "ResizeKeepRatio":
        _check(
            step.random_scale_prob == step.random_aspect_prob == 0,
            step,
            "it is random",
        )
        _check(step.longest in (0, 1), step, "longest is neither 0 nor 1")
        _add_resize(
            step,
            fields,
            is_pillow,
            resize_size=_pair(step.size),
            fit="contain" if step.longest else "cover",
        )
    elif isinstance(step, (v1.CenterCrop, v2.CenterCrop)):
        _check("resize_size" in fields, step, "it precedes Resize")
        _add(fields, step, crop_size=_pair(step.size))
    elif _name(step) == "CenterCropOrPad":
        _check("resize_size" in fields, step, "it precedes Resize")
        mode = getattr(step, "padding_mode", "constant")
        _check(mode == "constant", step, f"its padding_mode is {mode}")
        fill = [step.fill] * 3 if isinstance(step.fill, int) else step.fill
        _add(fields, step, crop_size=_pair(step.size), fill=tuple(fill))
    elif any(c.__name__.startswith(_RANDOM) for c in type(step).__mro__):
        _refuse(
            step,
            "it is random; use augment=Augmentation(…), which gives the same "
            "pixels on every host",
        )
    else:
        _refuse(step, "the store has no such step")


def _add_resize(
    step: Any, fields: dict[str, Any], is_pillow: bool, **new: Any
) -> None:
    """Adds the fields of a resize.

    Args:
        step: has ``interpolation``, a mode of torchvision or its name.
        fields: changed in place.
        is_pillow: True if the step's input is an image of Pillow, which
            always antialiases.
        new: further fields.
    """
    _check("crop_size" not in fields, step, "it follows CenterCrop")
    mode = step.interpolation
    interpolation = str(getattr(mode, "value", mode))
    _check(
        not is_pillow or interpolation not in ("nearest", "nearest-exact"),
        step,
        "the nearest pixels of Pillow are not always torch's",
    )
    antialias = is_pillow or bool(step.antialias)
    _add(fields, step, interpolation=interpolation, antialias=antialias, **new)


def _name(step: Any) -> str | None:
    """Returns the name of a class or function of another library."""
    kind = step if isinstance(step, FunctionType) else type(step)
    is_known = kind.__module__.partition(".")[0] in _LIBRARIES
    return kind.__name__ if is_known else None


def _pair(size: Any) -> tuple[int, int]:
    sizes = [size] if isinstance(size, int) else size
    height, width = sizes if len(sizes) == 2 else (sizes[0], sizes[0])
    return int(height), int(width)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _add(fields: dict[str, Any], step: Any, **new: Any) -> None:
    _check(not fields.keys() & new.keys(), step, "it occurs twice")
    fields.update(new)


def _check(condition: bool, step: Any, reason: str) -> None:
    if not condition:
        _refuse(step, reason)


def _refuse(step: Any, reason: str) -> None:
    text = " ".join(str(step).split())
    raise TypeError(
        f"the transform's {text:.100} is not supported: {reason}; {REMEDY}"
    )
