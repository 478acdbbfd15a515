"""Names of the transforms from images to samples.

``eval`` is the package's own transform.  ``train;seed=S;epoch=E`` adds random
augmentation, which the seed, the epoch and the sample's key determine
(``hapi_splitter.inputs.augmentation``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hapi_protocol.errors import AnnotationError

EVAL = "eval"
TRAIN = "train"
TRANSFORMS = (EVAL, TRAIN)
"""Kinds of transforms, the default first."""

MAX_NUMBER = 2**63 - 1
"""Maximum seed and epoch."""

FORMS = (EVAL, f"{TRAIN};seed=S;epoch=E")
"""Text forms of the transforms."""

_NUMBER = "(0|[1-9][0-9]{0,18})"
_TRAINING = re.compile(f"{TRAIN};seed={_NUMBER};epoch={_NUMBER}")


@dataclass(frozen=True)
class Training:
    """A random transform; ``str()`` gives its text.

    Attributes:
        seed: 0 to :data:`MAX_NUMBER`.
        epoch: 0 to :data:`MAX_NUMBER`.

    Raises:
        ValueError: names the number that is out of range.
    """

    seed: int
    epoch: int

    def __post_init__(self) -> None:
        for name in ("seed", "epoch"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_NUMBER:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number from 0 "
                    "to 2**63 - 1"
                )

    def __str__(self) -> str:
        return f"{TRAIN};seed={self.seed};epoch={self.epoch}"


def transform_text(training: Training | None) -> str:
    """The text of a transform; ``eval`` for None."""
    return EVAL if training is None else str(training)


def parse_transform(text: str, what: str = "transform") -> Training | None:
    """Parses the text of a transform; returns None for ``eval``.

    Each transform has one text only: no spaces, leading zeros or signs.

    Args:
        text: one of :data:`FORMS`.
        what: name of the value in the error.

    Raises:
        AnnotationError: ``unknown_transform``, names what is allowed.
    """
    if text == EVAL:
        return None
    match = _TRAINING.fullmatch(text)
    numbers = [int(digits) for digits in match.groups()] if match else []
    if not numbers or max(numbers) > MAX_NUMBER:
        raise AnnotationError(
            "unknown_transform",
            f"{what} is {text!r:.120}; allowed: {', '.join(FORMS)}, where S "
            "and E are whole numbers up to 2**63 - 1, without leading zeros",
            details={"value": text[:120], "allowed": list(FORMS)},
        )
    return Training(*numbers)
