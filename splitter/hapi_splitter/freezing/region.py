"""The frozen region as a module: a model's own call up to the freeze point."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from hapi_splitter.freezing.model_run import OperationWatch
from hapi_splitter.freezing.tail_call import Source, packed


class Region(nn.Module):
    """Runs a model until its freeze point and returns what is sent.

    The model's call is left at once, so that what follows need not be
    exportable.

    Args:
        model: the user's model.
        sources: places from which the tensors are taken, the freeze point
            last.
        samples_spec: structure of the model's input, ``(args, kwargs)``.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Sequence[Source],
        samples_spec: pytree.TreeSpec,
    ) -> None:
        super().__init__()
        self.model = model
        self._sources = tuple(sources)
        self._samples_spec = samples_spec

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that is sent, ``[B, *shape]``."""
        args, kwargs = pytree.tree_unflatten([samples], self._samples_spec)
        taken: dict[Source, torch.Tensor] = {}
        watch = OperationWatch(lambda result: self._leave(result, taken))
        with ExitStack() as stack:
            for source in self._sources:
                self._take(source, taken, samples, watch, stack)
            stack.enter_context(_module_stack())
            if self._sources[-1].operations:
                stack.enter_context(watch)
            try:
                self.model(*args, **kwargs)
            except _Reached:
                return packed([taken[source] for source in self._sources])
        raise RuntimeError(
            f"the forward did not run {self._sources[-1].module!r}"
        )

    def _leave(self, result: Any, taken: dict[Source, torch.Tensor]) -> None:
        source = self._sources[-1]
        taken[source] = pytree.tree_leaves(result)[source.index]
        raise _Reached

    def _take(
        self,
        source: Source,
        taken: dict[Source, torch.Tensor],
        samples: torch.Tensor,
        watch: OperationWatch,
        stack: ExitStack,
    ) -> None:
        calls = iter(range(source.call + 1))

        def take(values: Any) -> None:
            if next(calls, None) != source.call:
                return
            if source.operations:
                watch.start(source.operations)
                return
            taken[source] = pytree.tree_leaves(values)[source.index]
            if source == self._sources[-1]:
                raise _Reached

        if not source.module and not source.is_end:
            taken[source] = samples
            if source.operations:
                watch.start(source.operations)
            return
        module = self.model.get_submodule(source.module)
        if source.is_end:
            handle = module.register_forward_hook(
                lambda _, args, result: take(result)
            )
        else:
            handle = module.register_forward_pre_hook(
                lambda _, args, kwargs: take((args, kwargs)),
                prepend=True,
                with_kwargs=True,
            )
        stack.callback(handle.remove)


class _Reached(BaseException):
    """Leaves the model's call; no ``except Exception`` may catch it."""


class _module_stack:
    """Restores the exporter's list of running modules after a block.

    ``torch.export`` expects every module's call to return.
    """

    def __enter__(self) -> None:
        mode = get_proxy_mode()
        self._stack = getattr(
            getattr(mode, "tracer", None), "module_stack", None
        )
        self._before = dict(self._stack or {})

    def __exit__(self, *_: object) -> None:
        if self._stack is not None:
            self._stack.clear()
            self._stack.update(self._before)
