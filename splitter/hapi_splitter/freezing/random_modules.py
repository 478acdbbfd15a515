"""Finds frozen modules that change what they compute at random in training.

They run in eval mode, so that this does not happen.  Dropout, drop path and
layers that are skipped are well known, and not meant.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hapi_splitter.freezing.model_checks import SplitWarning
from hapi_splitter.freezing.model_run import name_of
from hapi_splitter.freezing.region import Region

_RANDOM = frozenset(
    {
        *("bernoulli", "bernoulli_", "exponential_", "multinomial", "normal"),
        *("normal_", "rand", "rand_like", "randint", "randint_like", "randn"),
        *("randn_like", "random_", "randperm", "uniform_"),
    }
)
_KNOWN = ("drop", "stochastic_depth", "stochasticdepth")


def random_module(
    model: nn.Module, region: Region, samples: torch.Tensor
) -> str:
    """Returns a module of the region that draws random numbers in training.

    Args:
        model: the region's model; the caller preserves its state.
        region: runs the model up to its freeze point.
        samples: a batch.

    Returns:
        Its name, "" without one.
    """
    calls = _RandomCalls(model)
    # Models may fail in training mode on samples alone.
    with torch.no_grad(), suppress(Exception), calls:
        model.train()
        region(samples)
    return calls.module


def warn_of_random_module(name: str) -> None:
    """Warns of a module that :func:`random_module` has found."""
    if name:
        warnings.warn(
            f"the frozen module {name!r} changes what it computes at random "
            "in training mode, as augmentation of positions does; frozen "
            "modules run in eval mode, so that this does not happen; give "
            "augment= for images, or freeze before it",
            SplitWarning,
            stacklevel=3,
        )


class _RandomCalls(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names: dict[int, str] = {
            id(module): name for name, module in model.named_modules()
        }
        self.module = ""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A single number decides whether a layer is skipped.
        is_random = name_of(func) in _RANDOM and result.dim() > 0
        if is_random and not self.module:
            self.module = self._running()
        return result

    def _running(self) -> str:
        """Returns the innermost module that runs, "" for dropout."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            name = f"{frame.f_code.co_name} {type(owner).__name__}".lower()
            if any(known in name for known in _KNOWN):
                return ""
            module = self._names.get(id(owner), "")
            if module:
                return module
            frame = frame.f_back
        return ""
