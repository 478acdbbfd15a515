"""Splits a user's model into a frozen region and a trainable tail.

The model's own forward is recorded (:mod:`hapi_splitter.freezing.model_run`).
It shows where the requested modules end and which tensors are needed after
them. The freeze point is there, moved over subsequent deterministic operations
without parameters: they cost the storage side little and mostly shrink the
features. The part before it is exported (:mod:`hapi_splitter.graph.export`) in
eval mode; after it the model's own code runs
(:class:`hapi_splitter.freezing.tail.Tail`). Both are compared with the model
before they are returned. Samples are float32; a model of 16 bits, which takes
only images of its own dtype, gets them converted, as from its user.
"""

from __future__ import annotations

import inspect
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi_protocol.errors import FreezeError, PackageError, cannot_freeze
from hapi_splitter.cuts import FrozenGraph, cuttable
from hapi_splitter.freezing import two_modules
from hapi_splitter.freezing.boundaries import Boundaries, FreezePoint
from hapi_splitter.freezing.freeze_point import FreezePoints
from hapi_splitter.freezing.freeze_selector import (
    AUTO,
    Freeze,
    FreezeSpec,
    parse_freeze,
)
from hapi_splitter.freezing.frontier import Shapes
from hapi_splitter.freezing.frozen_attributes import FrozenAttributes
from hapi_splitter.freezing.frozen_weights import FrozenWeights
from hapi_splitter.freezing.model_checks import (
    REMEDY,
    check_splittable,
    device_of,
    not_running,
    unwrapped,
)
from hapi_splitter.freezing.model_run import ModelRun, record
from hapi_splitter.freezing.module_shapes import recorded_shapes
from hapi_splitter.freezing.preserved_state import SavedState, preserved_state
from hapi_splitter.freezing.random_modules import (
    random_module,
    warn_of_random_module,
)
from hapi_splitter.freezing.region import (
    CastInput,
    Region,
    autocasts,
    cast_input,
)
from hapi_splitter.freezing.replay import StepMemory
from hapi_splitter.freezing.run_pair import RunPair
from hapi_splitter.freezing.split_cache import CachedSplit, SplitCache
from hapi_splitter.freezing.split_store import disk_store
from hapi_splitter.freezing.tail import Tail
from hapi_splitter.freezing.tail_call import TailPlan, frozen_modules
from hapi_splitter.freezing.tail_check import TailCheck, same
from hapi_splitter.freezing.tail_planner import plan_tail
from hapi_splitter.graph.export import ExportedRegion, export_region
from hapi_splitter.graph.shapes import infer
from hapi_splitter.inputs.named_arrays import NamedArrays
from hapi_splitter.inputs.sample_format import InputTransform, SampleForm
from hapi_splitter.package.writer import digest_of
from hapi_splitter.user_code import failed_line, traced_line

DEFAULT_SAMPLE_SHAPE = (3, 224, 224)
_BATCHES = (2, 3)


@dataclass(frozen=True)
class SplitModel:
    """A model in two parts: ``tail(frozen output)`` equals the model.

    Args:
        frozen: the frozen region; its weights share memory with the
            model's parameters until the model moves to another device.
        tail: the rest, with the model's own submodules and parameters.
        freeze: the requested freeze: module names, or ``(frozen, tail)``.
        frozen_weights: weights of the model, which may not change from now on.
        sends_integers: True if integers travel with the features, such as a
            mask, which a lossy encoding would change.
        num_outputs: numbers that the tail yields for a sample; None if not a
            vector.
    """

    frozen: FrozenGraph
    tail: nn.Module
    freeze: str
    frozen_weights: FrozenWeights
    sends_integers: bool = False
    num_outputs: int | None = None


