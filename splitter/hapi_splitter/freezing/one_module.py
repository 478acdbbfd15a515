"""Splits one model at a freeze point.

The model's own forward is recorded, exported up to the point, and compared
with both parts.
"""

from __future__ import annotations

import inspect
from collections.abc import (
    Callable,
    Mapping,
)
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hapi_protocol.errors import FreezeError, cannot_freeze
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.boundaries import Boundaries, FreezePoint
from hapi_splitter.freezing.freeze_point import FreezePoints
from hapi_splitter.freezing.freeze_selector import (
    FreezeSpec,
)
from hapi_splitter.freezing.frontier import Shapes
from hapi_splitter.freezing.model_checks import (
    REMEDY,
    device_of,
    not_running,
)
from hapi_splitter.freezing.model_run import ModelRun, record
from hapi_splitter.freezing.module_shapes import recorded_shapes
from hapi_splitter.freezing.preserved_state import SavedState
from hapi_splitter.freezing.random_modules import (
    random_module,
)
from hapi_splitter.freezing.region import (
    Region,
    cast_input,
)
from hapi_splitter.freezing.region_graph import frozen_graph, own_changed
from hapi_splitter.freezing.replay import StepMemory
from hapi_splitter.freezing.run_pair import RunPair
from hapi_splitter.freezing.split_cache import CachedSplit, SplitCache
from hapi_splitter.freezing.tail_call import TailPlan, frozen_modules
from hapi_splitter.freezing.tail_check import TailCheck, same
from hapi_splitter.freezing.tail_planner import plan_tail
from hapi_splitter.graph.export import export_region
from hapi_splitter.inputs.named_arrays import NamedArrays
from hapi_splitter.inputs.sample_format import InputTransform, SampleForm
from hapi_splitter.user_code import failed_line

_BATCHES = (2, 3)


