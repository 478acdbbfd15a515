"""From a sample's bytes to the model's input."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hapi_protocol.shards import IMAGE_EXTENSIONS, Sample
from hapi_protocol.transforms import Training
from hapi_splitter.transforms import ImageTransform, SampleError, decode_image

Decoder = Callable[[Sample], torch.Tensor]


def image_decoder(
    transform: ImageTransform,
    max_pixels: int,
    training: Training | None = None,
) -> Decoder:
    """A function from sample to float32 ``[3, h, w]``.

    It raises :class:`SampleError` for what fails each time; the text names
    the sample's key and nothing that depends on host or time.

    Args:
        transform: of the model's package.
        max_pixels: checked before an image is decoded.
        training: seed and epoch of what the transform draws at random; None
            for evaluation.
    """

    def decode(sample: Sample) -> torch.Tensor:
        image = sample.image()
        if image is None:
            raise SampleError(
                f"sample {sample.key!r} has no image member "
                f"({', '.join(IMAGE_EXTENSIONS)}) but only: "
                f"{', '.join(sample.members):.200}"
            )
        try:
            pixels = decode_image(image, max_pixels=max_pixels)
            return transform.sample(pixels, sample.key, training)
        except SampleError as error:
            raise SampleError(f"sample {sample.key!r}: {error}") from error

    return decode
