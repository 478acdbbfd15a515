"""One step of training: a worker's virtual nodes, one after another."""

from __future__ import annotations

import math
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_map

from hapi_protocol.errors import ClientError
from hapi_training.membership import WorkerLostError
from hapi_training.partial_backward import Segments
from hapi_training.turns import NoQueue
from hapi_training.virtual_nodes.exchange import (
    Exchange,
    Numbers,
    Tensors,
    add_tensors,
)
from hapi_training.virtual_nodes.node_batches import NodeBatch, NodeSamples
from hapi_training.virtual_nodes.node_sums import NodeSums
from hapi_training.virtual_nodes.reduction_tree import PartialSums, total

_LOSS, _WEIGHT, _NODES, _SAMPLES, _ADDED, _FIRST_TENSOR = range(6)
"""Columns of a node's numbers: its loss times its weight, its weight, 1, its
samples, what was added; then its weight in each tensor, and in each segment
that partial backward passes divide the module into."""
Means: TypeAlias = tuple[Tensors, list[float], list[torch.Tensor] | None]


@dataclass(frozen=True)
class StepSettings:
    """Facts that a step depends on, besides module and samples.

    Attributes:
        number: number of the step in the run, from 0.
        num_nodes: number of virtual nodes of all workers.
        seed: seed of the run.
        device: device of the module.
        is_training: False without backward passes.
        is_elastic: True if workers may come and go.
        segments: which layers each node trains.
        turns: turns on the device.
        left_turns: turns that the run has left with this step; None if
            unknown.
        num_waiting: returns the number of workers that wait to join.
        take_again: called after the loss of another worker; returns batch
            and exchange with which to take the step again, or None if others
            have gone on, so that the sums count.
        finished: called when the module has the sums, with the exchange
            that it used and the seconds of each worker.
    """

    number: int
    num_nodes: int
    seed: int
    device: torch.device
    is_training: bool
    is_elastic: bool
    segments: Segments
    turns: NoQueue
    left_turns: int | None
    num_waiting: Callable[[], int]
    take_again: Callable[[WorkerLostError], tuple[NodeBatch, Exchange] | None]
    finished: Callable[[Exchange, list[float]], None]

    def node_seed(self, node: int) -> int:
        """Seed of the random numbers of a node in this step."""
        parts = np.random.SeedSequence([self.seed, self.number, node])
        # As many bits as torch takes without a sign.
        return int(parts.generate_state(1, np.uint64)[0] >> np.uint64(1))


