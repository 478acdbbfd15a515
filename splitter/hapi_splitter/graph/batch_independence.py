"""Proves that a program treats the samples of a batch independently.

Samples of several requests run in one batch, so an operator that lets one
sample influence another would leak features between callers. Each tensor of a
program therefore has a batch position: dimension ``dim`` enumerates (outer,
sample, inner) in row-major order. ``outer`` and ``inner`` differ from 1 if a
model merges the batch with another dimension, as attention does with its
heads. Each rule below returns the batch position of an operator's result, or
raises :class:`MixesSamplesError`. A tensor without a batch is a constant, the
same for any input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch


def tensors_of(bound: Bound) -> list[Value]:
    """Returns the tensors that a call reads, including those in lists."""
    values: list[Value] = []
    for argument in bound.values():
        items = argument if isinstance(argument, tuple) else (argument,)
        values.extend(item for item in items if isinstance(item, Value))
    return values


class MixesSamplesError(Exception):
    """An operator would let samples influence one another."""


@dataclass(frozen=True, slots=True)
class BatchPosition:
    """The batch position: ``dim`` has ``outer * B * inner`` entries."""

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def coefficient(self) -> int:
        return self.outer * self.inner

    def moved_to(self, dim: int) -> BatchPosition:
        return BatchPosition(dim, self.outer, self.inner)


@dataclass(frozen=True, slots=True)
class Value:
    """Static properties of a tensor.

    Attributes:
        shape: has the coefficient of ``B`` in the batch dimension.
        dtype: dtype of its entries.
        batch: position of the batch; None for constants.
        data: True if the tensor depends on the samples' values.
        bounds: smallest and largest possible entry; None for floats.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch: BatchPosition | None
    data: bool
    bounds: tuple[int, int] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        """Elements per sample; of a constant, in total."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes per sample; of a constant, in total."""
        return self.num_elements * self.dtype.itemsize


Bound: TypeAlias = Mapping[str, Any]
"""Arguments by name; tensors as :class:`Value`, sizes as (B, constant)."""
Rule: TypeAlias = Callable[[Bound], BatchPosition | None]

_DIFFERENT_BATCHES = "its tensors have their batches in different dimensions"
_NO_BATCH_DIM = "its input has no dimension for the batch"


def _only_first(bound: Bound) -> Value:
    """Returns the first tensor; the others must be constants."""
    first, *others = tensors_of(bound)
    if any(other.batch for other in others):
        raise MixesSamplesError("its weights depend on the batch")
    return first


def _batch_outside(value: Value, dims: Any) -> BatchPosition | None:
    """Returns the batch, which must not be in one of ``dims``."""
    dims = (dims,) if isinstance(dims, int) else dims
    if value.batch is None:
        return None
    if any(dim % value.ndim == value.batch.dim for dim in dims):
        raise MixesSamplesError(f"it acts on the batch, dimension {dims}")
    return value.batch


def elementwise(bound: Bound) -> BatchPosition | None:
    """Acts on single entries, after broadcasting."""
    values = tensors_of(bound)
    return broadcast(values, max(value.ndim for value in values))


def broadcast(values: list[Value], ndim: int) -> BatchPosition | None:
    """Aligns tensors at their last dimension."""
    batches = {
        value.batch.moved_to(value.batch.dim + ndim - value.ndim)
        for value in values
        if value.batch
    }
    if len(batches) > 1:
        raise MixesSamplesError(_DIFFERENT_BATCHES)
    for batch in batches:
        for value in values:
            dim = batch.dim - (ndim - value.ndim)
            if value.batch is None and dim >= 0 and value.shape[dim] != 1:
                raise MixesSamplesError("a constant spans the batch")
    return batches.pop() if batches else None


def along(bound: Bound) -> BatchPosition | None:
    """Acts along ``dim`` or ``dims`` without reordering dimensions."""
    value = _only_first(bound)
    dims = bound["dim"] if "dim" in bound else bound["dims"]
    return _batch_outside(value, dims)


def roll(bound: Bound) -> BatchPosition | None:
    """Needs explicit dims: without them the flattened tensor is rolled."""
    if not bound["dims"] and bound["self"].batch:
        raise MixesSamplesError("it acts on all dimensions at once")
    return along(bound)


