"""Splits a user's model into a frozen region and a trainable tail.

The model is traced by ``torch.fx``. The freeze point is the end of the frozen
modules, moved over subsequent deterministic operations without parameters:
they cost the storage side little and mostly shrink the features. The part
before it is exported (:mod:`hapi_splitter.graph.export`) in eval mode; the
part after it becomes a :class:`hapi_splitter.freezing.tail.Tail`.

If a model cannot be traced as a whole, only the forwards of the modules that
contain the frozen ones are traced. If that fails too, the user must give two
modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx, nn

from hapi_protocol.errors import FreezeError
from hapi_splitter.cuts import FrozenGraph, cuttable
from hapi_splitter.freezing import two_modules
from hapi_splitter.freezing.fake_propagation import example_for
from hapi_splitter.freezing.freeze_point import FreezePoint, ModelTrace
from hapi_splitter.freezing.freeze_selector import (
    Freeze,
    FreezeSpec,
    parse_freeze,
)
from hapi_splitter.freezing.fx_trace import check_has_shapes, unwrapped
from hapi_splitter.freezing.partition import (
    ModesDifferError,
    frozen_module,
    same_point,
    tail_graph,
)
from hapi_splitter.freezing.tail import Tail
from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.export import ExportedRegion, export_region
from hapi_splitter.graph.shapes import infer
from hapi_splitter.inputs.sample_format import InputTransform, SampleForm
from hapi_splitter.package.writer import digest_of

DEFAULT_SAMPLE_SHAPE = (3, 224, 224)


@dataclass(frozen=True)
class SplitModel:
    """A model in two parts: ``tail(frozen output)`` equals the model.

    Args:
        frozen: the frozen region; its weights share memory with the
            model's parameters until the model moves to another device.
        tail: the rest, with the model's own submodules and parameters.
        freeze: the requested freeze: module names, or ``(frozen, tail)``.
        last: name of the last frozen operation.
    """

    frozen: FrozenGraph
    tail: nn.Module
    freeze: str
    last: str


def split(
    model: nn.Module | tuple[nn.Module, nn.Module],
    freeze: Freeze | None = None,
    *,
    transform: InputTransform | None = None,
    sample_shape: Sequence[int] | None = None,
) -> SplitModel:
    """Splits a model into a frozen region and a tail.

    torch's random state does not change.

    Args:
        model: a module of one tensor ``[B, *sample_shape]``. It does not
            change, mode included. Of a compiled model the original is split;
            compile the tail instead. Or two modules ``(frozen, tail)``, of
            which the second takes the one tensor that the first yields.
        freeze: dotted name of a submodule: everything that runs up to its end
            is frozen. Or a list of names: exactly these modules are frozen.
            Or a function ``freeze(name, module)`` that returns True for the
            modules to freeze; it is called for modules with parameters of
            their own (the model itself has the name ``""``). None for two
            modules.
        transform: input transform from stored bytes to a sample, or None.
        sample_shape: of one sample; the default is the transform's, or
            ``(3, 224, 224)`` without one.

    Raises:
        FreezeError: ``unknown_freeze`` naming the nearest valid names;
            ``cannot_freeze`` naming the tensors that would have to be sent, or
            parameters that would be both frozen and trained; ``cannot_trace``
            or ``unknown_op`` with torch's reason.
    """
    form = _sample_form(transform, sample_shape)
    if not isinstance(model, nn.Module):
        frozen, tail = two_modules.check_two_modules(model, freeze)
        with _preserved_random_state(frozen, tail):
            return _split_two_modules(frozen, tail, form, transform)
    with _preserved_random_state(model):
        return _split(unwrapped(model), freeze, form, transform)


@contextmanager
def _preserved_random_state(*models: nn.Module) -> Iterator[None]:
    devices = {each.device for model in models for each in model.parameters()}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
        yield


def _split(
    model: nn.Module,
    freeze: Freeze | None,
    form: SampleForm,
    transform: InputTransform | None,
) -> SplitModel:
    check_has_shapes(model)
    spec = parse_freeze(model, freeze)
    parts = _partition(model, spec, form)
    with _mode(model, training=False):
        exported = export_region(parts.region, example_for(model, form))
    return SplitModel(
        _frozen_graph(exported, form, transform, parts.point),
        Tail(model, parts.training, parts.evaluation),
        spec.text,
        parts.point.last,
    )


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
        sample_shape: of one sample; see :func:`split`.

    Raises:
        FreezeError: if the model has no such freeze point.
    """
    model, form = unwrapped(model), _sample_form(transform, sample_shape)
    check_has_shapes(model)
    with _mode(model, training=False):
        try:
            trace = ModelTrace(model, form)
        except FreezeError:
            children = [name for name, _ in model.named_children()]
            trace = ModelTrace(model, form, children)
        return trace.default_freeze()


