"""Cross-origin answers: what a browser may see of ours.

The container's owner says which origins may read (Swift's
``X-Container-Meta-Access-Control-Allow-Origin``).  Swift judges our HEAD of
the source, which carries the client's ``Origin``; what it says goes on all
answers that we make from then on, and beside the headers that Swift exposes,
ours are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hapi_protocol.headers import RESPONSE_HEADERS

_VERDICT = "hapi.cors"
_PREFIX = "access-control-"
_ALLOW = "access-control-allow-origin"
_EXPOSE = "access-control-expose-headers"
_OURS = (*(name.lower() for name in RESPONSE_HEADERS), "retry-after")
_OF_SOURCE = ("x-object-meta", "x-container-meta")


def note_verdict(env: dict[str, Any], headers: Mapping[str, str]) -> None:
    """Keeps what Swift's answer on the source says of the client's origin."""
    found = {
        name.lower(): value
        for name, value in headers.items()
        if name.lower().startswith(_PREFIX)
    }
    if _ALLOW not in found:
        return
    if _EXPOSE in found:
        found[_EXPOSE] = _exposed(found[_EXPOSE])
    env[_VERDICT] = found


def sharing(
    env: Mapping[str, Any], start_response: Callable[..., Any]
) -> Callable[..., Any]:
    """``start_response`` that adds the verdict, where there is one.

    Swift's own answers, which have it already, stay as they are.
    """

    def start(
        status: str, headers: list[tuple[str, str]], *exc_info: Any
    ) -> Any:
        return start_response(status, _shared(env, headers), *exc_info)

    return start if "HTTP_ORIGIN" in env else start_response


def _shared(
    env: Mapping[str, Any], headers: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    verdict = env.get(_VERDICT)
    if not verdict or _ALLOW in (name.lower() for name, _ in headers):
        return headers
    others = [pair for pair in headers if pair[0].lower() != "vary"]
    vary = [value for name, value in headers if name.lower() == "vary"]
    if verdict[_ALLOW] != "*":
        vary.append("Origin")
    added = [(name.title(), value) for name, value in verdict.items()]
    return [*others, *added, *([("Vary", ", ".join(vary))] if vary else [])]


def _exposed(listed: str) -> str:
    names = [name.strip() for name in listed.split(",")]
    kept = [name for name in names if not name.startswith(_OF_SOURCE)]
    return ", ".join(dict.fromkeys((*kept, *_OURS)))
