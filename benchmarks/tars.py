"""Which tars are meant; imports nothing of HAPI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

IMAGENET_TARS = "imagenet-*.tar"


def find_tars(
    sources: Sequence[Path], pattern: str = IMAGENET_TARS
) -> list[Path]:
    """The tars of files and folders.

    Of a folder with ``imagenet-*.tar`` only those: there may be tars of
    tiny images beside them, which no cut can make smaller.

    Args:
        sources: files, and folders.
        pattern: of the tars of a folder that are preferred.

    Raises:
        ValueError: naming a source without any.
    """
    tars: list[Path] = []
    for source in sources:
        if source.is_file():
            found = [source]
        else:
            found = sorted(source.glob(pattern)) or sorted(
                source.glob("*.tar")
            )
        if not found:
            raise ValueError(f"{source} is no tar and no folder of tars")
        tars += found
    return tars
