"""Content of a checkpoint: the state of one step, and what it belongs to."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path

from hapi_protocol.errors import ClientError
from hapi_training.checkpoint_file import (
    check_features_match,
    random_state,
    set_random_state,
)
from hapi_training.checkpoints import ranks
from hapi_training.checkpoints.folder import VERSION
from hapi_training.membership import WorkerLostError
from hapi_training.state_transfer import (
    load_values,
    loaded,
    values_of,
)
from hapi_training.virtual_nodes.virtual_nodes import VirtualNodes

_PARTS = (
    *("version", "run", "step", "calls"),
    *("state", "random", "features", "digests"),
)


class RunState:
    """The state of a run, and the number of its step.

    Args:
        values: objects with ``state_dict``, and values, by name.
        verify: write digests of all tensors.

    Attributes:
        run: text that belongs to the run alone.
        num_calls: calls of ``save`` so far, in all parts of the run.
        trained: addresses of the storages of the last content that steps of
            optimizers change, and nothing else; they are the run's own.
    """

    def __init__(
        self, values: MutableMapping[str, Any], run: str, *, verify: bool
    ) -> None:
        self._values = values
        self._verify = verify
        self.run = run
        self.num_calls = 0
        self.trained: set[int] = set()

    @property
    def step(self) -> int:
        """Number of the step, which names the checkpoint."""
        nodes = self._nodes
        return self.num_calls if nodes is None else nodes.step

    @property
    def _nodes(self) -> VirtualNodes | None:
        return next(
            (v for v in self._values.values() if isinstance(v, VirtualNodes)),
            None,
        )

    def recover(self, error: WorkerLostError) -> None:
        """Makes a group of the workers that are left.

        Raises:
            WorkerLostError: ``error``, if workers may not go.
        """
        if self._nodes is None:
            raise error
        self._nodes.recover(error)

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        for value in self._values.values():
            # Those of accelerate wrap another one.
            inner = getattr(value, "optimizer", value)
            if isinstance(inner, torch.optim.Optimizer):
                yield inner

    def content(self) -> dict[str, Any]:
        """Returns what a checkpoint of this step contains.

        Tensors of optimizers are those of the run; others are copies.

        Raises:
            ClientError: ``bad_configuration`` naming values that could not
                be loaded again.
        """
        values = values_of(self._values, "the state of the checkpoint")
        copied, self.trained = snapshot(values, self.optimizers())
        content = {
            "version": VERSION,
            "run": self.run,
            "step": self.step,
            "calls": self.num_calls,
            "state": copied,
            "random": [random_state(_device_of(values))],
            "features": self._features(),
        }
        return {**content, "digests": None}

    def add_digests(self, content: dict[str, Any]) -> None:
        """Adds digests of the tensors, if they are wanted."""
        if self._verify:
            content["digests"] = _digests(content["state"])

    def _has_weights(self, name: str) -> bool:
        kinds = torch.nn.Module, torch.optim.Optimizer
        return isinstance(self._values.get(name), kinds)

    def _features(self) -> dict[str, Any] | None:
        for value in self._values.values():
            if hasattr(value, "features_facts"):
                facts: dict[str, Any] = value.features_facts()
                return facts
        return None

    def load(self, content: dict[str, Any]) -> None:
        """Goes on with what :meth:`content` has returned.

        Raises:
            ClientError: ``bad_state`` naming what differs.
        """
        values = content["state"]
        features = self._features()
        if features is not None and content["features"] is not None:
            check_features_match(content["features"], features)
        # Positions first: they may refuse, before a weight has changed.
        order = sorted(values, key=self._has_weights)
        load_values(
            self._values,
            {name: values[name] for name in order},
            "the checkpoint",
        )
        states, rank = content["random"], ranks.rank()
        set_random_state(_device_of(values), states[rank % len(states)])
        if rank >= len(states) > 1:
            # One of more ranks than there were: not the numbers of another.
            torch.manual_seed(torch.initial_seed() + rank)
        self.run, self.num_calls = content["run"], content["calls"]


def snapshot(
    values: Any, optimizers: Iterable[torch.optim.Optimizer]
) -> tuple[Any, set[int]]:
    """Copies values, but for tensors that change in steps of optimizers.

    Returns:
        The copy, and the addresses of the storages that it shares.
    """
    trained = {
        tensor.untyped_storage()._cdata
        for optimizer in optimizers
        for tensor in _tensors_of(
            [
                [group["params"] for group in optimizer.param_groups],
                list(optimizer.state.values()),
            ]
        )
    }
    known: dict[int, torch.Tensor] = {}
    for tensor in _tensors_of(values):
        if tensor.untyped_storage()._cdata in trained:
            known[id(tensor)] = tensor
        elif tensor.grad_fn is not None:
            # A loss with its graph, for instance.
            known[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(values, known), trained


def _tensors_of(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]


def _device_of(values: Any) -> torch.device:
    """Returns the device whose random numbers belong to a state."""
    devices = {
        tensor.device.type: tensor.device for tensor in _tensors_of(values)
    }
    return devices.get("cuda", torch.device("cpu"))


def _digests(values: Any) -> dict[str, str]:
    """Returns digests of all tensors, by their paths."""
    return {
        keystr(path): hashlib.sha256(
            leaf.detach()
            .cpu()
            .contiguous()
            .flatten()
            .view(torch.uint8)
            .numpy()
            .data
        ).hexdigest()
        for path, leaf in tree_leaves_with_path(values)
        if torch.is_tensor(leaf)
    }


def checked(
    data: bytes, where: str, *, or_lightning: bool = False
) -> dict[str, Any]:
    """Returns the content of a file, if it is whole.

    Args:
        data: bytes of the file.
        where: the file, for the message.
        or_lightning: accept a checkpoint of Lightning, too.

    Raises:
        ClientError: ``bad_state`` naming what is wrong.
    """
    try:
        found: dict[str, Any] = loaded(data)
        if or_lightning and "pytorch-lightning_version" in found:
            return found
        # All of it is there, or it is no checkpoint.
        content = {name: found[name] for name in _PARTS}
        if content["version"] != VERSION:
            raise ValueError(f"its version is {content['version']!r}")
        if not (content["random"] and isinstance(content["state"], dict)):
            raise ValueError("it has no state, or no random numbers")
        digests = content["digests"]
        if digests is not None and digests != _digests(content["state"]):
            raise ValueError("its tensors are not those of their digests")
    except MemoryError:
        raise
    except Exception as error:  # the file may contain anything
        # torch's explanations are long, and advise to load anything.
        first = str(error).partition("\n")[0].partition(". ")[0]
        raise ClientError(
            "bad_state", f"{where}: {type(error).__name__}: {first}"
        ) from error
    return content