class ModuleSplitter:
    """Splits one model; the caller preserves its state.

    Attributes:
        memory: what the tail's calls have remembered in its last check.
        result: result of the model in it, in eval mode.
    """

    def __init__(
        self,
        model: nn.Module,
        form: SampleForm,
        transform: InputTransform | None,
        state: SavedState,
        progress: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._model = model
        self._form = form
        self._progress = progress
        self._transform = transform
        self._state = state
        self.memory = StepMemory()
        self.result: Any = None
        self._merged: frozenset[str] = frozenset()
        _check_signature(model, transform)
        samples = form.examples(max(_BATCHES)).to(device_of(model))
        self._samples = [samples[:n] for n in _BATCHES]

    @cached_property
    def points(self) -> FreezePoints:
        """Freeze points in a record of the model's forward."""
        self._progress("recording forwards")
        with self._state.preserved():
            self._model.eval()
            first, second = map(self._record, self._samples)
        pair = RunPair(first, second, _BATCHES)
        return FreezePoints(Boundaries(self._model, pair))

    def agrees(self, cached: CachedSplit, cache: SplitCache) -> bool:
        """Compares a cached split with the model, or discards it."""
        plan = cached.plan
        assert plan is not None, "only two modules have none"
        try:
            problem = self._problem(plan, cached.features)
        except Exception as error:  # of the user's code, or by the plan
            problem = f"does not run ({type(error).__name__}: {error})"
        if problem is not None:
            cache.discard(problem)
        return problem is None

    def _record(self, samples: torch.Tensor) -> ModelRun:
        args, kwargs = self._inputs(samples.clone())
        try:
            return record(self._model, args, kwargs)
        except Exception as error:  # the user's own code
            raise not_running(
                type(self._model).__name__,
                {**dict(enumerate(args)), **kwargs},
                error,
                f"it runs on {_BATCHES[0]} samples, so that its code depends "
                "on their number; make it accept any"
                if len(samples) > _BATCHES[0]
                else REMEDY,
            ) from error

    def _inputs(
        self, samples: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self._transform, NamedArrays):
            arrays = self._transform.separate(samples)
            return (), {
                name: cast_input(self._model, array)
                for name, array in arrays.items()
            }
        return (cast_input(self._model, samples),), {}

    def split(
        self, spec: FreezeSpec
    ) -> tuple[CachedSplit, Mapping[int, torch.Tensor]]:
        """Returns the parts at the first freeze point that is right, and the
        region's weights where the model has them."""
        failure: FreezeError | None = None
        for point in self.points.find(spec):
            try:
                graph, features, weights, shapes = self._graph(point, spec)
                plan = plan_tail(
                    self.points.boundaries,
                    self.points.tensors,
                    point,
                    spec,
                    shapes,
                    self._merged,
                )
                self._check_tail(plan, features[: _BATCHES[0]], spec)
                self._check_features(plan, features, spec)
                plan = replace(plan, random_module=self._random_module(point))
            except FreezeError as error:
                failure = error
            else:
                split = CachedSplit(graph, plan, spec.text, features[:1])
                return split, weights
        assert failure is not None, "there is a point, or find() fails"
        raise failure

    def _graph(
        self, point: FreezePoint, spec: FreezeSpec
    ) -> tuple[FrozenGraph, torch.Tensor, Mapping[int, torch.Tensor], Shapes]:
        """Exports the model up to a freeze point.

        Returns:
            The region, its features of the larger batch (that of its export
            is the smaller one), its weights where the model has them, and
            shapes of the results of modules.
        """
        region = Region(self._model, point.positions, self._inputs)
        self._progress("exporting the frozen layers")
        with self._state.preserved(), torch.no_grad():
            self._model.eval()
            with recorded_shapes(self._model) as shapes:
                exported = export_region(region, self._samples[0], "model")
            if own_changed(exported.weights, self._state):
                self._merged = frozenset(
                    name
                    for name, tensor in self._model.named_parameters()
                    if self._state.is_changed(tensor)
                )
            graph = frozen_graph(
                exported, self._form, self._transform, spec.text
            )
            with torch.autocast(device_of(self._model).type, enabled=False):
                features = graph.suffix(0)(self._samples[1])
        return graph, features, exported.weights, shapes

    def _check_features(
        self, plan: TailPlan, features: torch.Tensor, spec: FreezeSpec
    ) -> None:
        """Compares features with those of the model as a plain loop runs it:
        in training mode, but for what is frozen, and with gradients."""
        self._progress("comparing the frozen layers with the model")
        region = Region(self._model, plan.positions, self._inputs)
        with self._state.preserved(), torch.enable_grad():
            self._model.train()
            for module in frozen_modules(self._model, plan):
                module.eval()
            first, second = (
                same(
                    features[: len(samples)], region(samples.clone()).detach()
                )
                for samples in self._samples
            )
        if not first or not second:
            raise cannot_freeze(
                f"freeze {spec.text!r}: the frozen modules, in eval mode, "
                "compute something else "
                + (
                    "in their second call, as code does that counts its calls "
                    "or draws random numbers; "
                    if first
                    else "if the model is in training mode or gradients are "
                    "on, as code does that reads another module's 'training' "
                    "or torch.is_grad_enabled(); "
                )
                + "freeze an earlier module",
            )

    def _random_module(self, point: FreezePoint) -> str:
        region = Region(self._model, point.positions, self._inputs)
        with self._state.preserved():
            return random_module(self._model, region, self._samples[0].clone())

    def _check_tail(
        self, plan: TailPlan, features: torch.Tensor, spec: FreezeSpec
    ) -> None:
        cause: Exception | None = None
        try:
            problem = self._problem(plan, features)
        except FreezeError as error:
            message = f"freeze {spec.text!r}: {error.message}"
            raise FreezeError(error.code, message) from error
        except Exception as error:  # the user's own code
            cause = error
            problem = (
                "the code after it does not run without the frozen modules"
                f"{failed_line(error)}: {type(error).__name__}: "
                f"{str(error)[:500]}"
            )
        if problem is not None:
            raise cannot_freeze(
                f"freeze {spec.text!r}: {problem}; or give two modules "
                "(frozen, tail) instead of the model: the second takes the "
                "first one's output",
            ) from cause

    def _problem(self, plan: TailPlan, features: torch.Tensor) -> str | None:
        self._progress("comparing the tail with the model")
        check = TailCheck(
            self._model, plan, self._samples[0], self._inputs, self._state
        )
        self.memory = check.memory
        problem = check.problem(features)
        self.result = check.result
        return problem


def _check_signature(
    model: nn.Module, transform: InputTransform | None
) -> None:
    if isinstance(transform, NamedArrays):
        return  # a wrong name is an error of the call
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except ValueError:
        return  # no signature to read
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind
        not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if len(required) > 1:
        raise FreezeError(
            "cannot_trace",
            f"{type(model).__name__} takes {len(required)} tensors; the model "
            "must take one batch of samples, or give a transform NamedArrays "
            "with an array for each",
        )
