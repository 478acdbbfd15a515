"""The body of a request for many objects: their names, line by line."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

from swift.common import constraints

from hapi_middleware.concurrency import Timeout
from hapi_middleware.requests.annotation_request import Env
from hapi_protocol.errors import AnnotationError, HapiError, make_error

BODY_SECONDS = 60.0
"""For a client to send all names."""
READ_BYTES = 64 * 1024

_SHOWN_BYTES = 80


def read_names(env: Env, most: int) -> list[str]:
    """The names of objects in a request's body, decoded, in order.

    One URL-encoded name to a line, as for Swift's bulk delete, but without a
    container.  White space around a name and empty lines are passed over.

    Args:
        env: of the request, its body not yet read.
        most: names that are allowed.

    Raises:
        AnnotationError: ``bad_names``: none, or one that no object can have;
            ``bad_request``: the body breaks off.
        TooLargeError: ``request_too_large``.
        TooSlowError: the client takes too long.
    """
    # Three bytes for each one that is URL-encoded, and the line's end.
    max_bytes = most * (3 * constraints.MAX_OBJECT_NAME_LENGTH + 2)
    names: list[str] = []
    lines = _read_body(env, max_bytes, most).split(b"\n")
    for number, line in enumerate(lines, 1):
        quoted = line.strip()
        if not quoted:
            continue
        if len(names) == most:
            raise _too_large(f"more than {most} names", most)
        names.append(_parse_name(number, quoted))
    if not names:
        raise _bad_names(
            "the body has no names of objects; give one to a line, URL-encoded"
        )
    return names


def _read_body(env: Env, max_bytes: int, most: int) -> bytes:
    length = _content_length(env)
    if length is not None and length > max_bytes:
        raise _too_large(f"a body of {length} bytes", most)
    body = bytearray()
    try:
        with Timeout(BODY_SECONDS):
            while piece := _read_piece(env, length):
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(f"a body over {max_bytes} bytes", most)
    except Timeout as error:
        raise make_error(
            "too_slow", f"the request's body did not end in {error}"
        ) from error
    # A broken chunk is a ValueError of the server's.
    except (OSError, ValueError) as error:
        raise _broken(str(error)) from error
    if length is not None and len(body) < length:
        raise _broken(f"it ends after {len(body)} of {length} bytes")
    return bytes(body)


def _content_length(env: Env) -> int | None:
    """0 where there is no body, None where its length is not known."""
    if env.get("HTTP_TRANSFER_ENCODING", "").lower() == "chunked":
        return None
    try:
        return max(0, int(env.get("CONTENT_LENGTH") or 0))
    except ValueError:
        raise _broken("its Content-Length is no number") from None


def _read_piece(env: Env, length: int | None) -> bytes:
    if length == 0:
        return b""
    stream: Any = env["wsgi.input"]
    return bytes(stream.read(READ_BYTES))


def _parse_name(number: int, quoted: bytes) -> str:
    if b"?" in quoted:
        raise _bad_line(number, quoted, "'?' begins no query here: quote it")
    name = unquote_to_bytes(quoted)
    longest = constraints.MAX_OBJECT_NAME_LENGTH
    if len(name) > longest:
        raise _bad_line(
            number, quoted, f"it has {len(name)} bytes; at most {longest}"
        )
    # No NUL, which begins the reserved names, among others.
    if not constraints.check_utf8(name):
        raise _bad_line(number, quoted, "it is not UTF-8, or has a NUL")
    return name.decode()


def _bad_line(number: int, quoted: bytes, why: str) -> AnnotationError:
    shown = quoted[:_SHOWN_BYTES].decode("ascii", "backslashreplace")
    return _bad_names(f"line {number}, {shown!r}, names no object: {why}")


def _bad_names(message: str) -> AnnotationError:
    return AnnotationError("bad_names", message)


def _broken(why: str) -> AnnotationError:
    return AnnotationError("bad_request", f"the request's body: {why}")


def _too_large(what: str, most: int) -> HapiError:
    return make_error(
        "request_too_large",
        f"{what}; at most {most} objects may be asked for at a time",
        details={"max_objects": most},
    )
