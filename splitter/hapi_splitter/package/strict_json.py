"""JSON from strangers: bounded, and without the parser's leniencies."""

from __future__ import annotations

import json
import math
from typing import Any

from hapi_protocol.errors import PackageError


def parse_json(data: bytes, name: str, max_bytes: int) -> Any:
    """What ``data`` says.

    Args:
        data: UTF-8.
        name: what it is, for errors.
        max_bytes: checked before parsing, which takes many times as much.

    Raises:
        PackageError: too long, nested too deeply, not JSON, a repeated
            key, or a number that is not finite.
    """
    if len(data) > max_bytes:
        raise PackageError(
            "bad_package",
            f"{name} has {len(data)} bytes, more than the limit of "
            f"{max_bytes}",
        )
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_without_repeats,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise PackageError(
            "bad_package", f"{name} is nested too deeply"
        ) from None
    except ValueError as error:
        raise PackageError(
            "bad_package", f"{name} is not acceptable JSON: {error}"
        ) from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is repeated")
    return fields


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is out of range")
    return value
