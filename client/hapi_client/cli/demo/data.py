"""Creates a small labelled data set of photographs without a download."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from hapi_protocol.errors import ClientError

CROP_PIXELS = 256
JPEG_QUALITY = 90
DEFAULT_SAMPLES = 320
SHARDS = 4
PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "chelsea.png",
    "coffee.png",
    "grass.png",
    "gravel.png",
    "motorcycle_left.png",
    "rocket.jpg",
)
"""Files in scikit-image's wheel; the label is the position."""


def write_shards(
    folder: Path, num_samples: int = DEFAULT_SAMPLES, seed: int = 0
) -> list[Path]:
    """Writes tar shards of random crops of the photographs.

    Args:
        folder: must exist.
        num_samples: total number of crops, distributed equally over the
            photographs.
        seed: seed of the crops.

    Raises:
        ClientError: ``bad_configuration`` if scikit-image is missing.
    """
    samples = list(_samples(num_samples, seed))
    paths = []
    for number in range(SHARDS):
        path = folder / f"photos-{number:06d}.tar"
        with tarfile.open(path, "w") as tar:
            for index in range(number, len(samples), SHARDS):
                name, jpeg, label = samples[index]
                _add(tar, f"{name}.jpg", jpeg)
                _add(tar, f"{name}.cls", str(label).encode())
        paths.append(path)
    return paths


def photograph_folder() -> Path:
    """Returns the folder with scikit-image's photographs.

    Raises:
        ClientError: ``bad_configuration`` if it is not installed.
    """
    try:
        import skimage
    except ImportError as error:
        raise ClientError(
            "bad_configuration",
            "the demo uses the photographs of scikit-image; run "
            "pip install '.[demo]' in a checkout of the project, or give tar "
            "files with --data",
        ) from error
    return Path(skimage.__file__).parent / "data"


def _samples(num_samples: int, seed: int) -> Iterator[tuple[str, bytes, int]]:
    folder = photograph_folder()
    random = np.random.default_rng(seed)
    photos = [_load(folder / name) for name in PHOTOGRAPHS]
    for number in range(num_samples):
        label = number % len(photos)
        photo = photos[label]
        left = int(random.integers(photo.width - CROP_PIXELS + 1))
        top = int(random.integers(photo.height - CROP_PIXELS + 1))
        crop = photo.crop((left, top, left + CROP_PIXELS, top + CROP_PIXELS))
        jpeg = io.BytesIO()
        crop.save(jpeg, "JPEG", quality=JPEG_QUALITY)
        stem = PHOTOGRAPHS[label].partition(".")[0]
        yield f"{stem}_{number:05d}", jpeg.getvalue(), label


def _load(path: Path) -> Image.Image:
    with Image.open(path) as image:
        pixels: Image.Image = image.convert("RGB")
    return pixels


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
