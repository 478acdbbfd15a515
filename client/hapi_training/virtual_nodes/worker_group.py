"""The workers of a run: their nodes, and the state that a new one gets."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hapi_client.sampling.distributed import Rank
from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import random_state, set_random_state
from hapi_training.membership import WorkerLostError, reaching_others
from hapi_training.partial_backward import Segments
from hapi_training.rendezvous import ElasticMembership, open_membership
from hapi_training.state_transfer import (
    broadcast,
    dumped,
    load_values,
    loaded,
    values_of,
)
from hapi_training.store import RENDEZVOUS_VARIABLE
from hapi_training.virtual_nodes.assignment import Assignment, even
from hapi_training.virtual_nodes.exchange import Exchange, wire_device
from hapi_training.virtual_nodes.node_batches import NodeBatches
from hapi_training.virtual_nodes.rank_check import (
    check_equal,
    module_digest,
    numeric_facts,
)

logger = logging.getLogger(__name__)

_OWN = "hapi_training"
"""Name of our own values among those of a user's state."""
SECONDS_STEPS = 16
"""Steps by whose median seconds nodes are balanced."""


class WorkerGroup:
    """The workers that train a module together.

    Args:
        module: the module.
        num_nodes: number of virtual nodes.
        seed: seed of their random numbers.
        timeout_seconds: as for :class:`.VirtualNodes`.
        segments: which layers each node trains.
        strict: False to warn of workers whose bits would differ.

    Attributes:
        device: device of the module.
        step: number of the next training step of the run.
        is_behind: as of :class:`.VirtualNodes`.
        is_new: True in the pass in which this worker has joined others.
        assignment: nodes of each worker.
        exchange: sums over all workers.
        seconds: seconds of each worker, of some steps.

    Raises:
        ClientError: ``bad_configuration`` naming what differs.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        num_nodes: int,
        seed: int,
        timeout_seconds: float,
        segments: Segments,
        *,
        strict: bool,
    ) -> None:
        self._module, self._segments = module, segments
        self._num_nodes = num_nodes
        self._seed = seed
        self._strict = strict
        self.device = next(module.parameters()).device
        self.step = 0
        self._membership = open_membership(
            self.device, timeout_seconds, num_nodes
        )
        self.is_behind = self.is_new = False
        self._has_joined = self._has_state = False
        self._is_open = True
        self._joined = b""
        self._state: dict[str, Any] | None = None
        self._check_workers()
        self.assign(even(num_nodes, self.rank.world_size))

    @property
    def rank(self) -> Rank:
        """Rank of this worker, and number of workers."""
        return self._membership.rank

    @property
    def is_elastic(self) -> bool:
        """True if workers may come and go."""
        return self._membership.is_elastic

    @property
    def name(self) -> str:
        """The same for all workers of this job, on this machine."""
        rendezvous = os.environ.get(RENDEZVOUS_VARIABLE)
        if self.is_elastic and rendezvous:
            return rendezvous
        if self.rank.world_size > 1 and "MASTER_PORT" in os.environ:
            return f"torchrun {os.environ['MASTER_PORT']}"
        return f"process {os.getpid()}"

    def facts(self) -> dict[str, Any]:
        """Facts that the bits of a run depend on, fit for JSON."""
        return {
            "num_nodes": self._num_nodes,
            "seed": self._seed,
            **self._segments.facts(),
            **numeric_facts(self.device),
        }

    def begin_step(self) -> None:
        """Notes that the others may wait for this worker from now on."""
        self._membership.begin()

    def finish_step(self, exchange: Exchange, seconds: list[float]) -> None:
        """Counts a step when the module has its sums.

        Before the loop's body ends, which may save a state.

        Args:
            exchange: that of the step; the group may have changed since.
            seconds: seconds of each worker.
        """
        self._membership.done += 1
        self.step += 1
        if exchange is self.exchange:
            self.seconds.append(seconds)

    def admit(self) -> None:
        """Takes in the workers that wait, between two steps."""
        self.change(self._elastic.admit)

    def regroup(self, error: WorkerLostError) -> bool:
        """Goes on with the workers that are left after a loss.

        Returns:
            True if one of them has done what this one was doing.

        Raises:
            WorkerLostError: ``error``, if workers may not go.
        """
        if not self.is_elastic:
            raise error
        self.change(self._elastic.regroup)
        return self._membership.is_ahead

    def begin_pass(
        self, batches: NodeBatches, state: dict[str, Any] | None
    ) -> bool:
        """Begins a pass with all workers.

        Args:
            batches: the data.
            state: as for :meth:`.VirtualNodes.steps`.

        Returns:
            False if the others have finished it.
        """
        membership = self._membership
        self._batches, self._state = batches, state
        self.is_new = False
        if membership.is_elastic:
            self._join()
        elif not self._has_state:
            # Only the first rank's counts.
            self._has_state = self.rank.rank == 0
            self._share_state()
        if self._joined:
            epoch, mine = self._load_joined(), self._batches.epoch
            self.is_behind = mine < epoch
            if self.is_behind:
                return False
            self._joined = b""
            if mine != epoch:
                raise ClientError(
                    "bad_state",
                    f"this worker begins with epoch {mine}, but the others "
                    f"are in epoch {epoch}; let it begin with what they have, "
                    "without a checkpoint of its own",
                )
            # The others are about to take this step.
            self.is_new = True
            return True
        if membership.is_elastic and self._agreed_waiting():
            self.admit()
        return True

    def _join(self) -> None:
        """Joins the workers of the rendezvous, in the first pass."""
        if self._state is None:
            raise ClientError(
                "bad_configuration",
                "workers that join need the state of the others; give it: "
                'steps(data, {"tail": tail, "optimizer": optimizer})',
            )
        if self._has_joined:
            return
        self._has_joined = True
        facts = {**self.facts(), "module": module_digest(self._module)}
        check_equal(
            facts,
            self._elastic.facts(facts),
            "on the first worker",
            strict=self._strict,
        )
        self.change(self._elastic.join)

    def num_waiting(self) -> int:
        """Number of workers that wait; 0 if the state cannot be sent.

        Else this worker would fail when it has admitted one.
        """
        number = self._membership.num_waiting() if self._is_open else 0
        if number:
            try:
                self._sent_state()
            except ClientError as error:
                self._is_open, number = False, 0
                logger.warning("nobody can join any more: %s", error.message)
        return number

    def _agreed_waiting(self) -> int:
        """Number of workers that wait to join, equal on all workers."""
        while True:
            number = torch.tensor(self.num_waiting())
            try:
                return int(self.reduced(number, dist.ReduceOp.MAX))
            except WorkerLostError:
                logger.info("asking the workers that are left")

    def change(self, how: Callable[[], None]) -> None:
        """Changes the group, and gives new workers the state of the others.

        Args:
            how: :meth:`.Membership.join`, ``admit`` or ``regroup``.
        """
        membership = self._membership
        while True:
            try:
                how()
                self._share_state()
                break
            except WorkerLostError:
                if not membership.is_elastic:
                    raise
                how = self._elastic.regroup
        self.assign(even(self._num_nodes, self.rank.world_size))

    def _share_state(self) -> None:
        """Sends the state to workers that have none, if there is one.

        The position in the data is that before the next step.
        """
        membership = self._membership
        size, rank = self.rank.world_size, self.rank.rank
        mine = membership.done if self._has_state else -1
        if size > 1:
            device = wire_device(self.device)
            done = torch.full((size,), -1, device=device)
            with reaching_others("the start of a group"):
                dist.all_gather_into_tensor(
                    done, torch.tensor([mine], device=device)
                )
                sender = int(done.argmax())
                if int(done.min()) < 0:
                    content = broadcast(
                        dumped(self._sent_state()) if rank == sender else None,
                        sender,
                        device,
                    )
                    if mine < 0 and rank != sender:
                        self._joined = content
        # Not before it is here: the sender may be lost.
        self._has_state = True

    def _sent_state(self) -> dict[str, Any]:
        return values_of(self._own_state(), "the state of steps()")

    def _own_state(self) -> dict[str, Any]:
        """All that a worker needs to go on with the next step."""
        return {
            **(self._state or {"module": self._module}),
            _OWN: [
                self._batches.position(),
                self.step,
                self._membership.done,
                [p.grad for p in self._module.parameters()],
                self._segments.table,
                random_state(self.device),
            ],
        }

    def _load_joined(self) -> int:
        """Loads the state that others have sent; returns their epoch.

        In each epoch that this worker passes over: schedules and results may
        have changed at its end.
        """
        own = self._own_state()
        load_values(own, loaded(self._joined), "the other workers")
        position, self.step, self._membership.done, *others = own.pop(_OWN)
        gradients, self._segments.table, random = others
        if self._state is not None:
            # Values, which have been replaced.
            self._state.update(own)
        for parameter, gradient in zip(
            self._module.parameters(), gradients, strict=True
        ):
            parameter.grad = (
                None if gradient is None else gradient.to(parameter.device)
            )
        set_random_state(self.device, random)
        if position["epoch"] == self._batches.epoch:
            self._batches.move_to(position)
        return int(position["epoch"])

    def reduced(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        """Reduces a tensor over all workers: on all of them, or on none.

        Raises:
            WorkerLostError: after a loss, when those that are left have made
                a new group.
        """
        membership = self._membership
        if self.rank.world_size == 1:
            return tensor
        tensor = tensor.to(wire_device(self.device), copy=True)
        membership.begin()
        is_reduced = False
        try:
            with reaching_others("sum()"):
                dist.all_reduce(tensor, operation)
                is_reduced = True
                dist.barrier()
        except WorkerLostError as error:
            if not self.regroup(error) or not is_reduced:
                raise
        membership.done += 1
        return tensor

    def assign(self, assignment: Assignment) -> None:
        """Gives each worker its nodes, from the next step on."""
        self.assignment = assignment
        self.exchange = Exchange(assignment, self.rank.rank, self.device)
        # Of some steps: the first of a loop is no measure.
        self.seconds: deque[list[float]] = deque(maxlen=SECONDS_STEPS)

    def _check_workers(self) -> None:
        size = self.rank.world_size
        if size > self._num_nodes:
            raise ClientError(
                "bad_configuration",
                f"{size} workers cannot share {self._num_nodes} virtual "
                "nodes; start fewer, or give more nodes",
            )
        if size == 1:
            return
        facts = {**self.facts(), "module": module_digest(self._module)}
        gathered: list[Any] = [None] * size
        with reaching_others("the start"):
            dist.all_gather_object(gathered, facts)
        for rank, theirs in enumerate(gathered):
            check_equal(
                facts, theirs, f"on worker {rank}", strict=self._strict
            )

    @property
    def _elastic(self) -> ElasticMembership:
        assert isinstance(self._membership, ElasticMembership)
        return self._membership
