"""Runs a region node by node, to time nodes or to copy tensors.

The region is not changed: a walk reads weights and input, and writes to
buffers that it has allocated, as the module itself does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.graph.lowering import META_CALL
from hapi_splitter.graph.program import INPUT
from hapi_splitter.numerics import exact_numerics

Clock = Callable[[], float]


def prefix_outputs(
    frozen: FrozenGraph, inputs: torch.Tensor, cuts: Iterable[int]
) -> dict[int, torch.Tensor]:
    """Returns results of ``frozen.prefix(cut)`` for several cuts in one pass.

    Args:
        frozen: the region.
        inputs: ``[B, *input_shape]``, on the region's device.
        cuts: cuts from 0 to ``num_cuts``.

    Returns:
        ``[B, *cut.shape]`` by cut: copies, except that cut 0 is
        ``inputs`` itself.  In a fast region, batch norms after these cuts are
        not folded, which changes the last bits.

    Raises:
        UnsupportedError: ``cut_out_of_range``.
    """
    nodes = {cut: frozen.node_at(cut) for cut in cuts}
    outputs: dict[int, torch.Tensor] = {INPUT: inputs}
    wanted = set(nodes.values()) - {INPUT}
    if wanted:
        walk = _CopyingWalk(frozen.prefix(max(nodes), wanted), wanted, outputs)
        with ready_to_run(inputs.device):
            walk.run(inputs)
    return {cut: outputs[node] for cut, node in nodes.items()}


class _CopyingWalk(fx.Interpreter):
    """Runs a module and copies the results of some calls at once.

    Later calls may overwrite the originals.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        wanted: set[int],
        outputs: dict[int, torch.Tensor],
    ) -> None:
        super().__init__(module)
        self._wanted = wanted
        self._outputs = outputs

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        call = n.meta.get(META_CALL)
        if call in self._wanted:
            self._outputs[call] = result.clone()
        return result


class TimedWalk(fx.Interpreter):
    """Runs a module node by node and takes the time of each call.

    Attributes:
        positions: by id of a program's tensor, the number of the call that
            yields it.
    """

    def __init__(self, module: fx.GraphModule, timer: Timer) -> None:
        super().__init__(module)
        calls = [n for n in module.graph.nodes if n.op == "call_function"]
        self.positions: dict[int | None, int] = {
            node.meta.get(META_CALL): number
            for number, node in enumerate(calls)
        }
        self._timer = timer
        self._spans: list[tuple[Any, Any]] = []

    def seconds(self, samples: torch.Tensor) -> list[float]:
        """Seconds of each call, in order."""
        self._spans.clear()
        self.run(samples)
        self._timer.settle()
        return [self._timer.seconds(*span) for span in self._spans]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Here and not around the node: finding the arguments is not its work.
        start = self._timer.mark()
        result = target(*args, **kwargs)
        self._spans.append((start, self._timer.mark()))
        return result


class Timer:
    """Marks moments of a CPU's work, by a clock in seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def mark(self) -> Any:
        """Now, as the device's work has it."""
        return self._clock()

    def settle(self) -> None:
        """Returns when the device has done all; a CPU has by then."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks, after :meth:`settle`."""
        return max(float(end - start), 0.0)


class _CudaTimer(Timer):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        make_event: Any = torch.cuda.Event  # torch does not annotate it
        event = make_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, end: Any) -> float:
        return max(float(start.elapsed_time(end)) / 1000, 0.0)


def timer_for(device: torch.device, clock: Clock) -> Timer:
    """CUDA events on a GPU, ``clock`` (in seconds) on a CPU."""
    return _CudaTimer(device) if device.type == "cuda" else Timer(clock)


@contextlib.contextmanager
def ready_to_run(device: torch.device) -> Iterator[None]:
    """A block of class ``exact`` on the device, without gradients."""
    with contextlib.ExitStack() as entered:
        if device.type == "cuda":
            entered.enter_context(torch.cuda.device(device))
        entered.enter_context(exact_numerics(device))
        entered.enter_context(torch.inference_mode())
        yield
