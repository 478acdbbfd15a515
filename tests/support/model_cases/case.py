"""One case of the table: a model, a freeze point and the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hapi_splitter.freezing.freeze_selector import Freeze
from hapi_splitter.inputs.array_transform import ArrayTransform
from reference_models import randomise_statistics

IMAGE = (3, 32, 32)
S = (3, 8, 8)
LARGE_IMAGE = (3, 64, 64)
NUM_IDS = 64
IDS = ArrayTransform((12,), "int64")


def _leave(model: nn.Module) -> None:
    """Changes nothing."""


@dataclass(frozen=True)
class ModelCase:
    """A model, a freeze point, and what the splitter answers.

    Args:
        name: of the model and the way of using it.
        build: builds the model; the seed is set before.
        freeze: None for the default freeze point.
        sample: shape of float32 samples, or a transform of arrays.
        error: code of the refusal; "" if the model is accepted.
        message: part of the refusal's message, a regular expression.
        later: True if the model may also be accepted: a limit that is to go.
        change: changes a model between two training steps.
    """

    name: str
    build: Callable[[], nn.Module]
    freeze: Freeze | None
    sample: tuple[int, ...] | ArrayTransform = IMAGE
    error: str = ""
    message: str = ""
    later: bool = False
    change: Callable[[Any], None] = _leave

    @property
    def id(self) -> str:
        """Name for the test's report."""
        if callable(self.freeze):
            return f"{self.name}@function"
        names = self.freeze if isinstance(self.freeze, list) else [self.freeze]
        return f"{self.name}@{'+'.join(name or 'default' for name in names)}"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``split`` that describe the samples."""
        if isinstance(self.sample, ArrayTransform):
            return {"transform": self.sample}
        return {"sample_shape": self.sample}

    def model(self) -> nn.Module:
        """Returns the model with the same random weights at every call.

        No weight is zero or one, which would hide operations.
        """
        torch.manual_seed(0)
        model = self.build()
        with torch.no_grad():
            for parameter in model.parameters():
                if not is_lazy(parameter):
                    parameter.add_(0.05 * torch.randn_like(parameter))
        randomise_statistics(model)
        return model

    def samples(self, count: int) -> torch.Tensor:
        """Returns samples ``[count, ...]``, other ones for each count."""
        generator = torch.Generator().manual_seed(count)
        if isinstance(self.sample, tuple):
            return torch.randn(count, *self.sample, generator=generator)
        shape = (count, *self.sample.shape)
        if self.sample.dtype == "float32":
            return torch.randn(shape, generator=generator)
        return torch.randint(0, NUM_IDS, shape, generator=generator)


def accepted(
    name: str,
    build: Callable[[], nn.Module],
    freezes: str | Freeze,
    sample: tuple[int, ...] | ArrayTransform = IMAGE,
    change: Callable[[Any], None] = _leave,
) -> list[ModelCase]:
    """Returns one case for each freeze point.

    Args:
        name: see :class:`ModelCase`.
        build: see :class:`ModelCase`.
        freezes: names between blanks; ``default`` for the default freeze
            point, ``a+b`` for a list of names. Or one function.
        sample: see :class:`ModelCase`.
        change: see :class:`ModelCase`.
    """
    points = freezes.split() if isinstance(freezes, str) else [freezes]
    return [
        ModelCase(name, build, _parsed(freeze), sample, change=change)
        for freeze in points
    ]


def refused(
    name: str,
    build: Callable[[], nn.Module],
    freeze: str,
    error: str,
    message: str,
    sample: tuple[int, ...] | ArrayTransform = IMAGE,
    later: bool = False,
) -> list[ModelCase]:
    """Returns one case that ends in an error."""
    return [
        ModelCase(name, build, _parsed(freeze), sample, error, message, later)
    ]


def _parsed(freeze: str | Freeze) -> Freeze | None:
    if not isinstance(freeze, str) or "+" not in freeze:
        return None if freeze == "default" else freeze
    return freeze.split("+")


def a(name: str, build: Any, freezes: Any, **options: Any) -> list[ModelCase]:
    """Returns accepted cases of a user's model on small images."""
    return accepted(f"own {name}", build, freezes, **{"sample": S, **options})


def r(
    name: str,
    build: Any,
    freeze: str,
    error: str,
    message: str,
    **options: Any,
) -> list[ModelCase]:
    """Returns a refused case of a user's model on small images."""
    options = {"sample": S, **options}
    return refused(f"own {name}", build, freeze, error, message, **options)


def unheld(
    name: str, build: Any, freeze: str, **options: Any
) -> list[ModelCase]:
    """Returns a case with an operator that packages may not hold."""
    return r(
        name,
        build,
        freeze,
        "unknown_op",
        r"operator aten\..* in ",
        later=True,
        **options,
    )
