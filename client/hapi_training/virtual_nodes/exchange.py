"""Sums over the virtual nodes of all workers, on any backend of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hapi_training.membership import reaching_others
from hapi_training.virtual_nodes.assignment import Assignment
from hapi_training.virtual_nodes.reduction_tree import (
    Subtree,
    total,
    whole_subtrees,
)

# Chosen: two of them bound the memory of an exchange, and each is large enough
# that its latency is nothing next to its transfer.
CHUNK_BYTES = 32 << 20
"""Bytes of tensors that are exchanged together."""

Numbers = npt.NDArray[np.float64]
Tensors = list[torch.Tensor | None]


def add_tensors(left: Tensors, right: Tensors) -> Tensors:
    """Adds ``right`` to ``left``, in place; None has nothing to add."""
    both = [
        (a, b)
        for a, b in zip(left, right, strict=True)
        if a is not None and b is not None
    ]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class _Piece(NamedTuple):
    """Elements of a tensor, counted as if it were flat."""

    tensor: int
    start: int
    stop: int


class Exchange:
    """Sums the partial sums of all ranks along the tree.

    Rank ``k`` gets the ``k``-th part of each subtree's sum from its rank,
    adds them in the tree's order, and gives all ranks the result.  If each
    rank has one subtree, a rank sends as much as in a ring all-reduce.

    Args:
        assignment: nodes of each rank.
        rank: this rank.
        device: device of the module.
    """

    def __init__(
        self, assignment: Assignment, rank: int, device: torch.device
    ) -> None:
        self._num_nodes = sum(map(len, assignment))
        self._rank = rank
        self._device = device if len(assignment) == 1 else wire_device(device)
        self._subtrees = [
            whole_subtrees(nodes, self._num_nodes) for nodes in assignment
        ]

    @property
    def num_ranks(self) -> int:
        return len(self._subtrees)

    def gather(
        self, rows: Mapping[Subtree, Numbers], of_rank: Numbers
    ) -> tuple[dict[Subtree, Numbers], list[Numbers]]:
        """Gives all ranks some numbers of each subtree and of each rank.

        Args:
            rows: numbers of this rank's subtrees.
            of_rank: numbers of this rank.

        Returns:
            The numbers of all subtrees, and those of each rank.
        """
        if self.num_ranks == 1:
            return dict(rows), [of_rank]
        mine = [rows[tree] for tree in self._subtrees[self._rank]]
        num_columns = len(mine[0])
        table = np.zeros(
            (
                1 + max(map(len, self._subtrees)),
                max(num_columns, len(of_rank)),
            )
        )
        table[0, : len(of_rank)] = of_rank
        table[1 : 1 + len(mine), :num_columns] = mine
        gathered = self._all_gather(
            torch.from_numpy(table).to(self._device).view(-1)
        )
        tables = gathered.cpu().numpy().reshape(self.num_ranks, *table.shape)
        return {
            tree: numbers[1 + number, :num_columns]
            for trees, numbers in zip(self._subtrees, tables, strict=True)
            for number, tree in enumerate(trees)
        }, [numbers[0, : len(of_rank)] for numbers in tables]

    def sum(
        self,
        sums: Mapping[Subtree, Tensors],
        has_value: Mapping[Subtree, npt.NDArray[np.bool_]],
        like: Sequence[torch.Tensor],
    ) -> Tensors:
        """Returns the sums over all nodes, None where no node has a value.

        Args:
            sums: sums of this rank's subtrees; None where none of their
                nodes has a value.  They are overwritten.
            has_value: of all subtrees, which tensors have a value.
            like: tensors with the shapes, dtypes and strides of the results.
        """
        if self.num_ranks == 1:
            return total(sums, add_tensors, self._num_nodes)
        flat: dict[int, list[torch.Tensor]] = {}
        for pieces in _chunks(has_value, like):
            first = pieces[0].tensor
            subtrees = [
                [tree for tree in trees if has_value[tree][first]]
                for trees in self._subtrees
            ]
            summed = self._sum_chunk(sums, pieces, subtrees, like[first])
            for piece, part in zip(
                pieces,
                torch.split(summed, [p.stop - p.start for p in pieces]),
                strict=True,
            ):
                flat.setdefault(piece.tensor, []).append(part)
        # Tensors of their own, laid out as on a single rank: norms depend on
        # the layout.
        return [
            torch.empty_like(tensor).copy_(
                torch.cat(flat.pop(number)).view(tensor.shape)
            )
            if number in flat
            else torch.empty_like(tensor)
            if not tensor.numel()
            and any(t[number] for t in has_value.values())
            else None
            for number, tensor in enumerate(like)
        ]

    def copy_from(
        self, rank: int, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns a rank's integers, of a few bytes each, on all ranks."""
        if self.num_ranks == 1:
            return list(tensors)
        flat = torch.cat([t.reshape(-1).to(torch.int64) for t in tensors])
        flat = flat.to(self._device)
        with reaching_others("a sum"):
            dist.broadcast(flat, rank)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [
            part.view(tensor.shape).to(tensor)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def wait_for_all(self) -> None:
        """Waits until all ranks have the sums.

        A step counts only then: if a rank is lost before, the others take it
        again.
        """
        if self.num_ranks > 1:
            with reaching_others("the end of a step"):
                dist.barrier()

    def _sum_chunk(
        self,
        sums: Mapping[Subtree, Tensors],
        pieces: Sequence[_Piece],
        subtrees: Sequence[Sequence[Subtree]],
        like: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the sums of a chunk, flat.

        Args:
            sums: sums of this rank's subtrees.
            pieces: the chunk.
            subtrees: of each rank, those that have values of it.
            like: tensor of its dtype.
        """
        length = sum(piece.stop - piece.start for piece in pieces)
        part = -(-length // self.num_ranks)
        mine = subtrees[self._rank]
        send = torch.zeros(
            (len(mine), part * self.num_ranks),
            dtype=like.dtype,
            device=self._device,
        )
        for row, tree in zip(send, mine, strict=True):
            row[:length] = torch.cat(
                [
                    value.reshape(-1)[piece.start : piece.stop]
                    for piece in pieces
                    if (value := sums[tree][piece.tensor]) is not None
                ]
            )
        send = send.view(len(mine), self.num_ranks, part).transpose(0, 1)
        counts = [len(trees) for trees in subtrees]
        received = send.new_empty((sum(counts), part))
        with reaching_others("a sum"):
            dist.all_to_all_single(
                received,
                # One row for each part of each subtree.
                send.reshape(-1, part),
                counts,
                [len(mine)] * self.num_ranks,
            )
        present = [tree for trees in subtrees for tree in trees]
        values: dict[Subtree, Tensors] = {
            tree: [None] for trees in self._subtrees for tree in trees
        }
        for tree, value in zip(present, received, strict=True):
            values[tree] = [value]
        (summed,) = total(values, add_tensors, self._num_nodes)
        assert summed is not None, "chunks have values"
        return self._all_gather(summed)[:length]

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty(self.num_ranks * len(tensor))
        with reaching_others("a sum"):
            dist.all_gather_into_tensor(gathered, tensor.contiguous())
        return gathered


def wire_device(device: torch.device) -> torch.device:
    """Returns the device of tensors that the group's backend exchanges.

    gloo has no ``all_to_all`` of a GPU's tensors.
    """
    backends = dict(
        item.split(":") for item in dist.get_backend_config().split(",")
    )
    return (
        torch.device("cpu")
        if backends.get(device.type) == dist.Backend.GLOO
        else device
    )


def _chunks(
    has_value: Mapping[Subtree, npt.NDArray[np.bool_]],
    like: Sequence[torch.Tensor],
) -> Iterator[list[_Piece]]:
    """Divides tensors; those of a chunk have values in the same subtrees."""
    table = np.array(list(has_value.values()))
    kinds: dict[tuple[bytes, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(like):
        if table[:, number].any():
            kind = table[:, number].tobytes(), tensor.dtype
            kinds.setdefault(kind, []).append(number)
    for numbers in kinds.values():
        room = room_of_chunk = CHUNK_BYTES // like[numbers[0]].element_size()
        pieces: list[_Piece] = []
        for number in numbers:
            start = 0
            while start < like[number].numel():
                stop = min(like[number].numel(), start + room)
                pieces.append(_Piece(number, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    yield pieces
                    pieces, room = [], room_of_chunk
        if pieces:
            yield pieces