def split(
    model: nn.Module | tuple[nn.Module, nn.Module],
    freeze: Freeze | None = None,
    *,
    transform: InputTransform | None = None,
    sample_shape: Sequence[int] | None = None,
    cache_directory: str | Path | None = None,
    exporting: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda phase: None,
) -> SplitModel:
    """Splits a model into a frozen region and a tail.

    Neither the model nor any random state changes, mode and caches included.

    Args:
        model: a module of one tensor ``[B, *sample_shape]``. Of a compiled
            model the original is split; compile the tail instead. Or two
            modules ``(frozen, tail)``, of which the second takes the one
            tensor that the first yields.
        freeze: dotted name of a submodule: everything that runs up to its end
            is frozen. Or a list of names: exactly these modules are frozen.
            Or a function ``freeze(name, module)`` that returns True for the
            modules to freeze; it is called for modules with parameters of
            their own (the model itself has the name ``""``). Or ``"auto"``:
            all that runs before the first parameter with ``requires_grad``.
            None for two modules.
        transform: input transform from stored bytes to a sample, or None.
        sample_shape: shape of one sample; the default is the transform's, or
            ``(3, 224, 224)`` without one.
        cache_directory: directory in which splits are cached, so that that of
            an equal model takes no export
            (:func:`hapi_splitter.freezing.split_store.disk_store`).
        exporting: called if the split is not cached, before it is made,
            which takes seconds.
        progress: called with each phase that begins.

    Raises:
        FreezeError: ``unknown_freeze`` naming the nearest valid names;
            ``cannot_freeze`` naming the tensors that would have to be sent, or
            parameters that would be both frozen and trained; ``cannot_trace``
            or ``unknown_op`` with torch's reason.
    """
    form = _sample_form(transform, sample_shape)
    if not isinstance(model, nn.Module):
        frozen, tail = two_modules.check_two_modules(model, freeze)
        frozen = unwrapped(frozen)
        cache = _cache(frozen, transform, form, None, cache_directory)
        with preserved_state(frozen, tail) as state, _uncompiled():
            before = FrozenAttributes(frozen, ("",), {})
            cached, outputs = _split_two_modules(
                frozen, tail, form, cache, state, exporting
            )
            accepted = dict.fromkeys(before.changes())
        attributes = FrozenAttributes(frozen, ("",), accepted)
        weights = FrozenWeights(frozen, frozen.state_dict(), attributes)
        return SplitModel(
            cached.frozen, tail, cached.freeze, weights, num_outputs=outputs
        )
    model = unwrapped(model)
    check_splittable(model)
    spec = parse_freeze(model, freeze)
    cache = _cache(model, transform, form, spec, cache_directory)
    with preserved_state(model) as state, _uncompiled():
        splitter = _Splitter(model, form, transform, state, progress)

        def make() -> tuple[CachedSplit, Mapping[int, torch.Tensor]]:
            is_automatic = freeze == AUTO and AUTO not in dict(
                model.named_modules()
            )
            return splitter.split(
                parse_freeze(model, splitter.points.automatic())
                if is_automatic
                else spec
            )

        split = cache.found_or_made(
            partial(splitter.agrees, cache=cache), make, exporting
        )
    plan = split.plan
    assert plan is not None, "only two modules have none"
    dtypes = [position.form.dtype for position in plan.positions]
    warn_of_random_module(plan.random_module)
    tail = Tail(model, plan, splitter.memory)
    return SplitModel(
        split.frozen,
        tail,
        split.freeze,
        tail.frozen_weights,
        not all(dtype.is_floating_point for dtype in dtypes),
        _num_outputs(splitter.result),
    )


def _cache(
    module: nn.Module,
    transform: InputTransform | None,
    form: SampleForm,
    spec: FreezeSpec | None,
    cache_directory: str | Path | None,
) -> SplitCache:
    facts = {
        "freeze": spec and [spec.names, spec.exact, spec.from_function],
        "sample": [form.shape, str(form.dtype)],
    }
    return SplitCache(module, transform, facts, disk_store(cache_directory))


