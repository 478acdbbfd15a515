"""Rewrites ``x[...]`` with tensors as indices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hapi_splitter.graph.decompositions import (
    IDENTITY,
    Named,
    Rewritten,
    call,
    dtype_of,
    reshape,
    shape_of,
)

INDEX = "aten.index.Tensor"


def rewrite_index(
    bound: Named,
    node: fx.Node,
    fixed: Callable[[fx.Node], torch.Tensor | None],
    counts_samples: Callable[[fx.Node], bool],
) -> Rewritten | None:
    """Returns calls that read the entries which ``x[...]`` selects.

    These forms are supported: indices of one dimension that do not depend on
    the batch, ``table[ids]``, and ``x[torch.arange(batch), indices]``.

    Args:
        bound: arguments of :data:`INDEX` by name.
        node: the exported call.
        fixed: returns the value of a node that does not depend on the batch.
        counts_samples: returns True for a node that numbers the samples along
            its first dimension.
    """
    source, indices = bound["self"], bound["indices"]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if any(dtype_of(indices[dim]) not in _INDEX_DTYPES for dim in used):
        return None
    if used == [0, 1] and counts_samples(indices[0]):
        index, dim = indices[1], 1
        selected = _select_per_sample(source, index, fixed(index), node)
    elif len(used) == 1:
        (dim,) = used
        index = indices[dim]
        selected = _select(source, dim, fixed(index))
        if selected is None and dim == 0 and fixed(source) is not None:
            return call("embedding", weight=source, indices=index)
    else:
        return None
    return selected and reshape(selected, shape_of(node))


_INDEX_DTYPES = (torch.int64, torch.int32)


def _select(
    source: fx.Node, dim: int, index: torch.Tensor | None
) -> Rewritten | None:
    size = shape_of(source)[dim]
    if index is None or not isinstance(size, int):
        return None
    index = index.flatten().long()
    index = torch.where(index < 0, index + size, index)
    if index.tolist() == list(range(size)):
        return Rewritten(IDENTITY, {"self": source})
    return call("index_select", self=source, dim=dim, index=index)


def _select_per_sample(
    source: fx.Node,
    index: fx.Node,
    value: torch.Tensor | None,
    node: fx.Node,
) -> Rewritten | None:
    """Returns ``[batch, number of indices, ...]``."""
    batch, _, *rest = shape_of(source)
    if shape_of(node)[0] != batch:
        return None
    if value is not None:
        return _select(source, 1, value)
    if shape_of(node) != [*shape_of(index), *rest]:
        return None
    count = math.prod(shape_of(index)[1:])
    column = reshape(
        _to(index, torch.int64), [batch, count, *(1 for _ in rest)]
    )
    spread = call("expand", self=column, size=[batch, count, *rest])
    return call("gather", self=source, dim=1, index=spread)


def _to(source: fx.Node, dtype: torch.dtype) -> Any:
    if dtype_of(source) == dtype:
        return source
    return call("_to_copy", self=source, dtype=dtype)