@dataclass(frozen=True)
class _Parts:
    """A model on both sides of a freeze point, as graphs."""

    point: FreezePoint
    region: fx.GraphModule
    training: fx.Graph
    evaluation: fx.Graph


def _partition(model: nn.Module, spec: FreezeSpec, form: SampleForm) -> _Parts:
    try:
        return _partition_at(model, spec, form, None)
    except FreezeError as error:
        if not _shallow_may_help(error, model, spec):
            raise
        full = error
    try:
        return _partition_at(model, spec, form, spec.names)
    except FreezeError as error:
        if full.code != "cannot_trace":
            raise full from error
        if error.code != "cannot_trace":
            raise
        inner = ""
        if error.message != full.message:
            inner = (
                f", nor only the modules that contain {spec.text!r}: "
                f"{error.message}"
            )
        raise FreezeError(
            "cannot_trace",
            f"{full.message}{inner}; or give two modules (frozen, tail) "
            "instead of the model: the second takes the first one's output",
        ) from error


def _shallow_may_help(
    error: FreezeError, model: nn.Module, spec: FreezeSpec
) -> bool:
    if error.code == "unknown_freeze":
        # The name may be inside a module that the full trace does not enter.
        known = {name for name, _ in model.named_modules()}
        return known.issuperset(spec.names)
    return error.code == "cannot_trace" or isinstance(error, ModesDifferError)


def _partition_at(
    model: nn.Module,
    spec: FreezeSpec,
    form: SampleForm,
    targets: Sequence[str] | None,
) -> _Parts:
    with _mode(model, training=False):
        trace = ModelTrace(model, form, targets)
        point = trace.freeze_point(spec)
        region = frozen_module(trace, point)
        evaluation = tail_graph(trace, point)
    with _mode(model, training=True):
        other = ModelTrace(model, form, targets)
        training = tail_graph(other, same_point(trace, other, point))
    return _Parts(point, region, training, evaluation)


def _split_two_modules(
    frozen: nn.Module,
    tail: nn.Module,
    form: SampleForm,
    transform: InputTransform | None,
) -> SplitModel:
    frozen = unwrapped(frozen)
    example = example_for(frozen, form)
    with _mode(frozen, training=False):
        two_modules.check_result(frozen, example)
        exported = export_region(frozen, example)
    last = exported.names[-1]
    point = FreezePoint(two_modules.DESCRIPTION, len(exported.names), last)
    graph = _frozen_graph(exported, form, transform, point)
    with _mode(tail, training=False):
        two_modules.check_accepts(tail, graph.cuts[-1].shape, example.device)
    return SplitModel(graph, tail, two_modules.DESCRIPTION, last)


def _frozen_graph(
    exported: ExportedRegion,
    form: SampleForm,
    transform: InputTransform | None,
    point: FreezePoint,
) -> FrozenGraph:
    values = infer(exported.program, exported.weights, form)
    _check_output(values[-1], point)
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
        raise FreezeError(
            "cannot_freeze",
            f"sample_shape {tuple(shape)} is not the transform's output "
            f"shape, {transform.output_shape}",
        )
    return SampleForm.of(transform, transform.output_shape)


def _check_output(value: Value, point: FreezePoint) -> None:
    if not cuttable(value):
        raise FreezeError(
            "cannot_freeze",
            f"freeze {point.name!r}: the tensor after {point.last!r} is not "
            "a batch of float32 samples and cannot be sent",
        )


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets the mode of all submodules for a block, then restores each.

    Compiled submodules run uncompiled in the block.
    """
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, was in before:
            module.training = was
