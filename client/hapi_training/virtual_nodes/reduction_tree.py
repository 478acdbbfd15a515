"""The order in which sums over virtual nodes are added.  No I/O, no torch.

Sums of floating-point numbers depend on their order, so a sum over virtual
nodes is always added along one tree, which follows from their number alone.
The subtree ``(stride, first)`` stands for the nodes ``first, first + stride,
…``.  It has as many children as the least prime factor of its size, each with
every second, third … of its nodes, whose sums are added from left to right.
A worker adds up the subtrees that it has all nodes of; workers exchange the
sums of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Subtree(NamedTuple):
    """The virtual nodes ``first, first + stride, …``."""

    stride: int
    first: int


ROOT = Subtree(1, 0)


def children(tree: Subtree, num_nodes: int) -> list[Subtree]:
    """Returns the parts of a subtree in order; none for a single node."""
    size = num_nodes // tree.stride
    if size == 1:
        return []
    factor = next(n for n in range(2, size + 1) if not size % n)
    return [
        Subtree(tree.stride * factor, tree.first + number * tree.stride)
        for number in range(factor)
    ]


def node_order(num_nodes: int) -> tuple[int, ...]:
    """Returns all nodes in the order of the tree's leaves.

    Workers that have consecutive nodes of this order have few subtrees.
    """

    def leaves(tree: Subtree) -> list[int]:
        parts = children(tree, num_nodes)
        return [n for part in parts for n in leaves(part)] or [tree.first]

    return tuple(leaves(ROOT))


def whole_subtrees(nodes: Collection[int], num_nodes: int) -> list[Subtree]:
    """Returns the largest subtrees that have no other nodes, in order."""
    owned = frozenset(nodes)

    def inside(tree: Subtree) -> list[Subtree]:
        if owned.issuperset(range(tree.first, num_nodes, tree.stride)):
            return [tree]
        parts = children(tree, num_nodes)
        return [found for part in parts for found in inside(part)]

    return inside(ROOT)


def total(
    sums: Mapping[Subtree, Value],
    add: Callable[[Value, Value], Value],
    num_nodes: int,
) -> Value:
    """Adds the sums of subtrees that have all nodes together.

    Args:
        sums: sum of each subtree.
        add: returns the sum of two values, and may change the first.
        num_nodes: number of nodes.
    """

    def of(tree: Subtree) -> Value:
        if tree in sums:
            return sums[tree]
        return reduce(add, map(of, children(tree, num_nodes)))

    return of(ROOT)


class PartialSums(Generic[Value]):
    """Adds the values of a worker's nodes, as soon as the tree allows.

    At most one value waits at each level of the tree.

    Args:
        nodes: the worker's nodes.
        num_nodes: number of all nodes.
        add: as for :func:`total`.

    Attributes:
        sums: sum of each of the worker's whole subtrees, when all values
            were put.
    """

    def __init__(
        self,
        nodes: Collection[int],
        num_nodes: int,
        add: Callable[[Value, Value], Value],
    ) -> None:
        self._num_nodes = num_nodes
        self._add = add
        self._parents: dict[Subtree, tuple[Subtree, bool]] = {}
        self._waiting: dict[Subtree, Value] = {}
        self.sums: dict[Subtree, Value] = {}
        for tree in whole_subtrees(nodes, num_nodes):
            self._note_parents(tree)

    def _note_parents(self, tree: Subtree) -> None:
        parts = children(tree, self._num_nodes)
        for part in parts:
            self._parents[part] = tree, part == parts[-1]
            self._note_parents(part)

    def take_earlier(self, node: int) -> Value | None:
        """Takes the sum to which a node's value is added first, if any.

        Who takes it puts the node's value together with it.
        """
        parent = self._parents.get(Subtree(self._num_nodes, node))
        return self._waiting.pop(parent[0], None) if parent else None

    def put(self, node: int, value: Value) -> None:
        """Adds a node's value; nodes come in :func:`node_order`."""
        tree = Subtree(self._num_nodes, node)
        while tree in self._parents:
            parent, is_last = self._parents[tree]
            if parent in self._waiting:
                value = self._add(self._waiting.pop(parent), value)
            if not is_last:
                self._waiting[parent] = value
                return
            tree = parent
        self.sums[tree] = value
