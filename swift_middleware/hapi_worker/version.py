"""The version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Of ``swift-hapi``; ``unknown`` in a source tree."""
    try:
        return version("swift-hapi")
    except PackageNotFoundError:
        return "unknown"
