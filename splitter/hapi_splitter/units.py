"""Formats amounts with units for people."""

from __future__ import annotations

import math

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_BITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def number_text(number: float) -> str:
    """Formats a number with three digits: ``15,400``, ``0.0123``."""
    if not math.isfinite(number):
        return "∞"
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Formats a count: ``1 image``, ``1,200 images``.

    Args:
        number: the count.
        noun: in the singular.
        plural: plural of the noun, if it is not the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def bytes_text(num_bytes: float) -> str:
    """Formats a size in powers of 1000: ``33.1 kB``."""
    return _with_prefix(num_bytes, _BYTES)


def link_text(bytes_per_second: float) -> str:
    """Formats a bandwidth in bits per second: ``680 Mbit/s``."""
    return _with_prefix(8 * bytes_per_second, _BITS)


def seconds_text(seconds: float) -> str:
    """Formats a duration: ``1.25 ms``, ``12 s``, ``3.5 min``, ``2.1 h``."""
    if seconds == 0:
        return "0 s"
    if seconds >= 5400:
        return f"{number_text(seconds / 3600)} h"
    if seconds >= 90:
        return f"{number_text(seconds / 60)} min"
    for unit, name in _SECONDS:
        if seconds >= unit or name == "ns":
            return f"{number_text(seconds / unit)} {name}"
    raise AssertionError(seconds)


def percent_text(fraction: float) -> str:
    """Formats a fraction: ``77 %``; never rounds to 0 % or 100 %."""
    percent = 100 * fraction
    if 0 < percent < 0.1:
        return "<0.1 %"
    if percent < 1 or 99 < percent < 100:
        return f"{min(percent, 99.9):.1f} %" if percent else "0 %"
    return f"{percent:.0f} %"


def _with_prefix(amount: float, units: tuple[str, ...]) -> str:
    power = 0
    while amount >= 999.5 and power < len(units) - 1:
        amount /= 1000
        power += 1
    return f"{number_text(amount)} {units[power]}"
