"""Strict parsing of untrusted JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from hapi_protocol.errors import bad_package

MAX_DIGITS = 20
"""Longest integer; those of 64 bits are shorter."""


def parse_json(data: bytes | str, name: str) -> Any:
    """Parses JSON.

    Args:
        data: text, or its UTF-8.  The caller limits its length, because
            parsing takes many times as much memory.
        name: name of the document, for errors.

    Raises:
        PackageError: if it is nested too deeply, is not JSON, repeats a key,
            or has a number that is not finite.
    """
    try:
        return json.loads(
            data if isinstance(data, str) else data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except RecursionError:
        raise bad_package(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise bad_package(f"{name} is not acceptable JSON: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is repeated")
    return fields


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _bounded(text: str) -> int:
    # The time to read a number grows with the square of its length.
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{text:.40} is out of range")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is out of range")
    return value
