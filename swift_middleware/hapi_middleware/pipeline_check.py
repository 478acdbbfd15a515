"""Whether the filter stands where it must in the proxy's pipeline.

A misplaced filter serves plain requests as ever and fails, or stores features
for objects, in ways that nobody would lay at its place's door.  So the proxy
does not start with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from swift.common.registry import get_swift_info

_APPLICATION = "swift.proxy.server"
_OURSELVES = "hapi_middleware.filter"
_MAX_FILTERS = 1000

_SWIFTS = "swift.common.middleware."
LEFT: Mapping[str, str] = MappingProxyType(
    {
        f"{_SWIFTS}tempauth": "tempauth",
        f"{_SWIFTS}keystoneauth": "keystoneauth",
        "keystonemiddleware.auth_token": "authtoken",
        f"{_SWIFTS}s3api.s3api": "s3api",
        f"{_SWIFTS}s3api.s3token": "s3token",
        f"{_SWIFTS}tempurl": "tempurl",
        f"{_SWIFTS}formpost": "formpost",
        f"{_SWIFTS}staticweb": "staticweb",
    }
)
"""Modules of the filters that must be left of us: who asks, and for what
object, is known behind them only."""

RIGHT: Mapping[str, str] = MappingProxyType(
    {
        f"{_SWIFTS}copy": "copy",
        f"{_SWIFTS}slo": "slo",
        f"{_SWIFTS}dlo": "dlo",
        f"{_SWIFTS}versioned_writes.legacy": "versioned_writes",
        f"{_SWIFTS}symlink": "symlink",
        f"{_SWIFTS}crypto.decrypter": "encryption",
    }
)
"""Modules of the filters that must be right of us, where there are any."""

_INSERTED = ("copy", "dlo", "versioned_writes")
"""Of :data:`RIGHT`; Swift has them in every pipeline."""

_PLACE = "its place is right of the authentication, immediately left of copy"


def check_place(app: Any) -> None:
    """Looks at the filters to the right of us.

    Nothing is said of an ``app`` that does not end in Swift's proxy.

    Args:
        app: the rest of the pipeline.  All filters of a pipeline are made
            before they are joined, so that those to the left of us are in
            Swift's registry already.

    Raises:
        ValueError: naming what stands on the wrong side, and the remedy.
    """
    chain = [set(_modules(each)) for each in _chain(app)]
    if not chain or _APPLICATION not in chain[-1]:
        return
    modules = set().union(*chain)
    wrong = list(_wrong(modules))
    if wrong:
        raise ValueError(
            f"[filter:hapi] in the pipeline, {'; '.join(wrong)}: {_PLACE}"
        )


def _chain(app: Any) -> Iterator[Any]:
    """The filters from left to right, and the application."""
    for _ in range(_MAX_FILTERS):
        if app is None:
            return
        yield app
        # s3token and authtoken write it so.
        app = getattr(app, "app", None) or getattr(app, "_app", None)


def _modules(app: Any) -> Iterator[str]:
    """Of its class and of those that it is derived from."""
    return (each.__module__ for each in type(app).__mro__)


def _wrong(modules: set[str]) -> Iterator[str]:
    if _OURSELVES in modules:
        yield "hapi stands twice; name it once"
    for module, name in LEFT.items():
        if module in modules:
            yield f"{name} stands right of hapi; move hapi right of it"
    missing = [name for module, name in RIGHT.items() if module not in modules]
    lost = [name for name in missing if name in _INSERTED]
    if lost:
        names = ", ".join(lost)
        yield (
            f"{names} must stand right of hapi; name {names} there (Swift "
            "inserts on the left of hapi what is not named)"
        )
    info = get_swift_info(admin=True)
    for name in missing:
        if name not in lost and name in {**info, **info["admin"]}:
            yield f"{name} stands left of hapi; move it right of hapi"
