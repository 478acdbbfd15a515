"""Tensors of an exported graph that depend on the batch size alone.

Masks, position encodings and the like are often made anew in each forward,
one copy per sample. Here they are computed for two batch sizes: what is the
same for every sample is stored once, and repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hapi_splitter.graph.canonicalize import is_identity
from hapi_splitter.graph.program import Affine

_BATCHES = (2, 3, 17)
"""Sizes for which a value must be the same; a pattern of the first few
samples alone may look the same in small batches."""
_LIKE = frozenset(
    f"aten.{name}.default"
    for what in ("zeros", "ones", "full", "empty")
    for name in (f"new_{what}", f"{what}_like")
)


@dataclass(frozen=True)
class Repeated:
    """``once`` repeated along ``dim`` for every sample.

    Args:
        once: all of it for one sample.
        dim: None where it does not grow with the batch.
    """

    once: torch.Tensor
    dim: int | None


def reads(node: fx.Node) -> list[fx.Node]:
    """The tensors whose entries a call reads, sizes left out.

    Of the argument of ``zeros_like`` and its kind only shape and dtype
    matter.
    """
    if str(node.target) in _LIKE:
        return []
    return [source for source in node.all_input_nodes if not is_size(source)]


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | int)


def draws(node: fx.Node) -> bool:
    """Whether a call yields random numbers, in eval mode."""
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    return random and not is_identity(node)


class BatchSized:
    """Knows which nodes depend on weights and the batch size alone.

    Args:
        constants: tensors by node; may grow later.
        size: from a size in the graph to a number or a multiple of the
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
        """What a call yields that does not depend on the batch either."""
        return self._value(node, _BATCHES[0])

    def takes(self, node: fx.Node) -> bool:
        """Whether a call is such a tensor; it is remembered."""
        found = not draws(node) and all(
            source in self._constants or source in self._nodes
            for source in reads(node)
        )
        if found:
            self._nodes.add(node)
        return found

    def repeated(self, node: fx.Node) -> Repeated | None:
        """None where its entries differ from sample to sample."""
        sizes = [self._size(size) for size in node.meta["val"].shape]
        growing = {i: s for i, s in enumerate(sizes) if isinstance(s, Affine)}
        found = [self._value(node, batch) for batch in _BATCHES]
        if not growing:
            same = all(torch.equal(found[0], each) for each in found[1:])
            return Repeated(found[0].contiguous(), None) if same else None
        dim, size = growing.popitem()
        if growing or size.batch < 1 or size.constant:
            return None
        once = found[0].narrow(dim, 0, size.batch)
        for batch, value in zip(_BATCHES, found, strict=True):
            if not torch.equal(torch.cat([once] * batch, dim), value):
                return None
        return Repeated(once.clone(), dim)

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
        found = self._size(size)
        return found.at(batch) if isinstance(found, Affine) else found
