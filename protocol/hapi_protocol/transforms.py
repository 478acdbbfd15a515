"""How images become samples: names of the transforms.

``eval`` is the package's own transform.  ``train;seed=S;epoch=E`` draws at
random beside it; what it draws for a sample is fixed by the seed, the epoch
and the sample's key (``hapi_splitter.inputs.augmentation``).
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
"""Of seeds and epochs."""

FORMS = (EVAL, f"{TRAIN};seed=S;epoch=E")
"""As they are written."""

_NUMBER = "(0|[1-9][0-9]{0,18})"
_TRAINING = re.compile(f"{TRAIN};seed={_NUMBER};epoch={_NUMBER}")


@dataclass(frozen=True)
class Training:
    """A random transform; ``str()`` gives its text.

    Attributes:
        seed: 0 to :data:`MAX_NUMBER`.
        epoch: likewise.

    Raises:
        ValueError: naming the number that is out of range.
    """

    seed: int
    epoch: int

    def __post_init__(self) -> None:
        for name in ("seed", "epoch"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_NUMBER:
                raise ValueError(
                    f"{name} is {value!r}; a whole number from 0 to 2**63 - 1"
                )

    def __str__(self) -> str:
        return f"{TRAIN};seed={self.seed};epoch={self.epoch}"


def transform_text(training: Training | None) -> str:
    """The text that :func:`parse_transform` reads; of None it is ``eval``."""
    return EVAL if training is None else str(training)


def parse_transform(text: str, what: str = "transform") -> Training | None:
    """The transform that a text names; None for ``eval``.

    A text has one form only: no spaces, no leading zeros, no signs.

    Args:
        text: one of :data:`FORMS`.
        what: the thing that has this value, for the message.

    Raises:
        AnnotationError: ``unknown_transform``, naming what is allowed.
    """
    if text == EVAL:
        return None
    found = _TRAINING.fullmatch(text)
    numbers = [int(digits) for digits in found.groups()] if found else []
    if not numbers or max(numbers) > MAX_NUMBER:
        raise AnnotationError(
            "unknown_transform",
            f"{what} is {text!r:.120}; allowed: {', '.join(FORMS)}, where S "
            "and E are whole numbers up to 2**63 - 1, without leading zeros",
            details={"value": text[:120], "allowed": list(FORMS)},
        )
    return Training(*numbers)
