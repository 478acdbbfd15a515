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

from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi_protocol.errors import cannot_freeze
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing import two_modules
from hapi_splitter.freezing.freeze_selector import (
    AUTO,
    Freeze,
    FreezeSpec,
    parse_freeze,
)
from hapi_splitter.freezing.frozen_attributes import FrozenAttributes
from hapi_splitter.freezing.frozen_weights import FrozenWeights
from hapi_splitter.freezing.model_checks import (
    check_splittable,
    unwrapped,
)
from hapi_splitter.freezing.one_module import ModuleSplitter
from hapi_splitter.freezing.preserved_state import preserved_state
from hapi_splitter.freezing.random_modules import (
    warn_of_random_module,
)
from hapi_splitter.freezing.split_cache import CachedSplit, SplitCache
from hapi_splitter.freezing.split_store import disk_store
from hapi_splitter.freezing.tail import Tail
from hapi_splitter.inputs.sample_format import InputTransform, SampleForm

DEFAULT_SAMPLE_SHAPE = (3, 224, 224)


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
            cached, result = two_modules.split_two_modules(
                frozen, tail, form, cache, state, exporting
            )
            accepted = dict.fromkeys(before.changes())
        attributes = FrozenAttributes(frozen, ("",), accepted)
        weights = FrozenWeights(frozen, frozen.state_dict(), attributes)
        return SplitModel(
            cached.frozen,
            tail,
            cached.freeze,
            weights,
            num_outputs=_num_outputs(result),
        )
    model = unwrapped(model)
    check_splittable(model)
    spec = parse_freeze(model, freeze)
    cache = _cache(model, transform, form, spec, cache_directory)
    with preserved_state(model) as state, _uncompiled():
        splitter = ModuleSplitter(model, form, transform, state, progress)

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
        return ModuleSplitter(
            model, form, transform, state
        ).points.default_freeze()


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


def _num_outputs(result: Any) -> int | None:
    is_vector = isinstance(result, torch.Tensor) and result.dim() == 2
    return result.shape[1] if is_vector else None