def default_freeze(
    model: nn.Module,
    *,
    transform: InputTransform | None = None,
    sample_shape: Sequence[int] | None = None,
) -> str:
    """Returns the freeze that leaves only the last linear layer to train.

    Args:
        model: the model to split.
        transform: input transform, or None.
        sample_shape: shape of one sample; see :func:`split`.

    Raises:
        FreezeError: if the model has no such freeze point.
    """
    model, form = unwrapped(model), _sample_form(transform, sample_shape)
    check_splittable(model)
    with preserved_state(model) as state, _uncompiled():
        return _Splitter(model, form, transform, state).points.default_freeze()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Runs compiled submodules, and attention, by their Python code."""
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


class _Splitter:
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
        self._samples = [
            form.examples(n).to(device_of(model)) for n in _BATCHES
        ]

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
                self._check_tail(plan, features[0], spec)
                self._check_features(plan, features[1], spec)
                plan = replace(plan, random_module=self._random_module(point))
            except FreezeError as error:
                failure = error
            else:
                split = CachedSplit(graph, plan, spec.text, features[0][:1])
                return split, weights
        assert failure is not None, "there is a point, or find() fails"
        raise failure

    def _graph(
        self, point: FreezePoint, spec: FreezeSpec
    ) -> tuple[
        FrozenGraph, list[torch.Tensor], Mapping[int, torch.Tensor], Shapes
    ]:
        """Exports the model up to a freeze point.

        Returns:
            The region, its features of both batches, its weights where the
            model has them, and shapes of the results of modules.
        """
        region = Region(self._model, point.positions, self._inputs)
        self._progress("exporting the frozen layers")
        with self._state.preserved(), torch.no_grad():
            self._model.eval()
            with recorded_shapes(self._model) as shapes:
                exported = export_region(region, self._samples[0], "model")
            if _own_changed(exported.weights, self._state):
                self._merged = frozenset(
                    name
                    for name, tensor in self._model.named_parameters()
                    if self._state.is_changed(tensor)
                )
            graph = _frozen_graph(
                exported, self._form, self._transform, spec.text
            )
            with torch.autocast(device_of(self._model).type, enabled=False):
                features = [*map(graph.suffix(0), self._samples)]
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
            results = [region(self._samples[1].clone()) for _ in range(2)]
        first, second = (same(features, result.detach()) for result in results)
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


def _split_two_modules(
    frozen: nn.Module,
    tail: nn.Module,
    form: SampleForm,
    cache: SplitCache,
    state: SavedState,
    exporting: Callable[[], None],
) -> tuple[CachedSplit, int | None]:
    """Returns the split, and the number of the tail's outputs if a vector."""
    example = form.examples(_BATCHES[0]).to(device_of(frozen))
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
        result = two_modules.check_result(frozen, cast)
        if cast is example and not autocasts():
            exported = export_region(frozen, example)
        else:
            exported = export_region(CastInput(frozen), example, "model")
        _own_changed(exported.weights, state)
        graph = _frozen_graph(
            exported, form, cache.transform, two_modules.DESCRIPTION
        )
        features = result[:1].clone()
        split = CachedSplit(graph, None, two_modules.DESCRIPTION, features)
        return split, exported.weights

    split = cache.found_or_made(agrees, make, exporting)
    tail.eval()
    last = split.frozen.values[-1]
    result = two_modules.check_accepts(
        tail, last.shape[1:], last.dtype, example.device
    )
    return split, _num_outputs(result)


def _own_changed(
    weights: MutableMapping[int, torch.Tensor], state: SavedState
) -> bool:
    """Copies weights that the model has only in eval mode, as merged ones.

    Returns:
        True if there are such weights.
    """
    changed = [n for n, weight in weights.items() if state.is_changed(weight)]
    weights.update({node: weights[node].clone() for node in changed})
    return bool(changed)


def _num_outputs(result: Any) -> int | None:
    is_vector = isinstance(result, torch.Tensor) and result.dim() == 2
    return result.shape[1] if is_vector else None


def _frozen_graph(
    exported: ExportedRegion,
    form: SampleForm,
    transform: InputTransform | None,
    freeze: str,
) -> FrozenGraph:
    try:
        values = infer(
            exported.program, exported.weights, form, names=exported.names
        )
    except PackageError as error:
        lines = [
            traced_line(trace)
            for name, trace in zip(
                exported.names, exported.traces, strict=True
            )
            if f" in {name}: " in error.message
        ]
        if "would mix samples" in error.message:
            lines.append(", so that features would depend on the batch")
        raise cannot_freeze(
            f"freeze {freeze!r}: packages cannot hold {error.message}"
            f"{''.join(lines)}; freeze before it, or use other operators",
        ) from error
    if not cuttable(values[-1]):
        raise cannot_freeze(
            f"freeze {freeze!r}: the tensor after {exported.names[-1]!r} is "
            "not a batch of floating-point samples and cannot be sent",
        )
    frozen = FrozenGraph(
        exported.program,
        {i: weight.cpu() for i, weight in exported.weights.items()},
        values,
        exported.names,
        transform,
        "",
    )
    frozen.digest = digest_of(frozen)
    return frozen


def _sample_form(
    transform: InputTransform | None, shape: Sequence[int] | None
) -> SampleForm:
    if transform is None:
        return SampleForm(
            tuple(DEFAULT_SAMPLE_SHAPE if shape is None else shape)
        )
    if shape is not None and tuple(shape) != transform.output_shape:
        raise cannot_freeze(
            f"sample_shape {tuple(shape)} is not the transform's output "
            f"shape, {transform.output_shape}",
        )
    return SampleForm.of(transform, transform.output_shape)


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
