"""A tensor without data, which only recorded operations may read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hapi_splitter.freezing.model_run import (
    READS_FIRST_ONLY,
    READS_SHAPE_ONLY,
    name_of,
)
from hapi_splitter.freezing.structures import flatten, leaves_in, unflatten

if TYPE_CHECKING:
    from hapi_splitter.freezing.replay import Replay

_FACTS = frozenset(
    {
        *("__len__", "__hash__", "_backward_hooks", "_base", "_is_view"),
        *("_version", "device", "dense_dim", "dim", "dim_order", "dtype"),
        *("element_size", "get_device", "grad", "grad_fn", "is_complex"),
        *(
            "is_conj",
            "is_contiguous",
            "is_cpu",
            "is_cuda",
            "is_floating_point",
        ),
        *("is_inference", "is_leaf", "is_meta", "is_mkldnn", "is_mps"),
        *("is_neg", "is_nested", "is_pinned", "is_quantized", "is_shared"),
        *("is_signed", "is_sparse", "is_sparse_csr", "is_xla", "is_xpu"),
        *("itemsize", "layout", "name", "names", "nbytes", "ndim"),
        *("ndimension", "nelement", "numel", "output_nr", "requires_grad"),
        *("retains_grad", "shape", "size", "storage_offset", "stride"),
    }
)
"""Attributes and methods that do not depend on values."""


class StandInTensor(torch.Tensor):
    """Stands in for a tensor of the samples that is not computed.

    It has a shape and a dtype, but no data.  Every use goes through the steps
    of one call of the tail; what is not among them raises.

    Attributes:
        steps: steps of the call.
        number: number of the tensor in the record.
        entered: the tensor itself, if it is sent or follows from what is.
    """

    steps: Replay
    number: int
    entered: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        steps: Replay,
        number: int,
        size: Sequence[int],
        stride: Sequence[int] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> StandInTensor:
        made: StandInTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, stride, dtype=dtype, device=device
        )
        made.steps, made.number, made.entered = steps, number, None
        return made

    def __deepcopy__(self, memo: Any) -> StandInTensor:
        return self  # a model may keep it in an attribute

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        # The function has the name of the attribute.
        is_fact = name in _FACTS and func is not torch.autograd.grad
        if is_fact or (name == "type" and len(args) < 2):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        leaves = leaves_in((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, cls)]
        is_by_shape = name in READS_SHAPE_ONLY or (
            name in READS_FIRST_ONLY and leaves[0] is not tensors[0]
        )
        if not is_by_shape and not all(map(_is_usable, tensors)):
            return tensors[0].steps.operation(func, args, kwargs)
        _, spec = flatten((args, kwargs))
        args, kwargs = unflatten(map(replaced, leaves), spec)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves, spec = flatten((args, kwargs or {}))
        for leaf in leaves:
            if isinstance(leaf, cls) and leaf.entered is None:
                raise leaf.steps.refusal(str(func), leaf)
        args, kwargs = unflatten(map(replaced, leaves), spec)
        return func(*args, **kwargs)


def _is_usable(tensor: StandInTensor) -> bool:
    return tensor.entered is not None and tensor.steps.has_entered


def replaced(value: Any) -> Any:
    """Returns the tensor itself, or one of its shape with any values."""
    if not isinstance(value, StandInTensor):
        return value
    if value.entered is not None:
        return value.entered
    empty = torch.empty((), dtype=value.dtype, device=value.device)
    return empty.expand(value.shape)
