"""Part of the frozen region that runs on the client, in any process."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Self

from hapi_protocol.transforms import Training
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_header import DEFAULT_MAX_PIXELS
from hapi_splitter.inputs.sample_format import InputTransform, SampleForm
from hapi_splitter.numerics import exact_numerics
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import package_bytes
from hapi_splitter.profiling.memory_model import largest_sample_bytes
from hapi_splitter.profiling.profiler import LARGEST_BATCH

SMALL_BATCH_CPU = 8
"""Samples of a forward pass on the CPU if a larger batch would have tensors
above ``MMAP_THRESHOLD_BYTES``."""
MMAP_THRESHOLD_BYTES = 32 << 20
"""Size above which the C library maps each block by itself: page faults then
cost more than larger batches save.  Measured on one core for batches of 16
instead of 8: mobilenet_v3_small takes 20 % less per sample and shufflenet_v2
31 % less, but resnet18 6 % and convnext_tiny 12 % more (EPYC, family 26)."""


class ClientRegion:
    """The input transform, and the frozen layers after each cut.

    It is pickled as the package of its graph and unpickled on the CPU, for
    loader workers.

    Args:
        graph: graph of the region on the CPU, with its input transform.
        device: device of the client's layers.
        forward_samples: samples of one forward pass on the client; None for
            a default that suits the device.

    Attributes:
        device_graph: the region optimised for the device, with its own copy
            of the weights there.
        device: device of the client's layers.
        forward_samples: samples of one forward pass on the client.
        max_pixels: largest image that the client decodes.
    """

    def __init__(
        self,
        graph: FrozenGraph,
        device: torch.device,
        forward_samples: int | None = None,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        self._graph = graph
        self.device_graph = graph.to(device, fast=True)
        self.device = device
        self.max_pixels = max_pixels
        self._given_samples = forward_samples
        self.forward_samples = forward_samples or default_forward_samples(
            graph, device
        )
        self._suffixes: dict[int, torch.nn.Module] = {}

    def with_limits(
        self, max_pixels: int, forward_samples: int | None
    ) -> Self:
        """Returns the same region, of the same memory, with other limits.

        They hold in loader workers, too.

        Args:
            max_pixels: largest image that is decoded.
            forward_samples: samples of one forward pass; None for the
                present number.
        """
        region = object.__new__(type(self))
        region.__dict__.update(self.__dict__, max_pixels=max_pixels)
        if forward_samples is not None:
            region._given_samples = region.forward_samples = forward_samples
        return region

    def on_cpu(self) -> ClientRegion:
        """Returns the same region on the CPU, without the tail."""
        return ClientRegion(
            self._graph,
            torch.device("cpu"),
            self._given_samples,
            self.max_pixels,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        options = self._given_samples, self.max_pixels
        return _unpickled, (package_bytes(self._graph), *options)

    @property
    def num_cuts(self) -> int:
        return self._graph.num_cuts

    @property
    def digest(self) -> str:
        """sha256 of the package, hexadecimal."""
        return self._graph.digest

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one transformed image or array."""
        return tuple(self._graph.input_shape)

    @property
    def transform(self) -> InputTransform:
        """Transform from a stored file to a sample."""
        assert self._graph.transform is not None, "jobs always give one"
        return self._graph.transform

    @property
    def form(self) -> SampleForm:
        """Format of one sample."""
        return self._graph.form

    def decode(
        self, data: bytes, key: str = "", training: Training | None = None
    ) -> torch.Tensor:
        """Decodes and transforms a sample on the CPU.

        Args:
            data: bytes of the image or array file.
            key: key of the sample.
            training: seed and epoch of the augmentation; None for
                evaluation.

        Returns:
            An image ``[C, H, W]`` float32, or an array.

        Raises:
            SampleError: if it cannot be decoded, with the same message on
                client and storage.
        """
        transform = self.transform
        if isinstance(transform, ArrayTransform):
            return transform.read(data, self._graph.id_limits)
        image = decode_image(
            data, max_pixels=self.max_pixels, turns=transform.turns
        )
        return transform.sample(image, key, training)

    def batch_samples(self, span_samples: int) -> int:
        """Returns the size of the batches of a span's samples.

        The whole span makes equal batches: a span of 40 samples three of 14,
        as two of 16 and one of 8 would have to be filled up more.
        """
        num_passes = -(-span_samples // self.forward_samples)
        return -(-span_samples // num_passes)

    def run_suffix(
        self, cut: int, features: torch.Tensor, batch_samples: int
    ) -> torch.Tensor:
        """Computes features at the freeze point from features at ``cut``.

        Args:
            cut: cut of the features; 0 for transformed samples.
            features: ``[n, *shape at cut]`` on the CPU; decoded features are
                float32, whatever the cut's dtype.
            batch_samples: samples of one forward pass, of
                :meth:`batch_samples`; a last batch with fewer is filled with
                zeros, so that a sample's features have the same bits in
                whichever slice of its span.

        Returns:
            ``[n, *shape at the freeze point]`` on the device, in the dtype
            of the freeze point, contiguous, because a tail may view them in
            another shape.
        """
        if cut not in self._suffixes:
            self._suffixes[cut] = self.device_graph.suffix(cut)
        suffix, dtype = self._suffixes[cut], self.cut_dtype(cut)
        num_missing = -len(features) % batch_samples
        if cut < self.num_cuts and num_missing:
            zeros = features.new_zeros((num_missing, *features.shape[1:]))
            padded = torch.cat([features, zeros])
        else:
            padded = features
        with exact_numerics(self.device):
            outputs = [
                suffix(batch.to(self.device, dtype))
                for batch in torch.split(padded, batch_samples)
            ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        joined = joined[: len(features)].contiguous()
        # [n, 768, 1, 1] is contiguous with any strides of the last two.
        return joined.flatten().view(joined.shape)

    def cut_shape(self, cut: int) -> tuple[int, ...]:
        """Returns the shape of one sample's features at a cut, from 1."""
        return tuple(self._graph.cuts[cut - 1].shape)

    def cut_dtype(self, cut: int) -> torch.dtype:
        """Returns the dtype of features at a cut; 0 is the input."""
        return self._graph.values[self._graph.node_at(cut)].dtype


def default_forward_samples(graph: FrozenGraph, device: torch.device) -> int:
    """Returns the samples of one forward pass of the region or a part of it.

    Args:
        graph: graph of the region.
        device: device of the pass.
    """
    if device.type != "cpu":
        return LARGEST_BATCH["cuda"]
    batch = LARGEST_BATCH["cpu"]
    is_mapped = batch * largest_sample_bytes(graph) > MMAP_THRESHOLD_BYTES
    return SMALL_BATCH_CPU if is_mapped else batch


def _unpickled(
    package: bytes, forward_samples: int | None, max_pixels: int
) -> ClientRegion:
    return ClientRegion(
        load_package(package), torch.device("cpu"), forward_samples, max_pixels
    )
