"""Image formats that a build of Pillow may lack; wheels have all."""

from __future__ import annotations

import pytest
from PIL import features

OPTIONAL = ("webp", "avif")


def needs_format(kind: str) -> None:
    """Skips the test if this Pillow cannot read a format."""
    if kind.lower() in OPTIONAL and not features.check(kind.lower()):
        pytest.skip(f"this Pillow was built without {kind.upper()}")
