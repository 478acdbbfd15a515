"""Parses link bandwidths and ages of the command line."""

from __future__ import annotations

import re
from datetime import timedelta

from hapi_protocol.errors import ClientError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|b)(?:/s|ps)?", re.I)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_link(text: str) -> float:
    """Parses ``"100mbit"`` (12.5e6) or ``"12MB/s"`` (12e6) to bytes/s.

    Prefixes are powers of 1000. ``b`` alone is ambiguous and refused.

    Raises:
        ClientError: ``bad_configuration`` naming what is allowed.
    """
    match = _RATE.fullmatch(text.strip())
    if match and match[3] != "b" and float(match[1]) > 0:
        rate = float(match[1]) * _FACTORS[match[2].lower()]
        return rate / 8 if match[3].lower() == "bit" else rate
    raise ClientError(
        "bad_configuration",
        f"link is {text!r}; give bits as in 100mbit or 1gbit, or bytes as "
        "in 12MB/s",
    )


_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([mhdw])", re.I)
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_age(text: str) -> timedelta:
    """Parses ``"30d"``; units are minutes, hours, days and weeks.

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
