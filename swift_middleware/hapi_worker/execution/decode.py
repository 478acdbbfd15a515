"""Decoders: from a sample's bytes to the model's input."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hapi_protocol.samples import Medium, Sample, SampleError
from hapi_protocol.transforms import Training
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_transform import ImageTransform

Decoder = Callable[[Sample], torch.Tensor]
"""Makes one input of the model.  Raises :class:`SampleError` for permanent
failures; its text has the sample's key and nothing that depends on the host or
the time."""


def image_decoder(
    transform: ImageTransform,
    decode: Callable[[bytes], torch.Tensor],
    training: Training | None = None,
) -> Decoder:
    """Makes a decoder of images to float32 ``[3, h, w]``.

    Args:
        transform: the transform of the model's package.
        decode: :func:`decode_image` with the operator's limits.
        training: seed and epoch of the augmentation; None for evaluation.
    """

    return _decoder(
        transform.medium,
        lambda data, key: transform.sample(decode(data), key, training),
    )


def array_decoder(
    transform: ArrayTransform, limits: torch.Tensor | None
) -> Decoder:
    """Makes a decoder of arrays of the transform's shape and dtype.

    Args:
        transform: the transform of the model's package.
        limits: the model's limits of ids, see :meth:`ArrayTransform.read`.
    """
    return _decoder(
        transform.medium, lambda data, _: transform.read(data, limits)
    )


def _decoder(
    medium: Medium, decode: Callable[[bytes, str], torch.Tensor]
) -> Decoder:
    def decoded(sample: Sample) -> torch.Tensor:
        try:
            data = sample.content(medium)
        except SampleError as error:
            raise SampleError(f"sample {sample.key!r} {error}") from error
        try:
            return decode(data, sample.key)
        except SampleError as error:
            raise SampleError(f"sample {sample.key!r}: {error}") from error

    return decoded
