"""``VirtualNodes``: a batch divided over nodes instead of workers."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hapi_client.option_checks import check_integer
from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import random_state, set_random_state
from hapi_training.membership import WorkerLostError, reaching_others
from hapi_training.rendezvous import ElasticMembership, open_membership
from hapi_training.state_transfer import broadcast, load, saved
from hapi_training.virtual_nodes.assignment import (
    Assignment,
    balanced_counts,
    divided,
    even,
    step_seconds,
)
from hapi_training.virtual_nodes.exchange import Exchange, wire_device
from hapi_training.virtual_nodes.node_batches import (
    NodeBatch,
    NodeBatches,
    node_batches,
)
from hapi_training.virtual_nodes.rank_check import (
    check_equal,
    module_digest,
    numeric_facts,
)
from hapi_training.virtual_nodes.step import Step, StepSettings

logger = logging.getLogger(__name__)

VERSION = 1
_OWN = "hapi_training"
"""Name of our own values among those of a user's state."""
Number = TypeVar("Number", int, float, torch.Tensor)


class VirtualNodes:
    """Divides each batch over virtual nodes, and these over the workers.

    ::

        nodes = VirtualNodes(tail, 8)
        for epoch in range(data.epoch, 5):
            data.set_epoch(epoch)
            for step in nodes.steps(data):
                for features, labels in step:
                    step.backward(criterion(tail(features), labels))
                optimizer.step()
                optimizer.zero_grad()

    The model has the same bits after each step on any number of workers that
    is not above that of nodes: samples, random numbers and the order of sums
    follow from the nodes.  The documentation's page "Virtual nodes" states
    the conditions.

    The workers are this process alone, or the group of ``torchrun`` or
    ``torch.distributed``, or those that name a rendezvous
    (``HAPI_RENDEZVOUS=HOST:PORT``), which may come and go.

    Args:
        module: what is trained, with all parameters of the optimizer; not
            wrapped for data parallelism.  It is on its device already.
        num_nodes: number of nodes; the batch size is a multiple of it.
        seed: seed of the random numbers of the nodes, as for dropout.
        timeout_seconds: longest wait for a worker of a rendezvous that does
            not answer.
        strict: False to warn where the bits could differ, instead of an
            error.

    Attributes:
        num_nodes: number of nodes.
        seed: as given.
        step: number of the next training step of the run.
        is_behind: True on a worker that has joined, until it comes to the
            epoch of the others.

    Raises:
        ClientError: ``bad_configuration`` naming the value and what is
            allowed.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        num_nodes: int,
        *,
        seed: int = 0,
        timeout_seconds: float = 30.0,
        strict: bool = True,
    ) -> None:
        check_integer("num_nodes", num_nodes, 1)
        check_integer("seed", seed, 0)
        _check_module(module)
        self.num_nodes, self.seed, self.step = num_nodes, seed, 0
        self._module = module
        self._device = next(module.parameters()).device
        self._strict = strict
        self._membership = open_membership(
            self._device, timeout_seconds, num_nodes
        )
        self._epoch = 0
        self.is_behind = self._has_joined = self._has_state = False
        self._has_warned = False
        self._joined = b""
        self._state: dict[str, Any] | None = None
        self._check_workers()
        self._assign(even(num_nodes, self._membership.rank.world_size))

    @property
    def mine(self) -> tuple[int, ...]:
        """Nodes of this worker, in the order in which it computes them."""
        return self._assignment[self._membership.rank.rank]

    @property
    def _elastic(self) -> ElasticMembership:
        assert isinstance(self._membership, ElasticMembership)
        return self._membership

    @property
    def is_alone(self) -> bool:
        """True if no other worker can take part."""
        membership = self._membership
        return not membership.is_elastic and membership.rank.world_size == 1

    @property
    def is_first(self) -> bool:
        """True on one of the workers, for instance to write files."""
        return self._membership.rank.rank == 0

    def steps(
        self, data: Any, state: dict[str, Any] | None = None
    ) -> Iterator[Step]:
        """Yields the steps of an epoch, or of what is left of it.

        With a rendezvous, workers join before a step, and get the state of
        the others; if one is lost, the others take the step again, so that
        the loop sees more batches.  A worker that joins yields no step of
        epochs that the others have trained already.

        Args:
            data: a :class:`hapi_client.FeatureDataset`, ``job.train_loader``
                or ``job.val_loader``; or batches that all workers have in
                equal order, of which node ``v`` of ``V`` gets the rows
                ``v::V``.  Without gradients (``torch.no_grad()``,
                ``val_loader``, ``shuffle=False``) nothing is exchanged.
            state: what the other workers get of the first one at the start,
                and of the others when they join, by name: objects with
                ``state_dict`` and ``load_state_dict``, as tail and optimizer,
                or values, which are replaced in this mapping.  Data and
                virtual nodes need not be in it.  None for the module alone.

        Raises:
            ClientError: ``bad_configuration`` for data that is divided
                already, or for a loop that leaves a step early;
                ``worker_lost``.
            HapiError: of the data.
        """
        batches = node_batches(data, self.num_nodes, self._epoch)
        is_training = batches.is_training and torch.is_grad_enabled()
        if not is_training:
            if not self.is_behind:
                yield from self._evaluated(batches)
            return
        self._batches, self._state = batches, state
        self._check_optimizers()
        if self._begin():
            yield from self._trained(batches)
        else:
            batches.skip()
        self._epoch += 1

    def _evaluated(self, batches: NodeBatches) -> Iterator[Step]:
        for batch in batches.batches(self.mine):
            step = self._step(batch, lambda error: None, is_training=False)
            yield step
            self._check_finished(step)

    def _trained(self, batches: NodeBatches) -> Iterator[Step]:
        remaining = batches.batches(self.mine)

        def take_again(
            error: WorkerLostError,
        ) -> tuple[NodeBatch, Exchange] | None:
            nonlocal remaining
            # Before others get the state: that of the step's beginning.
            if not self._membership.is_elastic:
                raise error
            batches.move_to(before)
            self._change_group(self._elastic.regroup)
            if self._membership.is_ahead:
                batches.move_to(after)
                return None
            remaining = batches.batches(self.mine)
            return next(remaining), self._exchange

        num_samples = 0
        while True:
            assignment = self._assignment
            before = batches.position()
            batch = next(remaining, None)
            if batch is None:
                break
            after = batches.position()
            self._warn_of_single_samples(batch)
            step = self._step(batch, take_again, is_training=True)
            yield step
            self._check_finished(step)
            num_samples += step.num_samples
            if after["epoch"] != batches.epoch:
                # The loader has only to end its report.
                continue
            if step.num_waiting:
                self._change_group(self._elastic.admit)
            if self._assignment is not assignment:
                batches.move_to(after)
                remaining = batches.batches(self.mine)
        if not num_samples:
            raise ClientError(
                "bad_sample",
                "this pass had no samples, or none of them can be decoded; "
                "repair them, or use other data",
            )

    def _step(
        self,
        batch: NodeBatch,
        take_again: Callable[
            [WorkerLostError], tuple[NodeBatch, Exchange] | None
        ],
        *,
        is_training: bool,
    ) -> Step:
        self._membership.begin()
        settings = StepSettings(
            self.step,
            self.num_nodes,
            self.seed,
            self._device,
            is_training,
            self._waiting_now,
            take_again,
            self._finished,
        )
        return Step(self._module, batch, self._exchange, settings)

    def _finished(self, exchange: Exchange, seconds: list[float]) -> None:
        # Before the loop's body ends: it may save a state.
        self._membership.done += 1
        self.step += 1
        if exchange is self._exchange:
            self._seconds.append(seconds)

    def _check_optimizers(self) -> None:
        """Refuses optimizers of parameters that nobody sums."""
        known = {id(p) for p in self._module.parameters()}
        for name, value in (self._state or {}).items():
            groups = getattr(value, "param_groups", None)
            if not isinstance(groups, list):
                continue
            unknown = [
                tuple(p.shape)
                for group in groups
                for p in group["params"]
                if id(p) not in known
            ]
            if unknown:
                raise ClientError(
                    "bad_configuration",
                    f"the optimizer {name!r} has parameters that are not of "
                    f"the module, of shapes {unknown[:3]}: their gradients "
                    "would not be summed; give VirtualNodes a module with all "
                    "of them, such as nn.ModuleList([tail, head])",
                )

    def _begin(self) -> bool:
        """Begins a pass with all workers.

        Returns:
            False if the others have finished it.
        """
        membership = self._membership
        if membership.is_elastic:
            self._join()
        elif not self._has_state:
            # Only the first rank's counts.
            self._has_state = self.is_first
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
            return True
        if membership.is_elastic and self._num_waiting():
            self._change_group(self._elastic.admit)
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
        facts = self._run_facts()
        check_equal(
            facts,
            self._elastic.facts(facts),
            "on the first worker",
            strict=self._strict,
        )
        self._change_group(self._elastic.join)

    def _waiting_now(self) -> int:
        """Number of workers that wait; 0 if the state cannot be sent."""
        number = self._membership.num_waiting()
        if number:
            try:
                saved(self._own_state())
            except ClientError as error:
                logger.warning("nobody can join: %s", error.message)
                return 0
        return number

    def _num_waiting(self) -> int:
        """Number of workers that wait to join, equal on all workers."""
        while True:
            number = torch.tensor(self._waiting_now())
            try:
                return int(self._reduced(number, dist.ReduceOp.MAX))
            except WorkerLostError:
                logger.info("asking the workers that are left")

    def _change_group(self, change: Callable[[], None]) -> None:
        """Changes the group, and gives new workers the state of the others.

        Args:
            change: :meth:`.Membership.join`, ``admit`` or ``regroup``.
        """
        membership = self._membership
        while True:
            try:
                change()
                self._share_state()
                break
            except WorkerLostError:
                if not membership.is_elastic:
                    raise
                change = self._elastic.regroup
        self._assign(even(self.num_nodes, membership.rank.world_size))

    def _share_state(self) -> None:
        """Sends the state to workers that have none, if there is one.

        The position in the data is that before the next step.
        """
        membership = self._membership
        size, rank = membership.rank.world_size, membership.rank.rank
        mine = membership.done if self._has_state else -1
        if size > 1:
            device = wire_device(self._device)
            done = torch.full((size,), -1, device=device)
            with reaching_others("the start of a group"):
                dist.all_gather_into_tensor(
                    done, torch.tensor([mine], device=device)
                )
                sender = int(done.argmax())
                if int(done.min()) < 0:
                    own = self._own_state()
                    content = broadcast(
                        saved(own) if rank == sender else None, sender, device
                    )
                    if mine < 0 and rank != sender:
                        self._joined = content
        # Not before it is here: the sender may be lost.
        self._has_state = True

    def _own_state(self) -> dict[str, Any]:
        """All that a worker needs to go on with the next step."""
        return {
            **(self._state or {"module": self._module}),
            _OWN: [
                self._batches.position(),
                self.step,
                self._membership.done,
                [p.grad for p in self._module.parameters()],
                random_state(self._device),
            ],
        }

    def _load_joined(self) -> int:
        """Loads the state that others have sent; returns their epoch.

        In each epoch that this worker passes over: schedules and results may
        have changed at its end.
        """
        own = self._own_state()
        load(own, self._joined)
        position, self.step, self._membership.done, gradients, random = (
            own.pop(_OWN)
        )
        if self._state is not None:
            # Values, which have been replaced.
            self._state.update(own)
        for parameter, gradient in zip(
            self._module.parameters(), gradients, strict=True
        ):
            parameter.grad = (
                None if gradient is None else gradient.to(parameter.device)
            )
        set_random_state(self._device, random)
        if position["epoch"] == self._batches.epoch:
            self._batches.move_to(position)
        return int(position["epoch"])

    def sum(self, value: Number) -> Number:
        """Returns the sum over all workers, such as of correct answers.

        Sums of integers are exact; others depend on the workers in their
        last bits.

        Args:
            value: a number or tensor of equal shape on all workers.

        Raises:
            ClientError: ``worker_lost`` if a worker is lost with its part;
                evaluate again.
        """
        if self.is_behind:
            return value
        given = torch.as_tensor(value)
        # Sums of bytes, or of numbers above 2**24, would lose digits.
        if given.is_floating_point():
            wide = torch.as_tensor(value, dtype=torch.float64)
        else:
            wide = given if given.is_complex() else given.long()
        tensor = self._reduced(wide, dist.ReduceOp.SUM)
        if not isinstance(value, torch.Tensor):
            return tensor.item()  # type: ignore[return-value]
        tensor = tensor.to(value.device)
        return tensor.to(value.dtype) if value.is_floating_point() else tensor

    def _reduced(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        """Reduces a tensor over all workers: on all of them, or on none.

        Raises:
            WorkerLostError: after a loss, when those that are left have made
                a new group.
        """
        membership = self._membership
        if membership.rank.world_size == 1:
            return tensor
        tensor = tensor.to(wire_device(self._device), copy=True)
        membership.begin()
        is_reduced = False
        try:
            with reaching_others("sum()"):
                dist.all_reduce(tensor, operation)
                is_reduced = True
                dist.barrier()
        except WorkerLostError:
            if not membership.is_elastic:
                raise
            self._change_group(self._elastic.regroup)
            if not (is_reduced and membership.is_ahead):
                raise
        membership.done += 1
        return tensor

    def balance(self) -> float:
        """Gives slow workers fewer nodes, from the next step on.

        By the median seconds of the last steps.  All workers call it between
        the same steps.  The model does not depend on it.

        Returns:
            Expected speed-up of the compute, at least 1; with less than
            :data:`MIN_GAIN` the nodes stay where they are.
        """
        if self._membership.rank.world_size == 1 or not self._seconds:
            return 1.0
        counts = [len(nodes) for nodes in self._assignment]
        costs = [
            statistics.median(seconds) / count
            for seconds, count in zip(
                zip(*self._seconds, strict=True), counts, strict=True
            )
        ]
        best = balanced_counts(self.num_nodes, costs)
        gain = step_seconds(counts, costs) / step_seconds(best, costs)
        if gain < MIN_GAIN:
            logger.info("virtual nodes stay as they are: %s", counts)
            return 1.0
        logger.info(
            "virtual nodes by worker: %s instead of %s; expected speed-up "
            "%.2f",
            best,
            counts,
            gain,
        )
        self._assign(divided(self.num_nodes, best))
        return gain

    def state_dict(self) -> dict[str, Any]:
        """The step, and what the bits of the run depend on."""
        return {
            "version": VERSION,
            "step": self.step,
            "epoch": self._epoch,
            **self._facts(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues a run, on any number of workers.

        Raises:
            ClientError: ``bad_state`` if it is no state, or
                ``bad_configuration`` naming what differs, such as threads.
        """
        if (
            state.get("version") != VERSION
            or type(state.get("step")) is not int
        ):
            raise ClientError(
                "bad_state",
                f"the state of virtual nodes is {state!s:.80}; give a "
                f"state_dict() of version {VERSION}",
            )
        facts = self._facts()
        for name in ("num_nodes", "seed"):
            check_equal({name: facts[name]}, state, "in the state")
        check_equal(facts, state, "in the state", strict=self._strict)
        self.step, self._epoch = state["step"], int(state["epoch"])

    def _facts(self) -> dict[str, Any]:
        return {
            "num_nodes": self.num_nodes,
            "seed": self.seed,
            **numeric_facts(self._device),
        }

    def _run_facts(self) -> dict[str, Any]:
        return {**self._facts(), "module": module_digest(self._module)}

    def _check_workers(self) -> None:
        size = self._membership.rank.world_size
        if size > self.num_nodes:
            raise ClientError(
                "bad_configuration",
                f"{size} workers cannot share {self.num_nodes} virtual "
                "nodes; start fewer, or give more nodes",
            )
        if size == 1:
            return
        facts = self._run_facts()
        gathered: list[Any] = [None] * size
        with reaching_others("the start"):
            dist.all_gather_object(gathered, facts)
        for rank, theirs in enumerate(gathered):
            check_equal(
                facts, theirs, f"on worker {rank}", strict=self._strict
            )

    def _assign(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._exchange = Exchange(
            assignment, self._membership.rank.rank, self._device
        )
        # Of some steps: the first of a loop is no measure.
        self._seconds: deque[list[float]] = deque(maxlen=SECONDS_STEPS)

    def _warn_of_single_samples(self, batch: NodeBatch) -> None:
        is_single = any(node.size == 1 for node in batch.nodes)
        if is_single and not self._has_warned:
            self._has_warned = any(
                isinstance(module, _BatchNorm) and module.training
                for module in self._module.modules()
            )
            if self._has_warned:
                logger.warning(
                    "a virtual node has one sample of step %d, of which batch "
                    "norm cannot compute a variance; leave out the short last "
                    "batch (drop_last=True), or use other batches",
                    self.step,
                )

    def _check_finished(self, step: Step) -> None:
        if not step.is_finished:
            raise ClientError(
                "bad_configuration",
                f"step {step.number} was left before its last virtual node; "
                "leave the loop over steps instead",
            )


def _check_module(module: torch.nn.Module) -> None:
    wrapped = (DataParallel, DistributedDataParallel)
    names = {type(part).__name__ for part in module.modules()}
    if isinstance(module, wrapped) or any("FSDP" in name for name in names):
        raise ClientError(
            "bad_configuration",
            f"the module is a {type(module).__name__}, which sums gradients "
            "itself; give the bare module (module.module)",
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise ClientError(
            "bad_configuration", "the module has no parameter to train"
        )


# Chosen: less than the seconds of equal steps differ by on a shared machine.
SECONDS_STEPS = 16
"""Steps by whose median seconds nodes are balanced."""
MIN_GAIN = 1.03
"""Expected speed-up from which :meth:`VirtualNodes.balance` moves nodes."""
