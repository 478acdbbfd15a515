"""Builds a program of the calls and weights that its output needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hapi_splitter.graph.program import INPUT, Argument, Call, Program, Ref


class ProgramBuilder:
    """Collects weights and calls; which of them are used is known at the end.

    Until then weights have negative ids, and calls positive ones.
    """

    def __init__(self) -> None:
        self._weights: list[torch.Tensor] = []
        self._memories: set[int] = set()
        self._calls: list[Call] = []
        self._origins: list[fx.Node] = []

    def store(self, tensor: torch.Tensor) -> Ref:
        """Adds a weight."""
        memory = tensor.untyped_storage().data_ptr()
        if memory in self._memories:
            # Tensors of a package cannot share memory.
            tensor = tensor.clone()
        self._memories.add(memory)
        self._weights.append(tensor)
        return Ref(-len(self._weights))

    def add(self, node: fx.Node, call: Call) -> Ref:
        """Adds a call, made from a node of the exported graph."""
        self._calls.append(call)
        self._origins.append(node)
        return Ref(len(self._calls))

    @staticmethod
    def is_call(tensor: Ref) -> bool:
        """Returns True for the result of a call."""
        return tensor.node > INPUT

    def program(
        self, output: Ref
    ) -> tuple[Program, dict[int, torch.Tensor], list[fx.Node]]:
        """Returns the program of an output.

        Returns:
            The program, its weights by id, and the origin of each call.
        """
        used: set[int] = set()
        pending = [output.node]
        while pending:
            node = pending.pop()
            if node > INPUT and node not in used:
                pending += self._calls[node - 1].refs()
            used.add(node)
        stored = sorted((n for n in used if n < INPUT), reverse=True)
        computed = sorted(n for n in used if n > INPUT)
        ids = {n: i for i, n in enumerate([INPUT, *stored, *computed])}
        calls = [self._calls[n - 1] for n in computed]
        program = Program(
            len(stored),
            tuple(Call(c.op, _numbered(c.args, ids)) for c in calls),
        )
        weights = {ids[n]: self._weights[-n - 1] for n in stored}
        return program, weights, [self._origins[n - 1] for n in computed]


def _numbered(argument: Argument, ids: Mapping[int, int]) -> Any:
    if isinstance(argument, Ref):
        return Ref(ids[argument.node])
    if isinstance(argument, tuple):
        return tuple(_numbered(item, ids) for item in argument)
    return argument
