"""How old something is, as people write it."""

from __future__ import annotations

import re
from datetime import timedelta

from hapi_protocol.errors import ClientError

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([mhdw])", re.I)
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_age(text: str) -> timedelta:
    """``"30d"`` → 30 days; ``m``, ``h`` and ``w`` are minutes, hours, weeks.

    Raises:
        ClientError: ``bad_configuration`` naming what is allowed.
    """
    match = _AGE.fullmatch(text.strip())
    if match:
        try:
            return timedelta(**{_UNITS[match[2].lower()]: float(match[1])})
        except OverflowError:
            pass
    raise ClientError(
        "bad_configuration",
        f"age is {text!r}; give a number and m, h, d or w, as in 30d",
    )
