"""Batches of a data set, divided among virtual nodes."""

from __future__ import annotations

import json
import logging
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DistributedSampler

from hapi_client.job.feature_dataset import FeatureDataset
from hapi_client.job.transfer_job import EpochLoader, TransferJob
from hapi_client.loading.feature_loader import FeatureLoader
from hapi_client.sampling.partition import Reader
from hapi_protocol.errors import ClientError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeSamples:
    """Samples of a virtual node in a step.

    Attributes:
        node: number of the node.
        size: number of its samples.
        values: features and labels, or whatever a batch has.
    """

    node: int
    size: int
    values: Any


@dataclass(frozen=True)
class NodeBatch:
    """A step's samples of some virtual nodes.

    Attributes:
        nodes: samples of each node.
        node_samples: samples of a node in a step that is not short.
        digest: number of the batch, equal on all workers.
    """

    nodes: Sequence[NodeSamples]
    node_samples: float
    digest: int


class NodeBatches(Protocol):
    """A data set's batches, divided among virtual nodes.

    Attributes:
        is_training: False for data that nothing is trained on.
        epoch: number of the epoch, or of the pass over the data.
    """

    is_training: bool
    epoch: int

    def batches(self, nodes: Sequence[int]) -> Iterator[NodeBatch]:
        """Returns the next steps of the epoch, with the samples of nodes."""
        ...

    def position(self) -> Any:
        """Returns the position before the next step, fit for JSON."""
        ...

    def move_to(self, position: Any) -> bool:
        """Goes to a position; False if that is in another epoch."""
        ...

    def skip(self) -> None:
        """Passes over an epoch that others have trained."""
        ...


class FeatureBatches:
    """Features of a data set in Swift: a node is a batch partition.

    Args:
        data: the data set, or the loader of a job.
        num_nodes: number of nodes.
    """

    def __init__(
        self, data: FeatureDataset | EpochLoader, num_nodes: int
    ) -> None:
        self._data = data
        self._num_nodes = num_nodes
        self._owner: FeatureDataset | TransferJob = (
            data if isinstance(data, FeatureDataset) else data.job
        )
        self.epoch = data.epoch
        self.is_training = data.is_training
        self._has_begun = False

    def batches(self, nodes: Sequence[int]) -> Iterator[NodeBatch]:
        reader = Reader(tuple(nodes), self._num_nodes, unit="virtual nodes")
        pipeline = self._owner.pipeline
        batch_size = pipeline.data.options.batch_size
        before = pipeline.stats.fallbacks
        with closing(self._data.node_loader(reader)) as loader:
            for features, labels in loader:
                self._has_begun = True
                state = self.position() if self.is_training else {}
                yield NodeBatch(
                    _divided(nodes, loader, features, labels),
                    batch_size / self._num_nodes,
                    zlib.crc32(json.dumps(state, sort_keys=True).encode()),
                )
        count = pipeline.stats.fallbacks - before
        if self.is_training and self._num_nodes > 1 and count:
            logger.warning(
                "%d spans of epoch %d were read raw, as the storage side did "
                "not compute them; their features, and the trained model, may "
                "differ in their last bits from those of another run",
                count,
                self.epoch,
            )

    def position(self) -> Any:
        state = self._owner.state_dict()
        if not self._has_begun and state["epoch"] != self.epoch:
            # set_epoch() has chosen another one than the next.
            return {**state, "epoch": self.epoch, "step": 0}
        return state

    def move_to(self, position: Any) -> bool:
        self._owner.load_state_dict(position)
        return bool(position["epoch"] == self.epoch)

    def skip(self) -> None:
        # The order of an epoch follows from its number.
        pass


def _divided(
    nodes: Sequence[int],
    loader: FeatureLoader,
    features: torch.Tensor,
    labels: torch.Tensor,
) -> list[NodeSamples]:
    sizes = list(loader.sizes)
    return [
        NodeSamples(node, size, values)
        for node, size, values in zip(
            nodes,
            sizes,
            zip(
                torch.split(features, sizes),
                torch.split(labels, sizes),
                strict=True,
            ),
            strict=True,
        )
    ]


