"""Which of several trainers this process is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hapi_protocol.errors import ClientError


@dataclass(frozen=True)
class Rank:
    """One of ``world_size`` trainers, from 0 on."""

    rank: int = 0
    world_size: int = 1


def this_rank(environ: Mapping[str, str]) -> Rank:
    """As torch.distributed knows it, or else as torchrun has told.

    Args:
        environ: with ``RANK`` and ``WORLD_SIZE``, or without.

    Raises:
        ClientError: ``bad_configuration`` for variables that make no sense.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Rank(distributed.get_rank(), distributed.get_world_size())
    given = {name: environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if not any(given.values()):
        return Rank()
    try:
        found = Rank(int(given["RANK"] or ""), int(given["WORLD_SIZE"] or ""))
    except ValueError:
        found = Rank(1, 0)
    if not 0 <= found.rank < found.world_size:
        raise ClientError(
            "bad_configuration",
            f"RANK is {given['RANK']!r} and WORLD_SIZE is "
            f"{given['WORLD_SIZE']!r}; set both as torchrun does, or none",
        )
    return found
