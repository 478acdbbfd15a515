"""CORS headers of the filter's answers.

The container's owner names the origins that may read (Swift's
``X-Container-Meta-Access-Control-Allow-Origin``).  Swift checks the client's
``Origin`` on our HEAD of the source; the CORS headers of its answer are put
on the filter's answers to this request, with our own headers exposed as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hapi_protocol.headers import RESPONSE_HEADERS

_ENV_KEY = "hapi.cors"
_PREFIX = "access-control-"
_ALLOW = "access-control-allow-origin"
_EXPOSE = "access-control-expose-headers"
_OWN_HEADERS = (*(name.lower() for name in RESPONSE_HEADERS), "retry-after")
_METADATA_PREFIXES = ("x-object-meta", "x-container-meta")


def save_cors_headers(env: dict[str, Any], headers: Mapping[str, str]) -> None:
    """Saves the CORS headers of Swift's answer on the source in ``env``."""
    cors = {
        name.lower(): value
        for name, value in headers.items()
        if name.lower().startswith(_PREFIX)
    }
    if _ALLOW not in cors:
        return
    if _EXPOSE in cors:
        cors[_EXPOSE] = _exposed_headers(cors[_EXPOSE])
    env[_ENV_KEY] = cors


def with_cors_headers(
    env: Mapping[str, Any], start_response: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps ``start_response`` so that it adds the saved CORS headers.

    Swift's own answers, which have them already, are not changed.
    """

    def start(
        status: str, headers: list[tuple[str, str]], *exc_info: Any
    ) -> Any:
        return start_response(status, _with_cors(env, headers), *exc_info)

    return start if "HTTP_ORIGIN" in env else start_response


def _with_cors(
    env: Mapping[str, Any], headers: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    cors = env.get(_ENV_KEY)
    if not cors or _ALLOW in (name.lower() for name, _ in headers):
        return headers
    others = [pair for pair in headers if pair[0].lower() != "vary"]
    vary = [value for name, value in headers if name.lower() == "vary"]
    if cors[_ALLOW] != "*":
        vary.append("Origin")
    added = [(name.title(), value) for name, value in cors.items()]
    return [*others, *added, *([("Vary", ", ".join(vary))] if vary else [])]


def _exposed_headers(swift_list: str) -> str:
    """Our headers and Swift's, without the source's metadata."""
    names = [name.strip() for name in swift_list.split(",")]
    public = [n for n in names if not n.startswith(_METADATA_PREFIXES)]
    return ", ".join(dict.fromkeys((*public, *_OWN_HEADERS)))
