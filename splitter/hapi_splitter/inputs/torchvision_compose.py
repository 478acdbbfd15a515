"""torchvision's composed transforms as plain values.

What the storage side runs are values, never a user's code.  So a composition
is taken where it does what
:class:`hapi_splitter.inputs.image_transform.ImageTransform` does: resize the
shorter side, crop the middle, make floats, normalise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchvision import transforms as v1
from torchvision.transforms import v2

_KINDS = (v1.Compose, v2.Compose, nn.Sequential)
_TO_FLOATS = (v1.ToTensor, v2.ToTensor)
_OF_DTYPE = (v1.ConvertImageDtype, v2.ConvertImageDtype, v2.ToDtype)
_OF_PILLOW = (*_TO_FLOATS, v1.PILToTensor, v2.PILToTensor, v2.ToImage)
"""Before these there are Pillow's images, not tensors."""
_NOTHING = (
    *(v1.PILToTensor, v2.PILToTensor, v2.ToImage, v2.ToPureTensor, v2.RGB),
    *(nn.Identity, v2.Identity),
)
"""Images are decoded to tensors of three channels in any case."""
REMEDY = (
    "a transform that the store can run is Resize(size), CenterCrop(size), "
    "ToTensor() or ToDtype(torch.float32, scale=True), and Normalize(mean, "
    "std) in that order, or an ImageTransform"
)


def is_composition(transform: object) -> bool:
    return isinstance(transform, _KINDS)


def values_of(composition: Any) -> dict[str, Any]:
    """Fields of an ``ImageTransform`` that does the same.

    Raises:
        TypeError: naming the step that cannot be taken, and what can.
    """
    found: dict[str, Any] = {}
    is_float = False
    steps = list(_steps(composition))
    # The first version takes floats for tensors, the second one and Pillow
    # do not.
    found["integer_resize"] = any(
        isinstance(step, (*_OF_PILLOW, v2.Resize)) for step in steps
    )
    for step in steps:
        if isinstance(step, _NOTHING):
            continue
        if isinstance(step, (v1.Normalize, v2.Normalize)):
            _check(is_float, step, "it comes before floats are made")
            _add(found, step, mean=_floats(step.mean), std=_floats(step.std))
            continue
        _check("mean" not in found, step, "it comes behind Normalize")
        if _makes_floats(step):
            is_float = True
            continue
        _check(not is_float, step, "it comes behind what makes floats")
        _resized_or_cropped(step, found)
    for name, needed in (
        ("resize_size", "Resize"),
        ("crop_size", "CenterCrop"),
    ):
        if name not in found:
            raise TypeError(f"the transform has no {needed}; {REMEDY}")
    if not is_float:
        raise TypeError(f"the transform makes no floats; {REMEDY}")
    return {"mean": (0.0,) * 3, "std": (1.0,) * 3, **found}


def _steps(transform: Any) -> Iterator[Any]:
    if isinstance(transform, nn.Sequential):
        steps = list(transform)
    else:
        steps = list(transform.transforms)
    for step in steps:
        if isinstance(step, _KINDS):
            yield from _steps(step)
        else:
            yield step


def _makes_floats(step: Any) -> bool:
    if isinstance(step, _TO_FLOATS):
        return True
    if not isinstance(step, _OF_DTYPE):
        return False
    _check(step.dtype == torch.float32, step, f"its dtype is {step.dtype}")
    _check(getattr(step, "scale", True), step, "it does not scale")
    return True


def _resized_or_cropped(step: Any, found: dict[str, Any]) -> None:
    if isinstance(step, (v1.Resize, v2.Resize)):
        _check("crop_size" not in found, step, "it comes behind CenterCrop")
        _check(step.max_size is None, step, "it has a max_size")
        _add(
            found,
            step,
            resize_size=_side(step, "it changes the proportions of images"),
            interpolation=str(
                getattr(step.interpolation, "value", step.interpolation)
            ),
            antialias=bool(step.antialias),
        )
    elif isinstance(step, (v1.CenterCrop, v2.CenterCrop)):
        _check("resize_size" in found, step, "it comes before Resize")
        _add(found, step, crop_size=_side(step, "it is no square", 2))
    elif isinstance(step, _random_kinds()):
        _refuse(
            step,
            "it is random; give augment=Augmentation(…), which is the same "
            "wherever it is computed",
        )
    else:
        _refuse(step, "the store does not know it")


def _random_kinds() -> tuple[type, ...]:
    names = ("Random", "ColorJitter", "AutoAugment", "TrivialAugment")
    return tuple(
        kind
        for module in (v1, v2)
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and (name.startswith(names) or name in ("AugMix", "MixUp", "CutMix"))
    )


def _side(step: Any, otherwise: str, most: int = 1) -> int:
    sizes = [step.size] if isinstance(step.size, int) else list(step.size)
    _check(len(sizes) <= most and len(set(sizes)) == 1, step, otherwise)
    return int(sizes[0])


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _add(found: dict[str, Any], step: Any, **fields: Any) -> None:
    _check(not found.keys() & fields.keys(), step, "it comes twice")
    found.update(fields)


def _check(condition: bool, step: Any, why: str) -> None:
    if not condition:
        _refuse(step, why)


def _refuse(step: Any, why: str) -> None:
    text = " ".join(str(step).split())
    raise TypeError(
        f"the transform's {text:.100} cannot be taken: {why}; {REMEDY}"
    )
