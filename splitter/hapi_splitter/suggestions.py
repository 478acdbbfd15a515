"""Names that are proposed where a freeze point is refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

_MAX_NAMES = 5
_NONE = "there are none"


def similar(name: str, valid: Mapping[str, int]) -> str:
    """Valid names spelt like an unknown one, for a message."""
    near = difflib.get_close_matches(name, valid, _MAX_NAMES, cutoff=0.0)
    return ", ".join(near) or _NONE


def nearest(position: int, valid: Mapping[str, int]) -> str:
    """The valid names next to a position, the outermost on each side.

    Args:
        position: where the refused freeze point would be.
        valid: names with the positions of their ends.
    """
    sides = {
        "before it": max(
            (p for p in valid.values() if p < position), default=None
        ),
        "behind it": min(
            (p for p in valid.values() if p > position), default=None
        ),
    }
    found = []
    for side, place in sides.items():
        names = [name for name, end in valid.items() if end == place]
        if names:
            outermost = min(names, key=lambda name: name.count("."))
            found.append(f"{outermost!r} {side}")
    return ", ".join(found) or _NONE
