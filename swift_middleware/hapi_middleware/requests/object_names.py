"""Parses the body of a request for many objects: one name per line."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

from swift.common import constraints

from hapi_middleware.concurrency import Timeout
from hapi_middleware.requests.annotation_request import Env
from hapi_protocol.errors import AnnotationError, HapiError, make_error

BODY_TIMEOUT_SECONDS = 60.0
"""Swift's default of ``client_timeout``, for the body as a whole."""
READ_BYTES = 64 * 1024

_MAX_SHOWN_BYTES = 80


def read_object_names(env: Env, max_names: int) -> list[str]:
    """Reads the object names in a request's body, decoded, in order.

    The format is that of Swift's bulk delete without the container: one
    URL-encoded name per line.  White space around a name and empty lines are
    ignored.

    Args:
        env: WSGI environment of the request, its body not yet read.
        max_names: maximum number of names.

    Raises:
        AnnotationError: ``bad_names``: no name, or one that no object can
            have; ``bad_request``: the body is incomplete.
        TooLargeError: ``request_too_large``.
        TooSlowError: the client did not send the body in time.
    """
    # Three bytes for each URL-encoded byte, and the end of the line.
    max_bytes = max_names * (3 * constraints.MAX_OBJECT_NAME_LENGTH + 2)
    names: list[str] = []
    lines = _read_body(env, max_bytes, max_names).split(b"\n")
    for number, line in enumerate(lines, 1):
        quoted = line.strip()
        if not quoted:
            continue
        if len(names) == max_names:
            raise _too_large(f"more than {max_names} names", max_names)
        names.append(_parse_name(number, quoted))
    if not names:
        raise _bad_names(
            "the body has no object names; give one per line, URL-encoded"
        )
    return names


def _read_body(env: Env, max_bytes: int, max_names: int) -> bytes:
    length = _content_length(env)
    if length is not None and length > max_bytes:
        raise _too_large(f"a body of {length} bytes", max_names)
    body = bytearray()
    try:
        with Timeout(BODY_TIMEOUT_SECONDS):
            while piece := _read_piece(env, length):
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(
                        f"a body over {max_bytes} bytes", max_names
                    )
    except Timeout as error:
        raise make_error(
            "too_slow", f"the request's body did not end in {error}"
        ) from error
    # The server raises ValueError for a broken chunk.
    except (OSError, ValueError) as error:
        raise _incomplete(str(error)) from error
    if length is not None and len(body) < length:
        raise _incomplete(f"it ends after {len(body)} of {length} bytes")
    return bytes(body)


def _content_length(env: Env) -> int | None:
    """The body's length: 0 without a body, None if it is unknown."""
    if env.get("HTTP_TRANSFER_ENCODING", "").lower() == "chunked":
        return None
    try:
        return max(0, int(env.get("CONTENT_LENGTH") or 0))
    except ValueError:
        raise _incomplete("its Content-Length is not a number") from None


def _read_piece(env: Env, length: int | None) -> bytes:
    if length == 0:
        return b""
    stream: Any = env["wsgi.input"]
    return bytes(stream.read(READ_BYTES))


def _parse_name(number: int, quoted: bytes) -> str:
    if b"?" in quoted:
        raise _bad_line(number, quoted, "a query is not allowed; quote '?'")
    name = unquote_to_bytes(quoted)
    max_bytes = constraints.MAX_OBJECT_NAME_LENGTH
    if len(name) > max_bytes:
        raise _bad_line(
            number, quoted, f"it has {len(name)} bytes; at most {max_bytes}"
        )
    # Refuses NUL as well, which begins reserved names.
    if not constraints.check_utf8(name):
        raise _bad_line(number, quoted, "it is not UTF-8, or has a NUL")
    return name.decode()


def _bad_line(number: int, quoted: bytes, reason: str) -> AnnotationError:
    shown = quoted[:_MAX_SHOWN_BYTES].decode("ascii", "backslashreplace")
    return _bad_names(f"line {number}, {shown!r}, names no object: {reason}")


def _bad_names(message: str) -> AnnotationError:
    return AnnotationError("bad_names", message)


def _incomplete(reason: str) -> AnnotationError:
    return AnnotationError("bad_request", f"the request's body: {reason}")


def _too_large(what: str, max_names: int) -> HapiError:
    return make_error(
        "request_too_large",
        f"{what}; a request may name at most {max_names} objects",
        details={"max_objects": max_names},
    )
