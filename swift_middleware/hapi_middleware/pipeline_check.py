"""Checks the filter's position in the proxy's pipeline at start.

A misplaced filter serves plain requests as before, but fails on others or
stores features instead of objects, and nothing points at its position.  So
the proxy does not start with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from swift.common.registry import get_swift_info

_APPLICATION = "swift.proxy.server"
_OWN_MODULE = "hapi_middleware.filter"
_MAX_FILTERS = 1000
"""Ends the walk along a pipeline that leads back to itself."""

_SWIFT = "swift.common.middleware."
LEFT: Mapping[str, str] = MappingProxyType(
    {
        f"{_SWIFT}tempauth": "tempauth",
        f"{_SWIFT}keystoneauth": "keystoneauth",
        "keystonemiddleware.auth_token": "authtoken",
        f"{_SWIFT}s3api.s3api": "s3api",
        f"{_SWIFT}s3api.s3token": "s3token",
        f"{_SWIFT}tempurl": "tempurl",
        f"{_SWIFT}formpost": "formpost",
        f"{_SWIFT}staticweb": "staticweb",
    }
)
"""Modules of the filters that must be left of hapi: they establish the caller
and the object."""

RIGHT: Mapping[str, str] = MappingProxyType(
    {
        f"{_SWIFT}copy": "copy",
        f"{_SWIFT}slo": "slo",
        f"{_SWIFT}dlo": "dlo",
        f"{_SWIFT}versioned_writes.legacy": "versioned_writes",
        f"{_SWIFT}symlink": "symlink",
        f"{_SWIFT}crypto.decrypter": "encryption",
    }
)
"""Modules of the filters that must be right of hapi, if they are used."""

_MANDATORY = ("copy", "dlo", "versioned_writes")
"""Filters of :data:`RIGHT` that Swift inserts into every pipeline."""

_POSITION = "its place is right of the authentication, directly left of copy"


def check_pipeline_position(app: Any) -> None:
    """Checks that the right filters are to the right of hapi.

    An ``app`` that does not end in Swift's proxy is not checked.

    Args:
        app: the rest of the pipeline.  All filters are constructed before
            they are joined: those left of hapi are in Swift's registry.

    Raises:
        ValueError: names the filters on the wrong side, and the remedy.
    """
    chain = [set(_class_modules(step)) for step in _pipeline(app)]
    if not chain or _APPLICATION not in chain[-1]:
        return
    modules = set().union(*chain)
    problems = list(_problems(modules))
    if problems:
        raise ValueError(
            f"[filter:hapi] in the pipeline, {'; '.join(problems)}: "
            f"{_POSITION}"
        )


def _pipeline(app: Any) -> Iterator[Any]:
    """Yields the filters from left to right, then the application."""
    for _ in range(_MAX_FILTERS):
        if app is None:
            return
        yield app
        # s3token and authtoken call the attribute _app.
        app = getattr(app, "app", None) or getattr(app, "_app", None)


def _class_modules(app: Any) -> Iterator[str]:
    return (base.__module__ for base in type(app).__mro__)


def _problems(modules: set[str]) -> Iterator[str]:
    if _OWN_MODULE in modules:
        yield "hapi is listed twice; name it once"
    for module, name in LEFT.items():
        if module in modules:
            yield f"{name} is right of hapi; move hapi right of it"
    missing = [name for module, name in RIGHT.items() if module not in modules]
    mandatory = [name for name in missing if name in _MANDATORY]
    if mandatory:
        names = ", ".join(mandatory)
        yield (
            f"{names} must be right of hapi; name {names} there (Swift "
            "inserts filters that are not named left of hapi)"
        )
    info = get_swift_info(admin=True)
    for name in missing:
        if name not in mandatory and name in {**info, **info["admin"]}:
            yield f"{name} is left of hapi; move it right of hapi"
