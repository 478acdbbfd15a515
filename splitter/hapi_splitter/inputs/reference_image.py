"""A reference image to compare the decode speed of hosts.

The ratio of two hosts' core-seconds for this image converts decode times
measured on one host into times on the other.
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
"""Most common size in ImageNet."""
_QUALITY = 90
_WARM_UPS = 2
_REPEATS = 5


def reference_image(seed: int = 0) -> bytes:
    """Returns a JPEG of 500 x 375 pixels, about as large as a photograph.

    Integer arithmetic and NumPy's frozen generator give the same pixels on
    every host.

    Args:
        seed: seed of the noise.
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
    """Measures the core-seconds to decode and transform the reference image.

    Median of several runs after a warm-up, on one torch thread.

    Args:
        transform: array transforms are measured by decoding alone; None
            returns 0, because the sample format is unknown.
        clock: returns CPU seconds of this thread.
    """
    if transform is None:
        return 0.0
    image = reference_image()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(_WARM_UPS + _REPEATS):
            started = clock()
            pixels = decode_image(image)
            if isinstance(transform, ImageTransform):
                transform(pixels)
            seconds.append(clock() - started)
    finally:
        torch.set_num_threads(num_threads)
    return statistics.median(seconds[_WARM_UPS:])
