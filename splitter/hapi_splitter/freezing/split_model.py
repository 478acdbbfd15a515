"""Splits a user's model into a frozen region and a trainable tail.

The model is traced by ``torch.fx``. The freeze point is the end of what is
to be frozen, moved over the operations after it that have no parameters and
are deterministic: they cost the storage side little and mostly shrink the
features. What is before is exported (:mod:`hapi_splitter.graph.export`),
always in eval mode; what is after becomes a
:class:`hapi_splitter.freezing.tail.Tail`. Each operation is on exactly one
side.

Where a model cannot be traced as a whole, only the forwards of the modules
that hold the frozen ones are; and where that fails, the user hands over two
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
from hapi_splitter.freezing import two_modules as pair
from hapi_splitter.freezing.fake_propagation import example_for
from hapi_splitter.freezing.freeze_point import FreezePoint, ModelTrace
from hapi_splitter.freezing.freeze_selector import Freeze, FreezeSpec, choose
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
    """A model in two parts; ``tail(frozen output)`` is the model.

    Args:
        frozen: the frozen region; its weights share memory with the
            model's parameters until the model moves to another device.
        tail: the rest, with the model's own submodules and parameters.
        freeze: what the freeze was asked for: a module's name, or several,
            or ``(frozen, tail)``.
        last: the last operation that was frozen with it.
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
    """Splits a model after what is to be frozen.

    torch's random numbers go on as if nothing had been split.

    Args:
        model: any module of one tensor ``[B, *sample_shape]``. It is left
            as it is, mode included. Of a compiled one, its original is
            split; compile the tail instead. Or two modules
            ``(frozen, tail)``, where the first yields the one tensor that
            the second takes; the tail is then used as it is.
        freeze: dotted name of a submodule; all that runs up to its end is
            frozen, and see :mod:`hapi_splitter.freezing.split_model`. Or a
            list of names: exactly these modules are frozen. Or a function
            ``freeze(name, module)``, true for those to be frozen of the
            modules with parameters of their own (the model itself has the name
            ``""``). None for two modules.
        transform: from what is stored to a sample, for the package.
        sample_shape: of one sample; by default what the transform yields,
            else ``(3, 224, 224)``.

    Raises:
        FreezeError: ``unknown_freeze`` naming the nearest valid names;
            ``cannot_freeze`` naming the tensors that would have to cross,
            or what would have to be both frozen and trained;
            ``cannot_trace`` or ``unknown_op`` with torch's reason.
    """
    form = _sample_form(transform, sample_shape)
    if not isinstance(model, nn.Module):
        frozen, tail = pair.check_pair(model, freeze)
        with _untouched_random_state(frozen, tail):
            return _split_pair(frozen, tail, form, transform)
    with _untouched_random_state(model):
        return _split(unwrapped(model), freeze, form, transform)


@contextmanager
def _untouched_random_state(*models: nn.Module) -> Iterator[None]:
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
    choice = choose(model, freeze)
    parts = _partition(model, choice, form)
    with _mode(model, training=False):
        exported = export_region(parts.region, example_for(model, form))
    return SplitModel(
        _frozen_graph(exported, form, transform, parts.point),
        Tail(model, parts.training, parts.evaluation),
        choice.text,
        parts.point.last,
    )


def default_freeze(
    model: nn.Module,
    *,
    transform: InputTransform | None = None,
    sample_shape: Sequence[int] | None = None,
) -> str:
    """The freeze that leaves the last linear layer (and less) to train.

    Args:
        model, transform, sample_shape: as for :func:`split`.

    Raises:
        FreezeError: when the model has no such place.
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


def _partition(
    model: nn.Module, choice: FreezeSpec, form: SampleForm
) -> _Parts:
    try:
        return _partition_at(model, choice, form, None)
    except FreezeError as error:
        if not _shallow_may_help(error, model, choice):
            raise
        full = error
    try:
        return _partition_at(model, choice, form, choice.names)
    except FreezeError as error:
        if full.code != "cannot_trace":
            raise full from error
        if error.code != "cannot_trace":
            raise
        inner = ""
        if error.message != full.message:
            inner = (
                f", nor can what holds {choice.text!r} by itself: "
                f"{error.message}"
            )
        raise FreezeError(
            "cannot_trace",
            f"{full.message}{inner}; or give two modules in the model's "
            "place, (frozen, tail): the second takes what the first yields",
        ) from error


def _shallow_may_help(
    error: FreezeError, model: nn.Module, choice: FreezeSpec
) -> bool:
    if error.code == "unknown_freeze":
        # Inside a module that the full trace takes whole, perhaps.
        known = {name for name, _ in model.named_modules()}
        return known.issuperset(choice.names)
    return error.code == "cannot_trace" or isinstance(error, ModesDifferError)


def _partition_at(
    model: nn.Module,
    choice: FreezeSpec,
    form: SampleForm,
    targets: Sequence[str] | None,
) -> _Parts:
    with _mode(model, training=False):
        trace = ModelTrace(model, form, targets)
        point = trace.freeze_point(choice)
        region = frozen_module(trace, point)
        evaluation = tail_graph(trace, point)
    with _mode(model, training=True):
        other = ModelTrace(model, form, targets)
        training = tail_graph(other, same_point(trace, other, point))
    return _Parts(point, region, training, evaluation)


def _split_pair(
    frozen: nn.Module,
    tail: nn.Module,
    form: SampleForm,
    transform: InputTransform | None,
) -> SplitModel:
    frozen = unwrapped(frozen)
    example = example_for(frozen, form)
    with _mode(frozen, training=False):
        pair.check_result(frozen, example)
        exported = export_region(frozen, example)
    last = exported.names[-1]
    point = FreezePoint(pair.DESCRIPTION, len(exported.names), last)
    graph = _frozen_graph(exported, form, transform, point)
    with _mode(tail, training=False):
        pair.check_accepts(tail, graph.cuts[-1].shape, example.device)
    return SplitModel(graph, tail, pair.DESCRIPTION, last)


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
            f"sample_shape {tuple(shape)} is not what the transform yields, "
            f"{transform.output_shape}",
        )
    return SampleForm.of(transform, transform.output_shape)


def _check_output(value: Value, point: FreezePoint) -> None:
    if not cuttable(value):
        raise FreezeError(
            "cannot_freeze",
            f"freeze {point.name!r}: the tensor after {point.last!r} is not "
            "a batch of float32 samples, so it cannot travel",
        )


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets the mode of all submodules, then restores that of each.

    Submodules that are compiled run as they were written meanwhile.
    """
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, was in before:
            module.training = was
