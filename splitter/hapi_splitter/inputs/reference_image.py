"""A picture that is the same everywhere, to compare hosts by.

Decoding is measured in core-seconds of a reference image: the ratio of two
hosts' seconds for it turns seconds measured on one into those of the other.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.sample_format import InputTransform

WIDTH, HEIGHT = 500, 375
"""The most common size in ImageNet."""
_QUALITY = 90
_WARM_UPS = 2
_REPEATS = 5


def reference_image(seed: int = 0) -> bytes:
    """A JPEG of 500 x 375 pixels and about as many bytes as a photograph.

    Integers only, and NumPy's generator whose stream never changes: the
    pixels are the same on every host.

    Args:
        seed: of its noise.
    """
    random = np.random.RandomState(seed)
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    waves = [abs((slope * columns + rows) % 256 - 128) for slope in (1, 2, 3)]
    noise = random.randint(0, 48, (HEIGHT, WIDTH, 1))
    pixels = (np.stack(waves, axis=-1) + noise + 40).astype(np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "JPEG", quality=_QUALITY)
    return sink.getvalue()


def reference_seconds(
    transform: InputTransform | None,
    *,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """Core-seconds to decode and transform the reference image.

    The median of several, after a warm-up, by one thread of torch.  Hosts
    that read arrays are compared by the decoding alone.

    Args:
        transform: None gives 0: of such samples nothing is known.
        clock: CPU seconds of this thread.
    """
    if transform is None:
        return 0.0
    image = reference_image()
    transformed = transform if isinstance(transform, ImageTransform) else None
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(_WARM_UPS + _REPEATS):
            started = clock()
            pixels = decode_image(image)
            if transformed is not None:
                transformed(pixels)
            seconds.append(clock() - started)
    finally:
        torch.set_num_threads(num_threads)
    return statistics.median(seconds[_WARM_UPS:])
