"""What a feature stream says at its end: its sums, and the worker's load."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Load:
    """How busy the worker is, over about the last ten seconds.

    Attributes:
        share: of the worker that the charged account may expect, above 0
            to 1: its weight by those of all accounts that had work there.
        streams: of this account that run now.
        device_busy: fraction of the time in which the device computed.
        cpu_busy: the worker's CPU seconds by those of its cores, 0 to 1.
    """

    share: float
    streams: int
    device_busy: float
    cpu_busy: float


@dataclass(frozen=True)
class Summary:
    """What the closing zero-row batch says of the whole stream.

    Attributes:
        rows: all rows, those with an error included.
        errors: rows with an error.
        source_etag: ETag of the object that was read.
        source_bytes: bytes of it that were read.
        saturated: features clipped to the encoding's largest value.
        cpu_seconds: core-seconds that the worker spent on this stream; on
            a CPU those of the forward included.
        load: of the worker; None where it does not say.
    """

    rows: int
    errors: int
    source_etag: str
    source_bytes: int
    saturated: int = 0
    cpu_seconds: float = 0.0
    load: Load | None = None

    @classmethod
    def from_json(cls, text: str | bytes) -> Summary:
        """Reads what the closing batch says; unknown keys are ignored.

        Raises:
            ValueError, TypeError, KeyError: it is no summary.
        """
        given = _known(cls, json.loads(text))
        load = given.get("load")
        given["load"] = None if load is None else Load(**_known(Load, load))
        return cls(**given)


def _known(kind: type, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{given!r:.80} in the place of a {kind.__name__}")
    types = {each.name: str(each.type) for each in fields(kind)}
    known = {name: value for name, value in given.items() if name in types}
    for name, value in known.items():
        if types[name] == "int" and type(value) is not int:
            raise TypeError(f"{name} is {value!r:.80}, not a count")
        if types[name] in ("int", "float"):
            check_amount(value, name)
    return known


def check_amount(value: Any, name: str) -> None:
    """
    Raises:
        ValueError: it is no finite number from 0 on.
    """
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r:.80}: no number from 0 on")
