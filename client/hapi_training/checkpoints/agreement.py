"""The bytes of a checkpoint, made equal on all ranks that write it.

Ranks write ranges of one file, so that their values must be the same.  Those
that are trained are, by the exchange of gradients.  Others may differ, such
as statistics of batches: then the first rank's are those of the checkpoint,
as in stock scripts, where it saves alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from hapi_protocol.errors import ClientError
from hapi_training.checkpoints import ranks
from hapi_training.checkpoints.torch_file import bytes_of

Storages: TypeAlias = Sequence[torch.UntypedStorage]


def checksums(
    storages: Storages, left_out: Collection[int]
) -> list[tuple[int, int]]:
    """Returns length and checksum of each storage.

    Args:
        storages: the storages.
        left_out: addresses of those whose checksum is 0, to save time.
    """
    return [
        (
            storage.nbytes(),
            0
            if storage._cdata in left_out
            else zlib.crc32(bytes_of(storage).cpu().numpy().data),
        )
        for storage in storages
    ]


def make_equal(
    content: Any,
    storages: Storages,
    of_ranks: Sequence[Sequence[tuple[int, int]]],
    trained: Collection[int],
) -> None:
    """Gives all ranks the first one's bytes where theirs differ.

    Args:
        content: content of the checkpoint, for messages.
        storages: its storages, in their order.
        of_ranks: :func:`checksums` of each rank.
        trained: addresses of storages that may not differ.

    Raises:
        ClientError: ``bad_state``, on all ranks, if the ranks do not have one
            state; ``worker_lost``.
    """
    first, *others = of_ranks
    lengths = [length for length, _ in first]
    for number, other in enumerate(others, 1):
        if [length for length, _ in other] != lengths:
            raise ClientError(
                "bad_state",
                f"rank {number} has other tensors in its state than rank 0; "
                "save parts of a model that ranks share with "
                "SwiftStorageWriter",
            )
    for index, storage in enumerate(storages):
        if all(other[index] == first[index] for other in others):
            continue
        # The first rank decides: addresses of others mean nothing here.
        is_trained = ranks.broadcast(storage._cdata in trained)
        if is_trained:
            raise ClientError(
                "bad_state",
                f"ranks have different values of {_path(content, storage)}, "
                "which an optimizer trains; train one model on all ranks "
                "(DistributedDataParallel, VirtualNodes), or give each rank "
                "a place of its own without torch.distributed",
            )
        is_first = ranks.rank() == 0
        mine = bytes_of(storage).cpu().numpy().tobytes() if is_first else b""
        data = bytearray(ranks.broadcast(mine))
        if not is_first:
            bytes_of(storage).copy_(torch.frombuffer(data, dtype=torch.uint8))


def distinct(
    states: Sequence[dict[str, torch.Tensor]],
) -> list[dict[str, torch.Tensor]]:
    """Returns states of generators, by rank; one if all are equal."""
    first = states[0]
    is_equal = all(
        torch.equal(state[name], first[name])
        for state in states
        for name in first
    )
    return list(states[:1] if is_equal else states)


def _path(content: Any, storage: torch.UntypedStorage) -> str:
    return next(
        keystr(path)
        for path, leaf in tree_leaves_with_path(content)
        if torch.is_tensor(leaf)
        and leaf.untyped_storage()._cdata == storage._cdata
    )
