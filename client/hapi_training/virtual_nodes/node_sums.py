"""Gradients and buffers of a module, by virtual node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hapi_protocol.errors import ClientError
from hapi_training.virtual_nodes.exchange import Tensors, add_tensors


@dataclass(eq=False)
class _Buffer:
    """A buffer of a module.

    Attributes:
        owner: module that has it.
        name: its name there.
        tensor: the buffer.
        start: its value before the step.
        version: counter of its changes in place, when a node began.
    """

    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor
    start: torch.Tensor
    version: int = 0

    def restore(self) -> None:
        self.tensor.copy_(self.start)
        setattr(self.owner, self.name, self.tensor)
        self.version = self.tensor._version

    def value(self) -> torch.Tensor:
        """Returns the value after a node."""
        now: torch.Tensor = getattr(self.owner, self.name)
        return now.detach()

    def change(self) -> torch.Tensor:
        """Returns the difference that a node has made.

        Batch norm changes its statistics without raising their version.
        """
        now = self.value()
        # Constants may be infinite, as those of masks; and observers of
        # quantisation begin with an infinite range.
        change = torch.where(self.start.isfinite(), now - self.start, now)
        return torch.where(now == self.start, 0, change)

    def add(self, change: torch.Tensor) -> None:
        """Adds a mean of differences; 0 keeps all bits."""
        is_finite = self.start.isfinite()
        value = torch.where(is_finite, self.start + change, change)
        self.tensor.copy_(torch.where(change == 0, self.start, value))


def _buffers_of(module: torch.nn.Module) -> list[_Buffer]:
    seen: set[int] = set()
    buffers = []
    for owner in module.modules():
        for name, tensor in owner.named_buffers(recurse=False):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                start = tensor.detach().clone()
                buffers.append(_Buffer(owner, name, tensor, start))
    return buffers


class NodeSums:
    """Takes a node's gradients and buffers off a module, and puts sums there.

    Every node starts from the buffers that the module had before the step.
    Afterwards buffers of floating-point numbers have the mean of the nodes'
    changes, and others are those of the first node: running statistics of
    batch normalisation, being linear in a batch's, become those of the mean
    of the nodes' statistics.

    Args:
        module: the module.

    Attributes:
        integers: the other buffers after the first node.
        has_integers: True if it changed them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before: Tensors | None = None
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self._earlier = [p.grad for p in self.parameters]
        buffers = _buffers_of(module)
        self._averaged = [b for b in buffers if _is_averaged(b.tensor)]
        self._copied = [b for b in buffers if not _is_averaged(b.tensor)]
        self._has_ended = self.has_integers = False
        self.integers = [buffer.start for buffer in self._copied]

    @property
    def like(self) -> list[torch.Tensor]:
        """Tensors with the shapes of a node's values."""
        return [*self.parameters, *(b.tensor for b in self._averaged)]

    @property
    def num_parameters(self) -> int:
        return len(self.parameters)

    def has_change(self, sums: Sequence[Tensors]) -> list[list[bool]]:
        """Returns which buffers have changed, for sums of some nodes.

        Constants need no exchange.
        """
        counts = [
            buffer.tensor.new_zeros(())
            if value is None
            else value.count_nonzero().to(buffer.tensor)
            for values in sums
            for buffer, value in zip(
                self._averaged, values[self.num_parameters :], strict=True
            )
        ]
        if not counts:
            return [[] for _ in sums]
        # One transfer from the device.
        flags = torch.stack([c.to(torch.float32) for c in counts]) != 0
        table: list[list[bool]] = flags.view(len(sums), -1).tolist()
        return table

    def start_node(self, earlier: Tensors | None) -> None:
        """Prepares the module for a node.

        Args:
            earlier: values to which the node's are added; None for none.
                autograd adds gradients to what is there, which takes less
                memory and time than a sum of two of them.
        """
        self._before = earlier
        with torch.no_grad():
            for buffer in (*self._averaged, *self._copied):
                buffer.restore()
        for number, parameter in enumerate(self.parameters):
            parameter.grad = earlier[number] if earlier else None

    def end_node(self) -> Tensors:
        """Takes the values of a node: gradients, then buffers.

        With the earlier ones of :meth:`start_node`.

        Raises:
            ClientError: ``bad_configuration`` for a sparse gradient or a new
                buffer.
        """
        gradients: Tensors = []
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ClientError(
                    "bad_configuration",
                    f"a parameter of shape {tuple(parameter.shape)} has a "
                    "sparse gradient, which virtual nodes do not sum; use "
                    "Embedding(…, sparse=False)",
                )
            gradients.append(parameter.grad)
            parameter.grad = None
        if not self._has_ended:
            self._check_buffers()
            self.integers = [b.value().clone() for b in self._copied]
            self.has_integers = any(
                b.value() is not b.tensor or b.value()._version != b.version
                for b in self._copied
            )
        self._has_ended = True
        with torch.no_grad():
            changes: Tensors = [buffer.change() for buffer in self._averaged]
            if self._before:
                earlier = self._before[self.num_parameters :]
                changes = add_tensors(earlier, changes)
        return [*gradients, *changes]

    def _check_buffers(self) -> None:
        num_buffers = len(self._averaged) + len(self._copied)
        if len({id(b) for b in self._module.buffers()}) != num_buffers:
            raise ClientError(
                "bad_configuration",
                "the module has got another buffer while it ran, which "
                "virtual nodes do not share; run it once on a batch before "
                "the first step",
            )

    def put(
        self,
        sums: Sequence[torch.Tensor | None],
        divisors: Sequence[float],
        integers: Sequence[torch.Tensor] | None,
    ) -> None:
        """Gives the module the means of all nodes.

        Args:
            sums: sums of the nodes' values.
            divisors: what each is divided by.
            integers: the other buffers; None if unchanged.
        """
        count = len(self.parameters)
        with torch.no_grad():
            means = [
                value if value is None else value.div_(divisor)
                for value, divisor in zip(sums, divisors, strict=True)
            ]
            for parameter, mean, earlier in zip(
                self.parameters, means[:count], self._earlier, strict=True
            ):
                if earlier is not None and mean is not None:
                    # As backward does, if there was no zero_grad before.
                    mean = earlier.add_(mean)
                parameter.grad = earlier if mean is None else mean
            for buffer, mean in zip(
                self._averaged, means[count:], strict=True
            ):
                buffer.restore()
                if mean is not None:
                    buffer.add(mean)
            for number, buffer in enumerate(self._copied):
                buffer.restore()
                if integers is not None:
                    buffer.tensor.copy_(integers[number])

    def reset(self) -> None:
        """Gives the module what it had before the step."""
        self._has_ended = self.has_integers = False
        self.put([None] * len(self.like), [1.0] * len(self.like), None)


def _is_averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
