"""Decides which calls of a lowered graph may overwrite their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hapi_splitter.graph.batch_independence import Value
from hapi_splitter.graph.operators import (
    COMMUTATIVE,
    OVERLAPPING,
    VIEWS,
    operators,
)
from hapi_splitter.graph.program import (
    INPUT,
    Call,
    Program,
)


class BufferReuse:
    """Decides which of its input tensors a call may overwrite.

    Tensors that may share memory form one storage, named by the id that
    allocated it. A storage dies with the last call that reads any of them.
    """

    def __init__(
        self,
        program: Program,
        values: Sequence[Value],
        nodes: Sequence[int],
        start: int,
        stop: int,
    ) -> None:
        self._values = values
        self._storage = {start: start}
        self._protected = {start, *range(INPUT + 1, program.first_call)}
        self._overwritten: dict[int, int] = {}
        calls = {node: program.call(node) for node in nodes}
        self._last_read = self._lifetimes(calls, stop)
        self._released: dict[int, list[int]] = {}
        for tensor in nodes:
            last = self._last_read[self._of(tensor)]
            self._released.setdefault(last, []).append(tensor)
        for node, call in calls.items():
            target = self._target(node, call)
            if target is not None:
                self._overwritten[node] = target

    def _lifetimes(
        self, calls: Mapping[int, Call], stop: int
    ) -> dict[int, int]:
        last_read: dict[int, int] = {}
        for node, call in calls.items():
            for read in call.refs():
                last_read[self._of(read)] = node
            last_read.setdefault(node, node)
            shares = call.op in VIEWS
            self._storage[node] = self._of(call.refs()[0]) if shares else node
            if call.op in OVERLAPPING:
                self._protected.add(self._storage[node])
        last_read[self._of(stop)] = stop + 1
        return last_read

    def _of(self, node: int) -> int:
        return self._storage.get(node, node)

    def _target(self, node: int, call: Call) -> int | None:
        if operators()[call.op].inplace_name is None:
            return None
        reads = call.refs()
        candidates = reads[:2] if self._exchangeable(call) else reads[:1]
        for read in candidates:
            if self._dead_after(node, read, reads):
                return read
        return None

    @staticmethod
    def _exchangeable(call: Call) -> bool:
        return call.op in COMMUTATIVE and call.args[2:] in ((), (1,))

    def _dead_after(self, node: int, read: int, reads: Sequence[int]) -> bool:
        storage = self._of(read)
        before, after = self._values[read], self._values[node]
        return (
            storage not in self._protected
            and self._last_read[storage] == node
            and [self._of(other) for other in reads].count(storage) == 1
            and before.shape == after.shape
            and before.batch == after.batch
            and before.dtype == after.dtype
            # A view must not keep a larger buffer alive.
            and self._values[storage].num_bytes == before.num_bytes
        )

    def target(self, node: int) -> int | None:
        """The tensor that call ``node`` overwrites, if any."""
        return self._overwritten.get(node)

    def released_by(self, node: int) -> list[int]:
        """Ids of all tensors that nothing needs after call ``node``."""
        return self._released.get(node, [])
