"""Rank of this process among the trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hapi_client.sampling.partition import Reader
from hapi_protocol.errors import ClientError


@dataclass(frozen=True)
class Rank:
    """The rank of one of ``world_size`` trainers, from 0."""

    rank: int = 0
    world_size: int = 1

    def reader(self, worker: int = 0, num_workers: int = 1) -> Reader:
        """The reader of this rank's samples, or of a loader worker's."""
        return Reader((self.rank,), self.world_size, worker, num_workers)


def this_rank(environ: Mapping[str, str]) -> Rank:
    """Returns the rank of torch.distributed, or else of torchrun.

    Args:
        environ: environment, with ``RANK`` and ``WORLD_SIZE`` or without.

    Raises:
        ClientError: ``bad_configuration`` for invalid variables.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Rank(distributed.get_rank(), distributed.get_world_size())
    rank, world_size = environ.get("RANK"), environ.get("WORLD_SIZE")
    if not rank and not world_size:
        return Rank()
    try:
        parsed = Rank(int(rank or ""), int(world_size or ""))
    except ValueError:
        parsed = None
    if parsed is None or not 0 <= parsed.rank < parsed.world_size:
        raise ClientError(
            "bad_configuration",
            f"RANK is {rank!r} and WORLD_SIZE is {world_size!r}; set both as "
            "torchrun does, or neither",
        )
    return parsed