class GlobalBatches:
    """Batches that each worker has as a whole: node ``v`` gets rows ``v::V``.

    Args:
        data: yields tensors ``[n, …]``, or tuples, lists or mappings of them.
        num_nodes: number of nodes, V.
        epoch: number of the pass over the data.
    """

    is_training = True

    def __init__(
        self, data: Iterable[Any], num_nodes: int, epoch: int
    ) -> None:
        self.epoch = epoch
        self._iterator = iter(data)
        self._num_nodes = num_nodes
        self._taken = 0
        self._again: Any = None

    def batches(self, nodes: Sequence[int]) -> Iterator[NodeBatch]:
        while True:
            batch = self._next()
            if batch is None:
                return
            leaves, structure = tree_flatten(batch)
            length = _length_of(leaves)
            yield NodeBatch(
                [
                    NodeSamples(
                        node,
                        len(range(node, length, self._num_nodes)),
                        tree_unflatten(
                            [
                                leaf[node :: self._num_nodes].contiguous()
                                for leaf in leaves
                            ],
                            structure,
                        ),
                    )
                    for node in nodes
                ],
                length / self._num_nodes,
                _digest(leaves),
            )

    def _next(self) -> Any:
        batch, self._again = self._again, None
        if batch is None:
            batch = next(self._iterator, None)
        self._taken += 1
        self._last = batch
        return batch

    def position(self) -> Any:
        return {"epoch": self.epoch, "step": self._taken}

    def move_to(self, position: Any) -> bool:
        if position["epoch"] != self.epoch:
            return False
        if position["step"] == self._taken - 1:
            self._again = self._last
        for _ in range(position["step"] - self._taken):
            next(self._iterator, None)
        self._taken = position["step"]
        return True

    def skip(self) -> None:
        # The order of the next pass may depend on this one's.
        deque(self._iterator, maxlen=0)


def _length_of(leaves: Sequence[Any]) -> int:
    lengths = {
        len(leaf) if isinstance(leaf, torch.Tensor) and leaf.dim() else None
        for leaf in leaves
    }
    (length, *others) = lengths or {None}
    if not length or others:
        raise ClientError(
            "bad_configuration",
            "a batch of the data has "
            f"{[_description(leaf) for leaf in leaves]}; virtual nodes divide "
            "batches of tensors whose first dimensions are equal, and not 0",
        )
    return length


def _description(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    return type(leaf).__name__ + ("" if shape is None else str(tuple(shape)))


def _digest(leaves: Sequence[torch.Tensor]) -> int:
    """Digest of a batch's shapes and of some of its values."""
    digest = 0
    for leaf in leaves:
        # All labels, and something of each image: enough to notice workers
        # that have different samples.
        some = leaf.reshape(len(leaf), -1)[:, :4].contiguous().cpu()
        text = f"{tuple(leaf.shape)} {some.tolist()}"
        digest = zlib.crc32(text.encode(), digest)
    return digest


def node_batches(data: Any, num_nodes: int, epoch: int) -> NodeBatches:
    """Returns the batches of a user's data.

    Args:
        data: the data.
        num_nodes: number of nodes.
        epoch: number of the pass, if the data has no epochs.

    Raises:
        ClientError: ``bad_configuration`` for data that is already divided
            among ranks, with a remedy.
    """
    if isinstance(data, FeatureDataset | EpochLoader):
        return FeatureBatches(data, num_nodes)
    sampler = getattr(data, "sampler", None)
    dataset = getattr(data, "dataset", None)
    if isinstance(data, FeatureLoader):
        what = "a loader of one rank's share; give job.train_loader"
    elif isinstance(dataset, FeatureDataset):
        what = "a DataLoader over a FeatureDataset; give the FeatureDataset"
    elif isinstance(sampler, DistributedSampler):
        what = (
            "a DataLoader with a DistributedSampler; give it a sampler with "
            "the same seed on all ranks, as virtual nodes divide the batches"
        )
    elif not isinstance(data, Iterable):
        what = (
            f"a {type(data).__name__}; give a FeatureDataset, "
            "job.train_loader, job.val_loader or an iterable of batches"
        )
    else:
        return GlobalBatches(data, num_nodes, epoch)
    raise ClientError("bad_configuration", f"the data of steps() is {what}")
