"""From a sample's bytes to the model's input."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hapi_protocol.shards import Medium, Sample
from hapi_protocol.transforms import Training
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_decode import SampleError, decode_image
from hapi_splitter.inputs.image_transform import ImageTransform

Decoder = Callable[[Sample], torch.Tensor]
"""It raises :class:`SampleError` for what fails each time; the text names the
sample's key and nothing that depends on host or time."""


def image_decoder(
    transform: ImageTransform,
    max_pixels: int,
    training: Training | None = None,
) -> Decoder:
    """A function from sample to float32 ``[3, h, w]``.

    Args:
        transform: of the model's package.
        max_pixels: checked before an image is decoded.
        training: seed and epoch of what the transform draws at random; None
            for evaluation.
    """

    def decode(data: bytes, key: str) -> torch.Tensor:
        pixels = decode_image(data, max_pixels=max_pixels)
        return transform.sample(pixels, key, training)

    return _decoder(transform.medium, decode)


def array_decoder(
    transform: ArrayTransform, limits: torch.Tensor | None
) -> Decoder:
    """A function from sample to an array of the transform's shape and dtype.

    Args:
        transform: of the model's package.
        limits: of the model, see :meth:`ArrayTransform.read`.
    """
    return _decoder(
        transform.medium, lambda data, _: transform.read(data, limits)
    )


def _decoder(
    medium: Medium, decode: Callable[[bytes, str], torch.Tensor]
) -> Decoder:
    def decoded(sample: Sample) -> torch.Tensor:
        data = sample.member(medium)
        if data is None:
            message = sample.missing_message(medium)
            raise SampleError(f"sample {sample.key!r} {message}")
        try:
            return decode(data, sample.key)
        except SampleError as error:
            raise SampleError(f"sample {sample.key!r}: {error}") from error

    return decoded
