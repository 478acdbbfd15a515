"""A frozen module and a tail that the user hands over as two modules."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.fx_trace import check_has_shapes

DESCRIPTION = "(frozen, tail)"
_BATCH = 2
_DEPENDS_ON_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def check_pair(modules: object, freeze: object) -> tuple[nn.Module, nn.Module]:
    """The two modules, if they are two that can be split as they are.

    Raises:
        FreezeError: ``cannot_freeze``.
    """
    if (
        not isinstance(modules, tuple | list)
        or len(modules) != 2
        or not all(isinstance(module, nn.Module) for module in modules)
    ):
        raise FreezeError(
            "cannot_freeze",
            f"a model is needed, or two modules {DESCRIPTION}, not "
            f"{modules!r:.80}",
        )
    if freeze is not None:
        raise FreezeError(
            "cannot_freeze",
            f"freeze {freeze!r:.80} is given together with two modules "
            f"{DESCRIPTION}, which say it already; leave it out",
        )
    frozen, tail = modules
    for module in modules:
        check_has_shapes(module)
    _check_shared(frozen, tail)
    return frozen, tail


def _check_shared(frozen: nn.Module, tail: nn.Module) -> None:
    ours = {
        id(parameter): name
        for name, parameter in frozen.named_parameters(remove_duplicate=False)
    }
    for name, parameter in tail.named_parameters(remove_duplicate=False):
        if id(parameter) in ours:
            raise FreezeError(
                "cannot_freeze",
                f"the tail's parameter {name!r} is the frozen module's "
                f"{ours[id(parameter)]!r}, and cannot be both frozen and "
                "trained",
            )


def check_result(frozen: nn.Module, example: torch.Tensor) -> None:
    """That a module in eval mode yields one tensor for a batch.

    Raises:
        FreezeError: ``cannot_trace`` where it does not run,
            ``cannot_freeze`` where it yields something else.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        try:
            result = frozen(mode.from_tensor(example))
        except Exception as error:  # the user's own code
            raise FreezeError(
                "cannot_trace",
                f"the frozen module {type(frozen).__name__} does not run on "
                f"a batch of samples of shape {tuple(example.shape[1:])}: "
                f"{str(error)[:500]}",
            ) from error
    if not isinstance(result, torch.Tensor):
        raise FreezeError(
            "cannot_freeze",
            f"the frozen module {type(frozen).__name__} returns a "
            f"{type(result).__name__}, and only one tensor can travel; wrap "
            "it in a module that returns that tensor",
        )


def check_accepts(
    tail: nn.Module, shape: tuple[int, ...], device: torch.device
) -> None:
    """That a tail in eval mode runs on features of a shape.

    It runs without computing anything; where it depends on values, on
    zeros.

    Raises:
        FreezeError: ``cannot_freeze`` with the tail's own error.
    """
    features = torch.zeros(_BATCH, *shape, device=device)
    try:
        _run(tail, features)
    except Exception as error:  # the user's own code
        raise FreezeError(
            "cannot_freeze",
            f"the tail {type(tail).__name__} does not accept what the frozen "
            f"module yields, float32 samples of shape {shape}: "
            f"{str(error)[:500]}",
        ) from error


def _run(tail: nn.Module, features: torch.Tensor) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), torch.random.fork_rng(_devices(features)):
        try:
            with mode:
                tail(mode.from_tensor(features))
        except _DEPENDS_ON_VALUES:
            tail(features)


def _devices(features: torch.Tensor) -> list[torch.device]:
    return [features.device] if features.is_cuda else []
