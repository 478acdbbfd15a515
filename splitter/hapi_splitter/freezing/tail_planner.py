"""Makes the plan of a tail from the records of a model's forward."""

from __future__ import annotations

import warnings
from collections.abc import Set

from torch import nn

from hapi_protocol.errors import cannot_freeze
from hapi_splitter.freezing.boundaries import Boundaries, FreezePoint
from hapi_splitter.freezing.freeze_selector import FreezeSpec
from hapi_splitter.freezing.frontier import Frontier, Shapes
from hapi_splitter.freezing.model_checks import (
    SplitWarning,
    hooks_of,
    is_users_hook,
)
from hapi_splitter.freezing.model_tensors import ModelTensors
from hapi_splitter.freezing.skipped_steps import SkippedSteps
from hapi_splitter.freezing.tail_call import TailPlan


def plan_tail(
    boundaries: Boundaries,
    tensors: ModelTensors,
    point: FreezePoint,
    spec: FreezeSpec,
    shapes: Shapes,
    merged: Set[str],
) -> TailPlan:
    """Returns the model's forward after a point, as plain values.

    Args:
        boundaries: where the frozen part can end.
        tensors: parameters and buffers of the model.
        point: where the frozen part ends.
        spec: what the user asks for.
        shapes: shapes of the results of modules, as the export shows them.
        merged: names of tensors that the mode changes.

    Raises:
        FreezeError: ``cannot_freeze`` if frozen modules leave something
            behind that the tail would not renew.
    """
    frontier = boundaries.proven_frontier(point.step, shapes)
    _check_kept(boundaries.model, frontier)
    begin = next(iter(boundaries.run.events.values()))
    steps, entries = SkippedSteps(frontier).without(
        [position.number for position in point.positions]
    )
    inside = tuple(f"{name}." for name in frontier.replaced_modules)
    frozen = tensors.frozen(spec, point.step, inside)
    return TailPlan(
        point.positions,
        entries,
        steps,
        frontier.stand_ins(begin),
        begin.spec,
        tuple(dict.fromkeys(e.module for e in frontier.begins.values())),
        tuple(sorted(frontier.run_modules)),
        tuple(
            name
            for name in sorted(frozen & tensors.parameters.keys())
            if not name.startswith(inside)
        ),
        frozenset(frozen),
        tuple(tensors.watched(frozen - merged, inside)),
    )


def _check_kept(model: nn.Module, frontier: Frontier) -> None:
    """Refuses hooks and attributes of frozen modules that keep tensors,
    and warns of other hooks of the user's."""
    modules = dict(model.named_modules(remove_duplicate=False))
    hooked = {
        name
        for name in frontier.replaced_modules
        if modules[name]._forward_hooks
    }
    kept = frontier.kept(hooked)
    if kept is not None:
        raise cannot_freeze(
            f"a tensor that {kept!r} computes is kept after the forward, "
            "by a forward hook or in an attribute, where a loss may read "
            "it; frozen modules do not run in training, so that it would "
            "stay what it was; remove the hook or the attribute, or "
            f"freeze before {kept!r}",
        )
    others = [
        name
        for replaced in frontier.replaced_modules
        for name, module in modules[replaced].named_modules(prefix=replaced)
        if any(map(is_users_hook, hooks_of(module)))
    ]
    if others:
        warnings.warn(
            f"hooks of the frozen module {others[0]!r} do not run in "
            "training: what they return is in the features, but what "
            "else they do is not done; remove them if a loss or a report "
            "needs that",
            SplitWarning,
            stacklevel=2,
        )
