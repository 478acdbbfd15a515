"""The process group of the workers that train together.

This process alone, or the group of ``torchrun``; :mod:`.rendezvous` has that
of workers that come and go.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from hapi_client.sampling.distributed import Rank, this_rank
from hapi_protocol.errors import ClientError
from hapi_training.turns import given_back

logger = logging.getLogger(__name__)

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class WorkerLostError(ClientError):
    """Another worker is lost; those that are left may go on."""


class Membership:
    """This process alone, or the group of ``torchrun``, which is fixed.

    Args:
        device: device of the training.

    Attributes:
        rank: rank of this process, and number of workers.
        done: number of collective operations that all workers have done.
        is_ahead: True if, at the last loss, another worker had done one more.
    """

    is_elastic = False
    done = 0
    is_ahead = False

    def __init__(self, device: torch.device) -> None:
        # torch's default on a machine with a GPU has none for the CPU.
        self._backend = "gloo" if device.type == "cpu" else None
        self.rank: Rank = this_rank(os.environ)
        if self.rank.world_size > 1 and not dist.is_initialized():
            with reaching_others("the start"):
                # With torch's time limit: torchrun itself ends the ranks if
                # one is lost, and one may write a checkpoint for minutes.
                dist.init_process_group(self._backend)
            atexit.register(leave_group)
            _warn_of_shared_store()

    def begin(self) -> None:
        """Notes that a collective operation begins."""

    def num_waiting(self) -> int:
        """Number of workers that wait to be admitted; on rank 0 only."""
        return 0


@contextmanager
def reaching_others(when: str) -> Iterator[None]:
    """Turns errors of torch.distributed into one that names the step.

    A turn on a shared device is given back meanwhile: the others may need it
    to get as far.

    Args:
        when: the step, for the message.

    Raises:
        ClientError: ``worker_lost``.
    """
    try:
        with given_back():
            yield
    # ValueError: this worker has left the group after a loss.
    except (dist.DistError, RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # They hold the group, which would not end before the error does, and
        # others that wait for this worker would not notice.
        traceback.clear_frames(error.__traceback__)
        raise WorkerLostError(
            "worker_lost",
            f"another worker ended or cannot be reached at {when}: "
            f"{str(error).splitlines()[0]}; look at its output, and start "
            "again from the last checkpoint",
        ) from error


def leave_group() -> None:
    """Ends the process group: gloo's threads must not outlive Python.

    One that ends after Python aborts the process (1 of 17 runs of plain
    data parallelism on a busy machine).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    # A start that failed has counted up the number in the group's name, which
    # would never be that of the others again (torch 2.15).
    with suppress(AttributeError):
        dist.distributed_c10d._world.group_count = 0


def _warn_of_shared_store() -> None:
    """Warns if no further machine can join torchrun (pytorch #135712)."""
    # "none" and a random UUID belong to runs of a fixed number of machines.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    is_named = run != "none" and not _UUID.fullmatch(run)
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if is_named and os.environ.get(variable) != "1":
        logger.warning(
            "machines that join this torchrun later will fail with a "
            "DistStoreError; if there may be any, set %s=1 before torchrun",
            variable,
        )
