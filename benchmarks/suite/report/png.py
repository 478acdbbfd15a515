"""Figures as files."""

from __future__ import annotations

import io

from matplotlib.figure import Figure
from PIL import Image

DOTS_PER_INCH = 150
"""More than a page shows them with, for screens that are finer."""
COLOURS = 128
"""With a palette, a file is a third as large."""


def png_of(figure: Figure) -> bytes:
    """The same for the same figure."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DOTS_PER_INCH)
    drawn.seek(0)
    picture = Image.open(drawn).convert("RGB")
    buffer = io.BytesIO()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(
        buffer, format="png", optimize=True
    )
    return buffer.getvalue()
