"""Decoders: from a sample's bytes to the model's input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from hapi_protocol.samples import Medium, Sample, SampleError
from hapi_protocol.transforms import Training
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.fork_server import ForkServer
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_header import (
    DEFAULT_MAX_PIXELS,
    FORMATS,
    LARGE_BYTES,
    read_header,
)
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.subprocess_decode import LargeImage
from hapi_worker.scheduling.fair_pool import FairPool

Decoder = Callable[[Sample], torch.Tensor | LargeImage]
"""Makes one input of the model, or says that it takes a :class:`LargeDecoder`.
Raises :class:`SampleError` for permanent failures; its text has the sample's
key and nothing that depends on the host or the time."""


@dataclass(frozen=True)
class LargeDecoder:
    """Decodes large images without delaying the other work of a worker.

    Args:
        pool: threads that wait for the processes that decode.
        server: forks these processes.
        seconds: deadline of one image.
        reserve: counts the memory of an image.
    """

    pool: FairPool
    server: ForkServer
    seconds: float
    reserve: Callable[[int], AbstractContextManager[None]]

    def decode(self, image: LargeImage) -> tuple[torch.Tensor, float]:
        """Returns the input of the model, and the CPU seconds it took.

        Raises:
            SampleError: see :data:`Decoder`.
            DoesNotFitError: it needs more than images may use.
            UnavailableError, TooSlowError: see :meth:`LargeImage.decode`.
        """
        with self.reserve(image.num_bytes), _naming(image.key):
            return image.decode(self.server, self.seconds)


def decoder_of(
    frozen: FrozenGraph,
    *,
    max_pixels: int,
    formats: Sequence[str],
    training: Training | None,
) -> Decoder:
    """Makes the decoder of a model's inputs, see :func:`image_decoder`."""
    transform = frozen.transform
    assert transform is not None, "checked before the grant"
    if isinstance(transform, ArrayTransform):
        return array_decoder(transform, frozen.id_limits)
    return image_decoder(
        transform, max_pixels=max_pixels, formats=formats, training=training
    )


def image_decoder(
    transform: ImageTransform,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    formats: Sequence[str] = tuple(FORMATS),
    training: Training | None = None,
) -> Decoder:
    """Makes a decoder of images to float32 ``[3, h, w]``.

    Args:
        transform: the transform of the model's package.
        max_pixels: largest image that is decoded.
        formats: formats that are allowed.
        training: seed and epoch of the augmentation; None for evaluation.
    """

    def decode(data: bytes, key: str) -> torch.Tensor | LargeImage:
        header = read_header(data, max_pixels=max_pixels, formats=formats)
        image = LargeImage(
            data, header, key, transform, training, max_pixels, formats
        )
        if header.is_large or image.num_bytes > LARGE_BYTES:
            return image
        pixels = decode_image(data, header=header, turns=transform.turns)
        return transform.sample(pixels, key, training)

    return _decoder(transform.medium, decode)


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
    medium: Medium, decode: Callable[[bytes, str], torch.Tensor | LargeImage]
) -> Decoder:
    def decoded(sample: Sample) -> torch.Tensor | LargeImage:
        try:
            data = sample.content(medium)
        except SampleError as error:
            raise SampleError(f"sample {sample.key!r} {error}") from error
        with _naming(sample.key):
            return decode(data, sample.key)

    return decoded


@contextmanager
def _naming(key: str) -> Iterator[None]:
    try:
        yield
    except SampleError as error:
        raise SampleError(f"sample {key!r}: {error}") from error