def pad(bound: Bound) -> BatchPosition | None:
    """Pads the last dimensions, of which the last one is the first pair."""
    widths = bound["pad"] if "pad" in bound else bound["padding"]
    return _batch_outside(bound["self"], tuple(range(-(len(widths) // 2), 0)))


def cat(bound: Bound) -> BatchPosition | None:
    """Joins tensors that have the batch in one position, or no batch."""
    return _single(
        {_batch_outside(value, bound["dim"]) for value in bound["tensors"]}
    )


def stack(bound: Bound) -> BatchPosition | None:
    """Joins tensors in a new dimension at ``dim``."""
    _single({value.batch for value in bound["tensors"]})
    return _insert_dim(bound["tensors"][0], bound["dim"])


def _single(batches: set[BatchPosition | None]) -> BatchPosition | None:
    if len(batches) > 1:
        raise MixesSamplesError(_DIFFERENT_BATCHES)
    return batches.pop()


def reduce(bound: Bound) -> BatchPosition | None:
    """Reduces ``dim``; an empty list means all dimensions."""
    value, dims = bound["self"], bound["dim"]
    dims = (dims,) if isinstance(dims, int) else dims
    dims = dims or tuple(range(value.ndim))
    batch = _batch_outside(value, dims)
    if batch is None or bound["keepdim"]:
        return batch
    removed = {dim % value.ndim for dim in dims}
    return batch.moved_to(batch.dim - sum(dim < batch.dim for dim in removed))


def _leading(value: Value) -> BatchPosition | None:
    if value.batch and value.batch.dim != 0:
        raise MixesSamplesError("the batch is not its first dimension")
    return value.batch


def image(bound: Bound) -> BatchPosition | None:
    """Reads ``[batch, channels, height, width]``; refuses unbatched images."""
    return _with_dims(bound, 4)


def volume(bound: Bound) -> BatchPosition | None:
    """Reads ``[batch, channels, depth, height, width]``."""
    return _with_dims(bound, 5)


def columns(bound: Bound) -> BatchPosition | None:
    """Reads ``[batch, channels or entries of a window, positions]``."""
    return _with_dims(bound, 3)


def _with_dims(bound: Bound, ndim: int) -> BatchPosition | None:
    value = _only_first(bound)
    if value.batch and value.ndim != ndim:
        raise MixesSamplesError(_NO_BATCH_DIM)
    return _leading(value)


def conv(bound: Bound) -> BatchPosition | None:
    """Reads batched input, of the rank of the weights."""
    value = _only_first(bound)
    if value.ndim != bound["weight"].ndim:
        raise MixesSamplesError(_NO_BATCH_DIM)
    return _leading(value)


def channelwise(bound: Bound) -> BatchPosition | None:
    """Reads ``[batch, channels, ...]`` and constants per channel."""
    value = _only_first(bound)
    if value.batch and value.ndim < 2:
        raise MixesSamplesError(_NO_BATCH_DIM)
    return _leading(value)


def layer_norm(bound: Bound) -> BatchPosition | None:
    """Normalises the last dimensions."""
    value = _only_first(bound)
    dims = tuple(range(-len(bound["normalized_shape"]), 0))
    return _batch_outside(value, dims)


def linear(bound: Bound) -> BatchPosition | None:
    """Contracts the last dimension."""
    value = _only_first(bound)
    return _batch_outside(value, -1)


def embedding(bound: Bound) -> BatchPosition | None:
    """Reads a row of the weight per index, in a new last dimension."""
    weight, indices = bound["weight"], bound["indices"]
    if weight.batch:
        raise MixesSamplesError("its weights depend on the batch")
    batch: BatchPosition | None = indices.batch
    return batch


def gather(bound: Bound) -> BatchPosition | None:
    """Reads one entry along ``dim`` per index; all else is at one place."""
    value, index = bound["self"], bound["index"]
    if value.batch != index.batch:
        raise MixesSamplesError(_DIFFERENT_BATCHES)
    return _batch_outside(value, bound["dim"])


def matmul(bound: Bound) -> BatchPosition | None:
    """Multiplies matrices; the batch leads, or is in the left one's rows."""
    left, right = tensors_of(bound)
    if min(left.ndim, right.ndim) < 2:
        raise MixesSamplesError("it takes matrices, not vectors")
    _batch_outside(left, -1)
    _batch_outside(right, (-2, -1))
    ndim = max(left.ndim, right.ndim)
    if left.batch and left.batch.dim == left.ndim - 2:
        if right.batch:
            raise MixesSamplesError(_DIFFERENT_BATCHES)
        return left.batch.moved_to(ndim - 2)
    return broadcast([left, right], ndim)


def attention(bound: Bound) -> BatchPosition | None:
    """Reads queries, keys, values ``[..., length, features]`` and a mask."""
    values = tensors_of(bound)
    if min(value.ndim for value in values) < 2:
        raise MixesSamplesError("it takes matrices, not vectors")
    for value in values:
        _batch_outside(value, (-2, -1))
    return broadcast(values, max(value.ndim for value in values))


def reshape(bound: Bound) -> BatchPosition | None:
    """Regroups dimensions in row-major order."""
    value, sizes = bound["self"], bound["shape"]
    growing = [i for i, size in enumerate(sizes) if size[0]]
    if value.batch is None:
        if growing:
            raise MixesSamplesError("a constant cannot grow with the batch")
        return None
    if len(growing) != 1 or sizes[growing[0]][1]:
        raise MixesSamplesError("one size must be a multiple of the batch")
    batch, dim = value.batch, growing[0]
    before = math.prod(value.shape[: batch.dim]) * batch.outer
    skipped = math.prod(constant for _, constant in sizes[:dim])
    coefficient = sizes[dim][0]
    if skipped <= 0 or before % skipped:
        raise MixesSamplesError("it moves entries from sample to sample")
    outer = before // skipped
    if outer == 0 or coefficient % outer:
        raise MixesSamplesError("it moves entries from sample to sample")
    return BatchPosition(dim, outer, coefficient // outer)


def expand(bound: Bound) -> BatchPosition | None:
    """Repeats entries; a constant may be repeated once per sample."""
    value: Value = bound["self"]
    sizes = bound["size"]
    added = len(sizes) - value.ndim
    growing = [i for i, size in enumerate(sizes) if size[0]]
    if value.batch:
        dim = value.batch.dim + added
        if sizes[dim] != (value.batch.coefficient, 0) or len(growing) > 1:
            raise MixesSamplesError("it repeats the batch")
        return value.batch.moved_to(dim)
    if not growing:
        return None
    if len(growing) > 1 or sizes[growing[0]] != (1, 0):
        raise MixesSamplesError("it repeats a constant more than per sample")
    return BatchPosition(growing[0])


def permute(bound: Bound) -> BatchPosition | None:
    """Reorders dimensions."""
    value: Value = bound["self"]
    if value.batch is None:
        return None
    order = [dim % value.ndim for dim in bound["dims"]]
    if sorted(order) != list(range(value.ndim)):
        raise MixesSamplesError("its dims are not a permutation")
    return value.batch.moved_to(order.index(value.batch.dim))


def transpose(bound: Bound) -> BatchPosition | None:
    """Exchanges two dimensions."""
    value = bound["self"]
    if value.batch is None:
        return None
    order = list(range(value.ndim))
    first, second = bound["dim0"] % value.ndim, bound["dim1"] % value.ndim
    order[first], order[second] = second, first
    return permute({"self": value, "dims": order})


def unsqueeze(bound: Bound) -> BatchPosition | None:
    """Inserts a dimension of size 1 at ``dim``."""
    return _insert_dim(bound["self"], bound["dim"])


def _insert_dim(value: Value, dim: int) -> BatchPosition | None:
    if value.batch is None:
        return None
    dim %= value.ndim + 1
    return value.batch.moved_to(value.batch.dim + (dim <= value.batch.dim))


def unfold(bound: Bound) -> BatchPosition | None:
    """Moves windows along ``dimension`` to a new last dimension."""
    return _batch_outside(bound["self"], bound["dimension"])


def squeeze(bound: Bound) -> BatchPosition | None:
    """Removes dimensions of ``dim`` that have size 1."""
    value = bound["self"]
    batch = _batch_outside(value, bound["dim"])
    if batch is None:
        return None
    dims = {dim % value.ndim for dim in bound["dim"]}
    removed = sum(d < batch.dim and value.shape[d] == 1 for d in dims)
    return batch.moved_to(batch.dim - removed)


def select(bound: Bound) -> BatchPosition | None:
    """Selects one index of ``dim`` and removes the dimension."""
    value = bound["self"]
    batch = _batch_outside(value, bound["dim"])
    if batch is None:
        return None
    return batch.moved_to(batch.dim - (bound["dim"] % value.ndim < batch.dim))
