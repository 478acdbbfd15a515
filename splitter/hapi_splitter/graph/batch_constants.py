"""Tensors of an exported graph that depend only on the batch size.

Models often build masks and position encodings in each forward pass, one copy
per sample. They are evaluated here for several batch sizes. A value that is
the same for every sample becomes one stored weight that is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hapi_splitter.graph.canonicalize import is_identity
from hapi_splitter.graph.program import Affine

_BATCHES = (2, 3, 17)
"""Batch sizes that are compared. In small batches alone a value that differs
only in later samples would look constant."""
_SHAPE_ONLY = frozenset(
    f"aten.{name}.default"
    for kind in ("zeros", "ones", "full", "empty")
    for name in (f"new_{kind}", f"{kind}_like")
)
"""Operators that read only the shape and dtype of their tensor."""


@dataclass(frozen=True)
class BatchConstant:
    """A value that is the same for every sample.

    Attributes:
        per_sample: the value for a batch of one sample.
        dim: dimension along which it repeats; None if it does not grow with
            the batch.
    """

    per_sample: torch.Tensor
    dim: int | None


def reads(node: fx.Node) -> list[fx.Node]:
    """Returns the tensors whose entries a call reads, without sizes."""
    if str(node.target) in _SHAPE_ONLY:
        return []
    return [source for source in node.all_input_nodes if not is_size(source)]


def is_size(node: fx.Node) -> bool:
    """Returns True for a number, of which only sizes depend on the batch."""
    return isinstance(
        node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float
    )


def is_random(node: fx.Node) -> bool:
    """Returns True if a call yields random numbers in eval mode."""
    tags = getattr(node.target, "tags", ())
    has_seed = torch.Tag.nondeterministic_seeded in tags
    return has_seed and not is_identity(node)


def is_fixed(node: fx.Node, known: Container[fx.Node]) -> bool:
    """Returns True if a call reads only known nodes and no random numbers,
    and its shape does not depend on the batch size."""
    return (
        not has_symbols(node.meta.get("val"))
        and not is_random(node)
        and all(source in known for source in reads(node))
    )


def has_symbols(value: Any) -> bool:
    """Returns True if the shape of a tensor depends on the batch size."""
    values = value if isinstance(value, list | tuple) else [value]
    return any(
        isinstance(size, torch.SymInt)
        for item in values
        if isinstance(item, torch.Tensor)
        for size in item.shape
    )


class BatchConstants:
    """Collects nodes that depend only on weights and the batch size.

    Args:
        constants: tensors by node; may grow later.
        size: converts a size in the graph to a number or a multiple of the
            batch.
    """

    def __init__(
        self,
        constants: Mapping[fx.Node, Any],
        size: Callable[[int | torch.SymInt], int | Affine],
    ) -> None:
        self._constants = constants
        self._size = size
        self._nodes: set[fx.Node] = set()
        self._values: dict[tuple[fx.Node, int], Any] = {}

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._nodes

    def value(self, node: fx.Node) -> Any:
        """Returns a tensor that does not depend on the batch size either."""
        return self._value(node, _BATCHES[0])

    def add(self, node: fx.Node) -> bool:
        """Adds a call if it reads only constants; returns True if it does."""
        is_constant = not is_random(node) and all(
            source in self._constants or source in self._nodes
            for source in reads(node)
        )
        if is_constant:
            self._nodes.add(node)
        return is_constant

    def find(self, node: fx.Node) -> BatchConstant | None:
        """Evaluates a node; returns None for lists and differing samples."""
        result = node.meta["val"]
        if not isinstance(result, torch.Tensor):
            return None
        sizes = [self._size(size) for size in result.shape]
        growing = {i: s for i, s in enumerate(sizes) if isinstance(s, Affine)}
        values = [self._value(node, batch) for batch in _BATCHES]
        first = values[0]
        if not growing:
            is_same = all(torch.equal(first, value) for value in values[1:])
            return BatchConstant(first.contiguous(), None) if is_same else None
        dim, size = growing.popitem()
        if growing or size.batch < 1 or size.constant:
            return None
        per_sample = first.narrow(dim, 0, size.batch)
        for batch, value in zip(_BATCHES, values, strict=True):
            if not torch.equal(torch.cat([per_sample] * batch, dim), value):
                return None
        return BatchConstant(per_sample.clone(), dim)

    def counts_samples(self, node: fx.Node) -> bool:
        """Returns True for the number of each sample, ``[batch, 1, ...]``."""
        if node not in self._nodes:
            return False
        values = [(batch, self._value(node, batch)) for batch in _BATCHES]
        return all(
            len(value) == batch and value.flatten().tolist() == [*range(batch)]
            for batch, value in values
        )

    def _value(self, node: fx.Node, batch: int) -> Any:
        if node in self._constants:
            return self._constants[node]
        if (node, batch) not in self._values:
            args, kwargs = fx.map_arg(
                (node.args, dict(node.kwargs)),
                lambda source: self._argument(node, source, batch),
            )
            assert callable(node.target)
            with torch.no_grad():
                self._values[node, batch] = node.target(*args, **kwargs)
        return self._values[node, batch]

    def _argument(self, node: fx.Node, source: fx.Node, batch: int) -> Any:
        value = source.meta["val"]
        if is_size(source):
            return self._at(value, batch)
        if source in reads(node):
            return self._value(source, batch)
        shape = [self._at(size, batch) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    def _at(self, size: int | torch.SymInt, batch: int) -> int:
        known = self._size(size)
        return known.at(batch) if isinstance(known, Affine) else known
