"""Checks of options that users give, by name, value and bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from hapi_protocol.errors import ClientError


def check_integers(options: object, minimum: int, *names: str) -> None:
    """Refuses options that are no integers, or below a minimum.

    Args:
        options: dataclass of the options; None is allowed where it is the
            default.
        minimum: smallest value.
        names: names of the options.

    Raises:
        ClientError: ``bad_configuration``.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None or getattr(type(options), name, 0) is not None:
            check_integer(name, value, minimum)


def check_integer(name: str, value: Any, minimum: int) -> None:
    """Refuses a value, unless it is an integer; see above."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not (is_integer and value >= minimum):
        raise ClientError(
            "bad_configuration",
            f"{name} is {value!r}; give an integer, at least {minimum}",
        )


def check_seconds(options: object, *names: str) -> None:
    """Refuses options that are negative, no numbers, or infinite.

    Args:
        options: object with the options as attributes.
        names: names of the options.

    Raises:
        ClientError: ``bad_configuration``.
    """
    for name in names:
        value = getattr(options, name)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not 0 <= float(value) < math.inf:
            raise ClientError(
                "bad_configuration",
                f"{name} is {value!r}; give seconds, at least 0",
            )


def check_types(
    types: Mapping[str, tuple[type, ...]], values: Mapping[str, object]
) -> None:
    """Refuses values of other types.

    Args:
        types: allowed types by name of the option.
        values: values by name, among others.

    Raises:
        ClientError: ``bad_configuration``.
    """
    for name, allowed in types.items():
        if not isinstance(values[name], allowed):
            names = " or ".join(
                "None" if kind is type(None) else kind.__name__
                for kind in allowed
            )
            # A data set or job describes itself in lines.
            shown = repr(values[name]).partition("\n")[0]
            raise ClientError(
                "bad_configuration", f"{name} is {shown:.80}; give {names}"
            )
