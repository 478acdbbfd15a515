"""Figures as files."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

DOTS_PER_INCH = 110


def png_of(figure: Figure) -> bytes:
    """The same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None}
    )
    return buffer.getvalue()
