"""``VirtualNodes``: a batch divided over nodes instead of workers."""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hapi_client.option_checks import check_integer, check_seconds
from hapi_protocol.errors import ClientError
from hapi_splitter.units import count_text
from hapi_training.membership import WorkerLostError
from hapi_training.partial_backward import PartialBackward, Segments
from hapi_training.turns import DeviceQueue, NoQueue, given_back, turns_of
from hapi_training.virtual_nodes.assignment import (
    balanced_counts,
    divided,
    step_seconds,
)
from hapi_training.virtual_nodes.exchange import Exchange
from hapi_training.virtual_nodes.node_batches import (
    NodeBatch,
    NodeBatches,
    node_batches,
)
from hapi_training.virtual_nodes.rank_check import check_equal
from hapi_training.virtual_nodes.step import Step, StepSettings
from hapi_training.virtual_nodes.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

VERSION = 1
# Chosen: less than the seconds of equal steps differ by on a shared machine.
MIN_GAIN = 1.03
"""Expected speed-up from which :meth:`VirtualNodes.balance` moves nodes."""
# Chosen: with as much waiting a gain of 1.33 becomes less than 1.15.
MAX_WAITING_SHARE = 0.5
"""Part of an epoch's seconds from which a warning says so, if it is above"""
MIN_WAITED_SECONDS = 1.0
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
        partial: lets nodes train only the last layers, in turn.
        queue: a :class:`DeviceQueue` or its socket, if other jobs compute on
            the device, too: each node waits for its turn.
        timeout_seconds: longest wait for a worker of a rendezvous that does
            not answer.
        strict: False to warn where the bits could differ, instead of an
            error.

    Attributes:
        num_nodes: number of nodes.
        seed: as given.
        timeout_seconds: as given.

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
        partial: PartialBackward | None = None,
        queue: DeviceQueue | str | os.PathLike[str] | None = None,
        timeout_seconds: float = 30.0,
        strict: bool = True,
    ) -> None:
        check_integer("num_nodes", num_nodes, 1)
        check_integer("seed", seed, 0)
        if partial is not None and not isinstance(partial, PartialBackward):
            raise ClientError(
                "bad_configuration",
                f"partial is a {type(partial).__name__}; give a "
                "PartialBackward, such as PartialBackward(4)",
            )
        self.timeout_seconds = timeout_seconds
        check_seconds(self, "timeout_seconds")
        _check_module(module)
        self.num_nodes, self.seed = num_nodes, seed
        self._module = module
        self._strict = strict
        self._segments = Segments(module, partial, num_nodes)
        self._group = WorkerGroup(
            module,
            num_nodes,
            seed,
            timeout_seconds,
            self._segments,
            strict=strict,
        )
        self._turns = NoQueue()
        self._total_steps: int | None = None
        if queue is not None:
            if not isinstance(queue, DeviceQueue):
                queue = DeviceQueue(queue)
            self._total_steps = queue.steps
            self._turns = turns_of(
                queue,
                self._group.device,
                self._group.rank.rank,
                self._group.name,
                timeout_seconds,
            )
        self._epoch = 0
        self._warned: set[str] = set()

    @property
    def step(self) -> int:
        """Number of the next training step of the run."""
        return self._group.step

    @property
    def is_behind(self) -> bool:
        """True on a worker that has joined, before the others' epoch."""
        return self._group.is_behind

    @property
    def mine(self) -> tuple[int, ...]:
        """Nodes of this worker, in the order in which it computes them."""
        return self._group.assignment[self._group.rank.rank]

    @property
    def is_alone(self) -> bool:
        """True if no other worker can take part."""
        return not self._group.is_elastic and self._group.rank.world_size == 1

    @property
    def is_first(self) -> bool:
        """True on one of the workers, for instance to write files."""
        return self._group.rank.rank == 0

    def __repr__(self) -> str:
        workers = count_text(self._group.rank.world_size, "worker")
        return f"VirtualNodes({self.num_nodes}) on {workers}, step {self.step}"

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
        if state is not None and not isinstance(state, dict):
            raise ClientError(
                "bad_configuration",
                f"the state of steps() is a {type(state).__name__}; give a "
                'dict of objects and values, such as {"tail": tail}',
            )
        self._check_optimizers(state or {})
        is_mine = self._group.begin_pass(batches, state)
        try:
            if is_mine:
                yield from self._trained(batches)
            else:
                batches.skip()
        finally:
            # A loop that is left early counts, too.
            self._epoch += 1

    def _evaluated(self, batches: NodeBatches) -> Iterator[Step]:
        # Also within a training step, which goes on with a turn.
        with given_back():
            for batch in batches.batches(self.mine):
                step = self._step(batch, lambda error: None, is_training=False)
                try:
                    yield step
                finally:
                    self._turns.give_back()
                self._check_finished(step)

    def _trained(self, batches: NodeBatches) -> Iterator[Step]:
        remaining = batches.batches(self.mine)

        def take_again(
            error: WorkerLostError,
        ) -> tuple[NodeBatch, Exchange] | None:
            nonlocal remaining
            # A worker that gets the state takes this step, too.
            batches.move_to(before)
            if self._group.regroup(error):
                batches.move_to(after)
                return None
            remaining = batches.batches(self.mine)
            return next(remaining), self._group.exchange

        # The others may have had all of this pass.
        num_samples = int(self._group.is_new)
        started, waited = time.monotonic(), 0.0
        while True:
            assignment = self._group.assignment
            before = batches.position()
            asked = time.monotonic()
            batch = next(remaining, None)
            waited += time.monotonic() - asked
            if batch is None:
                break
            after = batches.position()
            self._warn_of_single_samples(batch)
            step = self._step(batch, take_again, is_training=True)
            try:
                yield step
            finally:
                self._turns.give_back()
            self._check_finished(step)
            self._turns.measured()
            if step.has_targets and not math.isfinite(step.loss):
                self._warn(
                    "step %d has the loss %f, of which the gradients are left "
                    "as they are; lower the learning rate, or look for inputs "
                    "that are not finite",
                    step.number,
                    step.loss,
                )
            if step.unreached and step.has_targets:
                self._warn(
                    "no virtual node with samples trains the first %d of %d "
                    "segments in step %d, which stay as they are; leave out "
                    "short last batches (drop_last=True), or give more "
                    "virtual nodes",
                    step.unreached,
                    self._segments.count,
                    step.number,
                )
            num_samples += step.num_samples
            if after["epoch"] != batches.epoch:
                # The loader has only to end its report.
                continue
            if step.num_waiting:
                self._group.admit()
            if self._group.assignment is not assignment:
                batches.move_to(after)
                remaining = batches.batches(self.mine)
        share = waited / (time.monotonic() - started)
        is_long = waited > MIN_WAITED_SECONDS and share > MAX_WAITING_SHARE
        if self._segments.count > 1 and is_long:
            self._warn(
                "partial backward passes gain little here: %.0f %% of the "
                "seconds of this epoch went into waiting for data; leave out "
                "partial= (--partial-backward)",
                100 * share,
            )
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
        self._group.begin_step()
        if is_training:
            self._segments.begin_step()
        settings = StepSettings(
            self.step,
            self.num_nodes,
            self.seed,
            self._group.device,
            is_training,
            self._group.is_elastic,
            self._segments,
            self._turns,
            self._left_turns(),
            self._group.num_waiting,
            take_again,
            self._group.finish_step,
        )
        return Step(self._module, batch, self._group.exchange, settings)

    def _left_turns(self) -> int | None:
        if self._total_steps is None:
            return None
        turns = len(self.mine) + (self._group.rank.world_size > 1)
        return max(1, self._total_steps - self.step) * turns

    def _check_optimizers(self, state: Mapping[str, Any]) -> None:
        """Refuses optimizers of parameters that nobody sums."""
        known = {id(p) for p in self._module.parameters()}
        for name, value in state.items():
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
        kind = 2 * given.is_complex() + given.is_floating_point()
        shape = zlib.crc32(str(tuple(given.shape)).encode())
        kind, shape, other = self._group.reduced(
            torch.tensor([kind, shape, -shape]), dist.ReduceOp.MAX
        ).tolist()
        if shape != -other:
            raise ClientError(
                "bad_configuration",
                f"sum() got a value of shape {tuple(given.shape)} here, and "
                "of another shape on another worker",
            )
        # Sums of bytes, or of numbers above 2**24, would lose digits.
        wide = torch.as_tensor(
            value, dtype=(torch.int64, torch.float64, torch.complex128)[kind]
        )
        tensor = self._group.reduced(wide, dist.ReduceOp.SUM)
        if not isinstance(value, torch.Tensor):
            return tensor.item()  # type: ignore[return-value]
        tensor = tensor.to(value.device)
        is_like = value.is_floating_point() and not tensor.is_complex()
        return tensor.to(value.dtype) if is_like else tensor

    def recover(self, error: WorkerLostError) -> None:
        """Goes on with the workers that are left, between two steps.

        Args:
            error: by which the loss was noticed, as in a collective
                operation of the loop's body.

        Raises:
            WorkerLostError: ``error``, without a rendezvous.
        """
        self._group.regroup(error)

    def balance(self) -> float:
        """Gives slow workers fewer nodes, from the next step on.

        By the median seconds of the last steps.  All workers call it between
        the same steps.  The model does not depend on it.

        Returns:
            Expected speed-up of the compute, at least 1; with less than
            :data:`MIN_GAIN` the nodes stay where they are.
        """
        if self._group.rank.world_size == 1 or not self._group.seconds:
            return 1.0
        counts = [len(nodes) for nodes in self._group.assignment]
        costs = [
            statistics.median(seconds) / count
            for seconds, count in zip(
                zip(*self._group.seconds, strict=True), counts, strict=True
            )
        ]
        best = balanced_counts(self.num_nodes, costs, MIN_GAIN)
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
        self._group.assign(divided(self.num_nodes, best))
        return gain

    def close(self) -> None:
        """Leaves the device queue, before the process ends."""
        self._turns.close()

    def state_dict(self) -> dict[str, Any]:
        """The step, and what the bits of the run depend on."""
        return {
            "version": VERSION,
            "step": self.step,
            "epoch": self._epoch,
            "segment_of": self._segments.table,
            **self._group.facts(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues a run, on any number of workers.

        Raises:
            ClientError: ``bad_state`` if it is no state, or
                ``bad_configuration`` naming what differs, such as threads.
        """
        if not isinstance(state, Mapping) or not (
            state.get("version") == VERSION
            and all(
                type(state.get(name)) is int and state[name] >= 0
                for name in ("step", "epoch")
            )
            and _is_table(state.get("segment_of", {}))
        ):
            raise ClientError(
                "bad_state",
                f"the state of virtual nodes is {state!s:.80}; give a "
                f"state_dict() of version {VERSION}",
            )
        facts = self._group.facts()
        # States of earlier versions have no segments.
        state = {"segments": 1, "warmup_steps": 0, "segment_of": {}, **state}
        for name in ("num_nodes", "seed", "segments", "warmup_steps"):
            check_equal(
                {name: facts[name]},
                state,
                "in the state",
                remedy="or leave these nodes out of the state",
            )
        check_equal(facts, state, "in the state", strict=self._strict)
        self._group.step = state["step"]
        self._segments.table = dict(state["segment_of"])
        self._epoch = state["epoch"]

    def _warn_of_single_samples(self, batch: NodeBatch) -> None:
        if any(node.size == 1 for node in batch.nodes) and any(
            isinstance(module, _BatchNorm) and module.training
            for module in self._module.modules()
        ):
            self._warn(
                "a virtual node has one sample of step %d, of which batch "
                "norm cannot compute a variance; leave out the short last "
                "batch (drop_last=True), or use other batches",
                self.step,
            )

    def _warn(self, message: str, *values: object) -> None:
        """Warns once."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)

    def _check_finished(self, step: Step) -> None:
        if not step.is_finished:
            raise ClientError(
                "bad_configuration",
                f"step {step.number} was left before its last virtual node; "
                "leave the loop over steps instead, and fetch no step ahead",
            )


def _is_table(table: Any) -> bool:
    return isinstance(table, Mapping) and all(
        isinstance(name, str) and type(number) is int and number >= 0
        for name, number in table.items()
    )


def _check_module(module: torch.nn.Module) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ClientError(
            "bad_configuration",
            f"module is a {type(module).__name__}; give a torch.nn.Module",
        )
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
