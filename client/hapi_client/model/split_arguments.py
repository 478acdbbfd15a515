"""Arguments by which a model is split and its cut is chosen, checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hapi_protocol.errors import ClientError
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.sample_format import InputTransform

AUTO = "auto"
FREEZE = "freeze"
STREAM = "stream"
PRECISIONS = {
    AUTO: None,
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Values of ``precision``, and the dtype of autocast."""
IMAGENET_TRANSFORM = ImageTransform(resize_size=256, crop_size=224)
"""torchvision's usual evaluation transform, which is the default."""


def check_precision(precision: str) -> None:
    """Refuses another value than those of :data:`PRECISIONS`.

    Raises:
        ClientError: ``bad_configuration`` naming the allowed values.
    """
    if precision not in PRECISIONS:
        raise ClientError(
            "bad_configuration",
            f"precision is {precision!r}; give one of {', '.join(PRECISIONS)}",
        )


def check_cut(cut: int | str, num_cuts: int | None = None) -> None:
    """Refuses a value that is no cut of a model of ``num_cuts`` cuts.

    Raises:
        ClientError: ``bad_configuration`` naming the allowed values.
    """
    is_number = type(cut) is int and 0 <= cut <= (num_cuts or cut)
    if not is_number and cut not in (AUTO, FREEZE, STREAM):
        raise ClientError(
            "bad_configuration",
            f"cut is {cut!r}; give 'auto' to plan, 'stream' or 0 to push "
            f"nothing down, a number from 1 to {num_cuts or 'the last cut'}, "
            "or 'freeze' for the last",
        )


def input_transform(
    transform: Any,
    augment: Augmentation | None = None,
    image: str | None = None,
    exif: str | None = None,
) -> InputTransform:
    """Makes the input transform of the options of a user.

    Raises:
        ClientError: ``bad_configuration`` naming the allowed values.
    """
    if augment is not None and not isinstance(augment, Augmentation):
        raise ClientError(
            "bad_configuration",
            f"augment is {augment!r:.80}; give an Augmentation",
        )
    if isinstance(transform, ArrayTransform):
        if augment is not None:
            raise ClientError(
                "bad_configuration",
                "augment is given for arrays, but only images can be "
                "augmented; leave it out, or augment the input of the tail",
            )
        for name, value in {"image": image, "exif": exif}.items():
            if value is not None:
                raise ClientError(
                    "bad_configuration",
                    f"{name} is {value!r}, but the transform takes arrays; "
                    "leave it out",
                )
        return transform
    try:
        if transform is None:
            image_transform = IMAGENET_TRANSFORM
        elif isinstance(transform, ImageTransform):
            image_transform = transform
        else:
            image_transform = ImageTransform.from_preset(transform)
        return replace(
            image_transform,
            augmentation=augment or image_transform.augmentation,
            member=image or image_transform.member,
            exif=exif or image_transform.exif,
        )
    except (TypeError, ValueError) as error:
        raise ClientError(
            "bad_configuration",
            f"{error}; or give weights.transforms(), or an ArrayTransform "
            "for arrays",
        ) from error


def parse_device(device: torch.device | str) -> torch.device:
    """Returns a device of this machine, and allocates on it once.

    Raises:
        ClientError: ``bad_configuration`` for an unavailable device.
    """
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ClientError(
            "bad_configuration",
            f"device is {str(device)!r}: {error}; give 'cpu', or a GPU of "
            "this machine, 'cuda' or 'cuda:1'",
        ) from error
    return parsed
