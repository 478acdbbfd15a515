"""What of the frozen region runs on this side, in any process."""

from __future__ import annotations

from typing import Any

import torch

from hapi_protocol.transforms import Training
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.sample_format import InputTransform, SampleForm
from hapi_splitter.numerics import exact_numerics
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import package_bytes
from hapi_splitter.profiling.memory_model import largest_sample_bytes
from hapi_splitter.profiling.profiler import LARGEST_BATCH

SMALL_BATCH_CPU = 8
"""Samples of one forward on the CPU where more would have tensors above
``MMAP_THRESHOLD_BYTES``."""
MMAP_THRESHOLD_BYTES = 32 << 20
"""Blocks above that are mapped anew each time by the C library, and their
page faults cost more than larger batches save: on one core a sample of
mobilenet_v3_small takes 20 % less in batches of 16 than of 8 and one of
shufflenet_v2 31 %, but one of resnet18 6 % and one of convnext_tiny 12 % more
(EPYC, family 26)."""


class ClientRegion:
    """The input transform, and what is computed here behind each cut.

    Pickled as the package of its graph; whoever unpickles it has it on the
    CPU, as loader workers want it.

    Args:
        graph: of the region, on the CPU, with its input transform.
        device: of what runs here.
        forward_samples: of one forward here; None for what suits the
            device.

    Attributes:
        local: the region as it runs fastest on the device, with weights
            of its own there.
        device: of what runs here.
        forward_samples: of one forward here.
    """

    def __init__(
        self,
        graph: FrozenGraph,
        device: torch.device,
        forward_samples: int | None = None,
    ) -> None:
        self._graph = graph
        self.device_graph = graph.to(device, fast=True)
        self.device = device
        self._asked_samples = forward_samples
        self.forward_samples = forward_samples or default_forward_samples(
            graph, device
        )
        self._suffixes: dict[int, torch.nn.Module] = {}

    def set_forward_samples(self, forward_samples: int) -> None:
        """Fixes the samples of one forward pass on the client."""
        self._asked_samples = self.forward_samples = forward_samples

    def on_cpu(self) -> ClientRegion:
        """The same without anything else, on the CPU."""
        return ClientRegion(
            self._graph, torch.device("cpu"), self._asked_samples
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (package_bytes(self._graph), self._asked_samples)

    @property
    def num_cuts(self) -> int:
        return self._graph.num_cuts

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one transformed image or array."""
        return tuple(self._graph.input_shape)

    @property
    def transform(self) -> InputTransform:
        """From what is stored to a sample."""
        assert self._graph.transform is not None, "jobs give one"
        return self._graph.transform

    @property
    def form(self) -> SampleForm:
        """Of one sample."""
        return self._graph.form

    def decode(
        self, data: bytes, key: str = "", training: Training | None = None
    ) -> torch.Tensor:
        """A transformed image ``[C, H, W]`` float32, or an array; on the CPU.

        Args:
            data: the bytes of its file.
            key: of its sample.
            training: seed and epoch of random changes; None for evaluation.

        Raises:
            SampleError: when it cannot be decoded, the same text on
                every tier.
        """
        transform = self.transform
        if isinstance(transform, ArrayTransform):
            return transform.read(data, self._graph.id_limits)
        return transform.sample(decode_image(data), key, training)

    def run_suffix(self, cut: int, features: torch.Tensor) -> torch.Tensor:
        """From features at ``cut`` to features at the freeze point.

        Args:
            cut: 0 for samples as the model takes them.
            features: ``[n, *shape at cut]`` on the CPU.

        Returns:
            ``[n, *shape at the freeze point]`` float32 on the device, in
            one piece: a tail may view them in another shape.
        """
        if cut not in self._suffixes:
            self._suffixes[cut] = self.device_graph.suffix(cut)
        suffix = self._suffixes[cut]
        with exact_numerics(self.device):
            pieces = [
                suffix(piece.to(self.device))
                for piece in torch.split(features, self.forward_samples)
            ]
        found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return found.contiguous()

    def cut_shape(self, cut: int) -> tuple[int, ...]:
        """Of one sample's features at a cut, from 1 on."""
        return tuple(self._graph.cuts[cut - 1].shape)


def default_forward_samples(graph: FrozenGraph, device: torch.device) -> int:
    """Of one forward of the region, or of a part of it.

    Args:
        graph: of the region.
        device: that computes.
    """
    if device.type != "cpu":
        return LARGEST_BATCH["cuda"]
    many = LARGEST_BATCH["cpu"]
    is_mapped = many * largest_sample_bytes(graph) > MMAP_THRESHOLD_BYTES
    return SMALL_BATCH_CPU if is_mapped else many


def _unpickled(package: bytes, forward_samples: int | None) -> ClientRegion:
    return ClientRegion(
        load_package(package), torch.device("cpu"), forward_samples
    )
