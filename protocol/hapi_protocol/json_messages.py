"""Strict reader of JSON messages, driven by the types of dataclass fields.

A field of type ``str`` must be text that is not empty, ``int`` a count below
2**63, ``float`` a finite number from 0 on, ``bool`` true or false.  Nested
dataclasses, ``tuple[X, ...]`` and ``X | None`` are read by the same rules.
``Annotated[X, read]`` names the function that reads a field; it raises
ValueError for a bad value.  Unknown fields are ignored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import MappingProxyType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from hapi_protocol.errors import AnnotationError
from hapi_protocol.versions import API_VERSION, check_worker_version

MAX_MESSAGE_BYTES = 64 * 1024
"""A job for one object has about 20 kB at most: two paths (Swift allows 256 +
256 + 1024 bytes, which JSON may escape to six times as many), 64 checksums."""

_Message = TypeVar("_Message", bound="JsonMessage")
_T = TypeVar("_T")
_NONE: Mapping[str, Any] = MappingProxyType({})


class FieldError(ValueError):
    """A field of a message is missing or has a bad value.

    Attributes:
        name: name of the field, with dots for nested fields.
        value: the value found, None if the field is missing.
    """

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"field {name!r} is {value!r:.200}")
        self.name = name
        self.value = value


class JsonMessage:
    """Base of the versioned JSON messages between filter and worker.

    Subclasses are frozen dataclasses.

    Attributes:
        NAME: name of the message in errors.
        MAX_BYTES: maximum length of a body.
    """

    NAME: ClassVar[str]
    MAX_BYTES: ClassVar[int] = MAX_MESSAGE_BYTES

    def to_body(self) -> bytes:
        """The message as JSON."""
        message = {**vars(self), "version": API_VERSION}
        return json.dumps(message, default=_nested_json).encode()

    @classmethod
    def from_body(cls: type[_Message], body: bytes) -> _Message:
        """Reads a message.

        Raises:
            AnnotationError: ``bad_request``, names the field.
            UnavailableError: the message has another version.
        """
        data = parse_object(body, cls.NAME, cls.MAX_BYTES)
        check_worker_version(data.get("version"), cls.NAME)
        message = read_message_fields(cls, data, cls.NAME)
        try:
            message.check()
        except ValueError as error:
            raise _bad_message(cls.NAME, error) from error
        return message

    def check(self) -> None:
        """Raises ValueError if the fields contradict each other."""


def _nested_json(value: Any) -> Any:
    """JSON form of a nested dataclass: its own, or its fields."""
    return getattr(value, "json_form", None) or vars(value)


def parse_object(
    text: str | bytes, what: str, max_bytes: int = MAX_MESSAGE_BYTES
) -> Mapping[str, Any]:
    """Parses the JSON object of a message.

    Args:
        text: the JSON.
        what: name of the message in errors.
        max_bytes: maximum length of ``text``.

    Raises:
        AnnotationError: ``bad_request``.
    """
    if len(text) > max_bytes:
        raise _bad_message(what, f"{len(text)} bytes; at most {max_bytes}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_message(what, f"not JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise _bad_message(what, f"not a JSON object: {data!r:.80}")
    return data


def read_message_fields(
    kind: type[_T], data: Mapping[str, Any], what: str
) -> _T:
    """Reads a dataclass as :func:`read_fields`, with our error.

    Raises:
        AnnotationError: ``bad_request``, names the field.
    """
    try:
        return read_fields(kind, data)
    except FieldError as error:
        raise _bad_message(what, error) from error


def read_fields(
    kind: type[_T], data: Any, *, use_defaults: bool = False
) -> _T:
    """Reads a dataclass from the fields of a JSON object.

    Args:
        kind: the dataclass.
        data: the parsed JSON object.
        use_defaults: missing fields have the dataclass's defaults, if any.

    Raises:
        FieldError: names the field.
        ValueError: ``data`` is not an object.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r:.80} is not a JSON object")
    hints = _type_hints(kind)  # type: ignore[arg-type]
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        name = field.name
        has_default = field.default is not MISSING
        if use_defaults and has_default and name not in data:
            continue
        value = data.get(name)
        try:
            values[name] = _read(hints[name], value, use_defaults)
        except FieldError as error:
            raise FieldError(f"{name}.{error.name}", error.value) from None
        except ValueError:
            raise FieldError(name, value) from None
    return kind(**values)


def strict_fields(
    kind: type, data: Any, optional: Mapping[str, Any] = _NONE
) -> dict[str, Any]:
    """Returns the fields of a dataclass that checks their values itself.

    Args:
        kind: the dataclass.
        data: the parsed JSON, which may be untrusted; lists become tuples.
        optional: fields that may be missing, and their values then.

    Raises:
        ValueError: ``data`` is not an object, or fields are missing or
            unknown.
    """
    names = {field.name for field in fields(kind)}
    if not isinstance(data, dict) or {*data, *optional} != names:
        allowed = ", ".join(sorted(names))
        raise ValueError(
            f"{kind.__name__} is an object with the fields {allowed} "
            f"(optional: {', '.join(sorted(optional))}), not {data!r:.200}"
        )
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in {**optional, **data}.items()
    }


@cache
def _type_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read(hint: Any, value: Any, use_defaults: bool) -> Any:
    if hint in _READERS:
        return _READERS[hint](value)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return args[1](value)
    if origin in (Union, UnionType):
        if value is None:
            return None
        return _read(args[0], value, use_defaults)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{value!r:.80} is not a list")
        return tuple(_read(args[0], item, use_defaults) for item in value)
    return read_fields(hint, value, use_defaults=use_defaults)


def read_possibly_empty(value: Any) -> str:
    """Reads text that may be empty."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is not text")
    return value


def read_text(value: Any) -> str:
    """Reads text that is not empty."""
    text = read_possibly_empty(value)
    if not text:
        raise ValueError("text is empty")
    return text


def read_count(value: Any) -> int:
    """Reads a whole number from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def read_amount(value: Any) -> float:
    """Reads a finite number from 0 on."""
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{value!r:.80} is not a number from 0 on")
    return float(value)


def read_flag(value: Any) -> bool:
    """Reads true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.80} is not true or false")
    return value


def one_of(*allowed: str) -> Callable[[Any], str]:
    """A reader of one of a few words."""

    def read(value: Any) -> str:
        text = read_text(value)
        if text not in allowed:
            raise ValueError(f"{text!r:.80} is not one of {allowed}")
        return text

    return read


PossiblyEmpty = Annotated[str, read_possibly_empty]

_READERS: Mapping[Any, Callable[[Any], Any]] = MappingProxyType(
    {
        str: read_text,
        int: read_count,
        float: read_amount,
        bool: read_flag,
    }
)


def _bad_message(what: str, reason: object) -> AnnotationError:
    return AnnotationError("bad_request", f"{what}: {reason}")
