"""Converts torchvision's composed transforms to plain values.

The storage side never runs user code.  So a composition is accepted only if
:class:`hapi_splitter.inputs.image_transform.ImageTransform` does the same:
resize the shorter side, crop the centre, convert to floats, normalise.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    # Only torchvision's v1 resizes tensors with floats.
    fields: dict[str, Any] = {
        "integer_resize": any(
            isinstance(step, (*_FROM_PILLOW, v2.Resize)) for step in steps
        )
    }
    for step in steps:
        if isinstance(step, _NO_OPS):
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
        _add_resize_or_crop(step, fields)
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


def _add_resize_or_crop(step: Any, fields: dict[str, Any]) -> None:
    if isinstance(step, (v1.Resize, v2.Resize)):
        _check("crop_size" not in fields, step, "it follows CenterCrop")
        _check(step.max_size is None, step, "it has a max_size")
        _add(
            fields,
            step,
            resize_size=_side(step, "it changes the aspect ratio"),
            interpolation=str(
                getattr(step.interpolation, "value", step.interpolation)
            ),
            antialias=bool(step.antialias),
        )
    elif isinstance(step, (v1.CenterCrop, v2.CenterCrop)):
        _check("resize_size" in fields, step, "it precedes Resize")
        _add(fields, step, crop_size=_side(step, "it is not square", 2))
    elif isinstance(step, _random_types()):
        _refuse(
            step,
            "it is random; use augment=Augmentation(…), which gives the same "
            "pixels on every host",
        )
    else:
        _refuse(step, "the store has no such step")


def _random_types() -> tuple[type, ...]:
    names = ("Random", "ColorJitter", "AutoAugment", "TrivialAugment")
    return tuple(
        each
        for module in (v1, v2)
        for name, each in vars(module).items()
        if isinstance(each, type)
        and (name.startswith(names) or name in ("AugMix", "MixUp", "CutMix"))
    )


def _side(step: Any, reason: str, max_sizes: int = 1) -> int:
    sizes = [step.size] if isinstance(step.size, int) else list(step.size)
    _check(len(sizes) <= max_sizes and len(set(sizes)) == 1, step, reason)
    return int(sizes[0])


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
