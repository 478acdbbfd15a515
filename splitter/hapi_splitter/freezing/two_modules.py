"""Splits a model that the user gives as two modules: frozen, tail."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
)
from typing import Any

import torch
from torch import nn

from hapi_protocol.errors import cannot_freeze
from hapi_splitter.freezing.model_checks import (
    check_splittable,
    device_of,
    not_running,
)
from hapi_splitter.freezing.preserved_state import SavedState
from hapi_splitter.freezing.region import (
    CastInput,
    autocasts,
    cast_input,
)
from hapi_splitter.freezing.region_graph import frozen_graph, own_changed
from hapi_splitter.freezing.split_cache import CachedSplit, SplitCache
from hapi_splitter.freezing.tail_check import same
from hapi_splitter.graph.export import export_region
from hapi_splitter.inputs.sample_format import SampleForm

DESCRIPTION = "(frozen, tail)"
_BATCH = 2


def check_two_modules(
    modules: object, freeze: object
) -> tuple[nn.Module, nn.Module]:
    """Returns the two modules if they are usable as frozen part and tail.

    Raises:
        FreezeError: ``cannot_freeze``.
    """
    if (
        not isinstance(modules, tuple | list)
        or len(modules) != 2
        or not all(isinstance(module, nn.Module) for module in modules)
    ):
        raise cannot_freeze(
            f"model must be a module, or two modules {DESCRIPTION}, not "
            f"{modules!r:.80}",
        )
    if freeze is not None:
        raise cannot_freeze(
            f"freeze {freeze!r:.80} cannot be combined with two modules "
            f"{DESCRIPTION}; leave it out",
        )
    frozen, tail = modules
    for module in modules:
        check_splittable(module)
    _check_shared(frozen, tail)
    return frozen, tail


def _check_shared(frozen: nn.Module, tail: nn.Module) -> None:
    frozen_names = {
        id(parameter): name
        for name, parameter in frozen.named_parameters(remove_duplicate=False)
    }
    for name, parameter in tail.named_parameters(remove_duplicate=False):
        if id(parameter) in frozen_names:
            raise cannot_freeze(
                f"the tail's parameter {name!r} is the frozen module's "
                f"{frozen_names[id(parameter)]!r}; it cannot be both frozen "
                "and trained",
            )


def check_result(frozen: nn.Module, example: torch.Tensor) -> torch.Tensor:
    """Returns the one tensor that a module in eval mode yields for a batch.

    Raises:
        FreezeError: ``cannot_trace`` if it does not run, ``cannot_freeze`` if
            it yields something else.
    """
    try:
        with torch.no_grad():
            result = frozen(example)
    except Exception as error:  # the user's own code
        name = f"the frozen module {type(frozen).__name__}"
        raise not_running(name, {0: example}, error) from error
    if not isinstance(result, torch.Tensor):
        raise cannot_freeze(
            f"the frozen module {type(frozen).__name__} returns a "
            f"{type(result).__name__}, and only one tensor can be sent; wrap "
            "it in a module that returns that tensor",
        )
    return result


def check_accepts(
    tail: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Returns what a tail in eval mode computes from features of a shape.

    Raises:
        FreezeError: ``cannot_freeze`` with the tail's own error.
    """
    features = torch.zeros(_BATCH, *shape, dtype=dtype, device=device)
    try:
        with torch.no_grad():
            return tail(features)
    except Exception as error:  # the user's own code
        raise cannot_freeze(
            f"the tail {type(tail).__name__} does not accept the frozen "
            f"module's output, {dtype} samples of shape {shape}: "
            f"{str(error)[:500]}",
        ) from error


def split_two_modules(
    frozen: nn.Module,
    tail: nn.Module,
    form: SampleForm,
    cache: SplitCache,
    state: SavedState,
    exporting: Callable[[], None],
) -> tuple[CachedSplit, Any]:
    """Returns the split, and what the tail yields for zeros as features."""
    example = form.examples(_BATCH).to(device_of(frozen))
    frozen.eval()
    cast = cast_input(frozen, example)

    def agrees(cached: CachedSplit) -> bool:
        with torch.no_grad():
            result = frozen(cast[:1])
        if same(result, cached.features):
            return True
        cache.discard("computes something else than the module")
        return False

    def make() -> tuple[CachedSplit, Mapping[int, torch.Tensor]]:
        result = check_result(frozen, cast)
        if cast is example and not autocasts():
            exported = export_region(frozen, example)
        else:
            exported = export_region(CastInput(frozen), example, "model")
        own_changed(exported.weights, state)
        graph = frozen_graph(exported, form, cache.transform, DESCRIPTION)
        features = result[:1].clone()
        split = CachedSplit(graph, None, DESCRIPTION, features)
        return split, exported.weights

    split = cache.found_or_made(agrees, make, exporting)
    tail.eval()
    last = split.frozen.values[-1]
    result = check_accepts(tail, last.shape[1:], last.dtype, example.device)
    return split, result