class Step:
    """A step: iterating yields the samples of this worker's virtual nodes.

    ::

        for step in nodes.steps(data):
            for features, labels in step:
                step.backward(criterion(tail(features), labels))
            optimizer.step()
            optimizer.zero_grad()

    After the last node the parameters have the gradients of the whole batch,
    of all workers.  Nodes without samples are left out.

    Before each node torch's random numbers are seeded by seed, step and node;
    afterwards they are the caller's again.

    Args:
        module: the module that is trained.
        batch: samples of this worker's nodes.
        exchange: sums over all workers.
        settings: number of the step, and what is equal in all steps.

    Attributes:
        num_samples: samples of all workers, after the last node.
        added: sum of all that was added with :meth:`add`, then.
        time: the first worker's clock, in seconds, then.
        unreached: segments without a node that has samples, then.
        is_begun: internal, as those below.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        batch: NodeBatch,
        exchange: Exchange,
        settings: StepSettings,
    ) -> None:
        self._module = module
        self._settings = settings
        self._segments = settings.segments
        self._node: NodeSamples | None = None
        self._weight: float | None = None
        self._loss = math.nan
        self.num_samples = 0
        self.added = self.time = 0.0
        self.is_begun = self.is_finished = self.has_targets = False
        self._seconds: list[float] = []
        self.num_waiting = self.unreached = 0
        self._use(batch, exchange)

    @property
    def number(self) -> int:
        """Number of the step in the run, from 0."""
        return self._settings.number

    def _use(self, batch: NodeBatch, exchange: Exchange) -> None:
        self._batch, self._exchange = batch, exchange
        self._losses: dict[int, torch.Tensor] = {}
        self._added: dict[int, list[float | torch.Tensor]] = defaultdict(list)
        self._rows: dict[int, Numbers] = {}
        self._partial: PartialSums[Tensors] = PartialSums(
            self._mine, self._settings.num_nodes, add_tensors
        )

    @property
    def _mine(self) -> list[int]:
        return [node.node for node in self._batch.nodes]

    def __iter__(self) -> Iterator[Any]:
        if self.is_begun:
            raise self._misuse("was iterated over before")
        self.is_begun = True
        sums = NodeSums(self._module) if self._settings.is_training else None
        try:
            while not self.is_finished:
                started = time.monotonic()
                yield from self._run_all(sums)
                if sums is not None:
                    self.is_finished = self._exchanged(sums, started)
                else:
                    self.is_finished = True
        except BaseException:
            if sums is not None:
                sums.reset()
            raise
        finally:
            self._node = None

    def _run_all(self, sums: NodeSums | None) -> Iterator[Any]:
        """Yields the samples of all nodes."""
        device = self._settings.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for number, node in enumerate(self._batch.nodes):
                if node.size:
                    self._take_turn(number)
                yield from self._run(node, sums)

    def _take_turn(self, number: int) -> None:
        left = self._settings.left_turns
        self._settings.turns.take(
            left if left is None else max(1, left - number)
        )

    def _exchanged(self, sums: NodeSums, started: float) -> bool:
        """Gives the module the sums; False if the step is taken again."""
        means: Means | None = None
        is_alone = self._exchange.num_ranks == 1
        if not is_alone:
            self._settings.turns.give_back()
        try:
            means = self._means(sums, started)
            self._exchange.wait_for_all()
        except WorkerLostError as error:
            sums.reset()
            again = self._settings.take_again(error)
            if again is not None:
                self._use(*again)
                return False
            assert means is not None, "no other worker can have passed before"
        if not is_alone:
            # For the sums and the optimizer.
            self._take_turn(len(self._batch.nodes))
        sums.put(*means)
        self._segments.use_measured()
        self._settings.finished(self._exchange, self._seconds)
        return True

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor | None = None,
    ) -> None:
        """Back-propagates the loss of the node.

        The gradient of a step is that of the mean of all nodes' losses,
        weighted; so that losses with ignored or weighted targets are right
        as well.

        Args:
            loss: mean over the node's targets, ``[]``.
            weight: number of these targets, or the sum of their weights; 0
                if there is none, as when all are ignored.  None for the
                number of the node's samples.

        Raises:
            ClientError: ``bad_configuration`` naming the value.
        """
        node = self._node
        if node is None or not self._settings.is_training:
            raise self._misuse(
                "got backward() outside of its loop, or in an evaluation "
                "(shuffle=False, val_loader, torch.no_grad())"
            )
        if self._weight is not None:
            raise self._misuse(f"got backward() twice for node {node.node}")
        value = float(node.size if weight is None else weight)
        if not 0 <= value < math.inf:
            raise self._misuse(
                f"got weight={value!r}; give a finite number, at least 0"
            )
        if not isinstance(loss, torch.Tensor):
            raise self._misuse(f"got a loss {loss!r}; give a tensor")
        if loss.numel() != 1:
            raise self._misuse(
                f"got a loss of shape {tuple(loss.shape)}; give a mean, one "
                "number"
            )
        self._weight = value
        self._segments.end_forward()
        if value:
            self._losses[node.node] = loss.detach().reshape(())
            if not loss.requires_grad and self._segments.depth(
                self.number, node.node
            ):
                # It depends on layers only that this node does not train.
                return
            # A factor of 1 for each full node: sums of 16-bit numbers do not
            # overflow by weights.
            (loss * (value / self._batch.node_samples)).backward()  # type: ignore[no-untyped-call]

    def add(self, value: float | torch.Tensor) -> None:
        """Adds a number to :attr:`added`, such as that of right answers."""
        node = self._node
        if node is None:
            raise self._misuse("got add() outside of its loop")
        self._added[node.node].append(value)

    @property
    def loss(self) -> float:
        """Weighted mean of all nodes' losses, after the last node."""
        if not self.is_finished or not self._settings.is_training:
            raise self._misuse("has a loss only after its last backward()")
        return self._loss

    def _misuse(self, what: str) -> ClientError:
        return ClientError(
            "bad_configuration", f"step {self._settings.number} {what}"
        )

    def _run(self, node: NodeSamples, sums: NodeSums | None) -> Iterator[Any]:
        """Yields the samples of a node, and takes its gradients."""
        if node.size:
            if sums is not None:
                sums.start_node(self._partial.take_earlier(node.node))
            self._node, self._weight = node, None
            torch.manual_seed(self._settings.node_seed(node.node))
            device = self._settings.device
            samples = tree_map(lambda tensor: tensor.to(device), node.values)
            with (
                nullcontext()
                if sums is None
                else self._segments.node(self.number, node.node)
            ):
                yield samples
            self._node = None
        if sums is None:
            return
        values: Tensors = [None] * len(sums.like)
        first_segment = _FIRST_TENSOR + len(values)
        row = np.zeros(first_segment + self._segments.count)
        if node.size:
            if self._weight is None:
                raise self._misuse(
                    f"got no backward() for node {node.node}; call it once "
                    "for each, or evaluate under torch.no_grad()"
                )
            values = sums.end_node()
            row[_WEIGHT] = self._weight
            row[_NODES], row[_SAMPLES] = 1, node.size
            gradients = values[: sums.num_parameters]
            row[_FIRST_TENSOR : _FIRST_TENSOR + len(gradients)] = [
                0.0 if value is None else self._weight for value in gradients
            ]
            depth = self._segments.depth(self.number, node.node)
            row[first_segment + depth :] = self._weight
        self._rows[node.node] = row
        self._partial.put(node.node, values)

    def _means(self, sums: NodeSums, started: float) -> Means:
        """Returns the arguments of :meth:`NodeSums.put`, of all workers."""
        if self._losses:
            losses = torch.stack(list(self._losses.values())).cpu().double()
            for number, loss in zip(
                self._losses, losses.tolist(), strict=True
            ):
                row = self._rows[number]
                row[_LOSS] = loss * row[_WEIGHT]
        for number, values in self._added.items():
            self._rows[number][_ADDED] = sum(map(float, values))
        rows: PartialSums[Numbers] = PartialSums(
            self._mine, self._settings.num_nodes, operator.add
        )
        for number, row in self._rows.items():
            rows.put(number, row)
        first_buffer = _FIRST_TENSOR + sums.num_parameters
        first_segment = _FIRST_TENSOR + len(sums.like)
        partial = self._partial.sums
        for tree, changes in zip(
            partial, sums.has_change(list(partial.values())), strict=True
        ):
            rows.sums[tree][first_buffer:first_segment] = changes
        # The losses have arrived, so the device has computed everything.
        mine = time.monotonic() - started
        of_rank = np.array(
            [
                self._batch.digest,
                any(node.size for node in self._batch.nodes),
                sums.has_integers,
                mine,
                self._settings.num_waiting(),
                time.time(),
            ]
        )
        trees, ranks = self._exchange.gather(rows.sums, of_rank)
        columns = np.array(ranks).T
        digests, has_samples, has_integers, seconds, waiting, clocks = columns
        self._check_batches(digests.tolist())
        row = total(trees, operator.add, self._settings.num_nodes)
        summed = self._exchange.sum(
            partial,
            {
                tree: numbers[_FIRST_TENSOR:first_segment] > 0
                for tree, numbers in trees.items()
            },
            sums.like,
        )
        integers = None
        # Ranks have their nodes in the order of the tree.
        first = int(has_samples.argmax())
        if has_integers.any():
            integers = self._exchange.copy_from(first, sums.integers)
        if self._segments.is_unknown:
            measured = torch.tensor(self._segments.measured)
            (measured,) = self._exchange.copy_from(first, [measured])
            self._segments.measured = measured.tolist()
        of_segment = row[first_segment:]
        weights = of_segment[self._segments.of_parameters()]
        self.unreached = int((of_segment == 0).sum())
        self.num_samples, self.added = int(row[_SAMPLES]), row[_ADDED].item()
        self.has_targets = bool(row[_WEIGHT])
        if self.has_targets:
            self._loss = float(row[_LOSS] / row[_WEIGHT])
        self._seconds, self.time = seconds.tolist(), float(clocks[0])
        self.num_waiting = int(waiting.max())
        divisors = [
            *(w / self._batch.node_samples or 1.0 for w in weights.tolist()),
            *[row[_NODES] or 1.0] * (first_segment - first_buffer),
        ]
        return summed, divisors, integers

    def _check_batches(self, digests: list[float]) -> None:
        """Refuses other samples on some workers.

        Of those that come and go the first one, the oldest, is right.
        """
        if len(set(digests)) == 1:
            return
        mine = float(self._batch.digest)
        if self._settings.is_elastic and mine == digests[0]:
            raise WorkerLostError(
                "worker_lost", "a worker with other samples has joined"
            )
        raise self._misuse(
            f"has other samples on some of the {len(digests)} workers; "
            "give all of them the same data, batch size and seeds (of a "
            "DataLoader: generator=), not a part for each rank"
        )
