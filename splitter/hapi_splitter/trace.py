"""Splits a user's model into a frozen region and a trainable tail.

The model is traced by ``torch.fx``. The freeze point is the end of the
named module, moved over the operations after it that have no parameters and
are deterministic: they cost the storage side little and mostly shrink the
features. What is before is exported (:mod:`hapi_splitter.export`), always
in eval mode; what is after becomes a :class:`hapi_splitter.tail.Tail`. Each
operation is on exactly one side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from hapi_protocol.errors import FreezeError
from hapi_splitter.batchwise import Value
from hapi_splitter.cuts import FrozenGraph, cuttable
from hapi_splitter.export import export_region
from hapi_splitter.freeze import FreezePoint, ModelTrace
from hapi_splitter.package import digest_of
from hapi_splitter.partition import frozen_module, same_point, tail_graph
from hapi_splitter.shapes import infer
from hapi_splitter.tail import Tail
from hapi_splitter.transforms import ImageTransform

DEFAULT_SAMPLE_SHAPE = (3, 224, 224)


@dataclass(frozen=True)
class SplitModel:
    """A model in two parts; ``tail(frozen output)`` is the model.

    Args:
        frozen: the frozen region; its weights share memory with the
            model's parameters until the model moves to another device.
        tail: the rest, with the model's own submodules and parameters.
        freeze: the module the freeze was asked for.
        last: the last operation that was frozen with it.
    """

    frozen: FrozenGraph
    tail: nn.Module
    freeze: str
    last: str


def split(
    model: nn.Module,
    freeze: str,
    *,
    transform: ImageTransform | None = None,
    sample_shape: Sequence[int] | None = None,
) -> SplitModel:
    """Splits a model after a module of it.

    Args:
        model: any module of one tensor ``[B, *sample_shape]`` and one
            tensor result. It is left as it is, mode included.
        freeze: dotted name of a submodule; all that runs up to its end is
            frozen, and see :mod:`hapi_splitter.trace`.
        transform: from a decoded image to a sample, for the package.
        sample_shape: of one sample; by default what the transform yields,
            else ``(3, 224, 224)``.

    Raises:
        FreezeError: ``unknown_freeze`` naming the nearest valid names;
            ``cannot_freeze`` naming the tensors that would have to cross;
            ``cannot_trace`` or ``unknown_op`` with torch's reason.
    """
    shape = _sample_shape(transform, sample_shape)
    with _mode(model, training=False):
        trace = ModelTrace(model, shape)
        point = trace.freeze_point(freeze)
        region = frozen_module(trace, point)
        exported = export_region(region, trace.example())
    values = infer(exported.program, exported.weights, shape)
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
    tail = _tail(model, trace, point)
    return SplitModel(frozen, tail, freeze, point.last)


def default_freeze(
    model: nn.Module, *, sample_shape: Sequence[int] = DEFAULT_SAMPLE_SHAPE
) -> str:
    """The freeze that leaves the last linear layer (and less) to train.

    Raises:
        FreezeError: when the model has no such place.
    """
    with _mode(model, training=False):
        return ModelTrace(model, tuple(sample_shape)).default_freeze()


def _sample_shape(
    transform: ImageTransform | None, shape: Sequence[int] | None
) -> tuple[int, ...]:
    if transform is None:
        return tuple(DEFAULT_SAMPLE_SHAPE if shape is None else shape)
    if shape is not None and tuple(shape) != transform.output_shape:
        raise FreezeError(
            "cannot_freeze",
            f"sample_shape {tuple(shape)} is not what the transform yields, "
            f"{transform.output_shape}",
        )
    return transform.output_shape


def _check_output(value: Value, point: FreezePoint) -> None:
    if not cuttable(value):
        raise FreezeError(
            "cannot_freeze",
            f"freeze {point.name!r}: the tensor after {point.last!r} is not "
            "a batch of float32 samples, so it cannot travel",
        )


def _tail(model: nn.Module, trace: ModelTrace, point: FreezePoint) -> Tail:
    evaluation = tail_graph(trace, point)
    with _mode(model, training=True):
        other = ModelTrace(model, trace.sample_shape)
        training = tail_graph(other, same_point(trace, other, point))
    return Tail(model, training, evaluation)


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets the mode of all submodules, then restores that of each."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was
