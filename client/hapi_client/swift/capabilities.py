"""Capabilities of a store from ``/info``, as rows of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hapi_protocol.versions import API_VERSION
from hapi_splitter.units import bytes_text

_SWIFT_FEATURES = (
    ("bulk_upload", "bulk"),
    ("slo", "slo"),
    ("dlo", "dlo"),
    ("symlink", "symlink"),
    ("tempurl", "tempurl"),
    ("object_versioning", "object versioning"),
    ("s3api", "s3api"),
    ("staticweb", "staticweb"),
)
"""Sections of ``/info`` for other middleware, and their display names."""


def dtypes(section: Mapping[str, Any]) -> list[str]:
    """Returns the number formats in which features may be sent."""
    return list(_encoding_parts(section, 0))


def cache_text(section: Mapping[str, Any]) -> str:
    """Describes the feature cache."""
    if section.get("cache"):
        return "on: features are cached if a job requests it"
    return "off: features are computed in each epoch"


def places_text(section: Mapping[str, Any]) -> str:
    """Describes where features are computed; a proxy if nothing is said."""
    names = {"object": "next to the disks, on object servers"}
    places = section.get("places") or ["proxy"]
    return ", then ".join(
        names.get(place, "on the proxy's host") for place in places
    )


def model_library(section: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns account and container of the model library; None without one."""
    account, _, container = str(section.get("model_library", "")).partition(
        "/"
    )
    return (account, container) if account and container else None


def size_text(num_bytes: int | None) -> str:
    """Describes a limit of bytes; None is no limit."""
    return "any size" if num_bytes is None else bytes_text(num_bytes)


def swift_rows(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and values of Swift's own capabilities.

    Args:
        info: the whole ``/info`` document.
    """
    swift = info.get("swift", {})
    yield "Swift", str(swift.get("version", "unknown version"))
    yield "largest object", size_text(swift.get("max_file_size"))
    policies = [
        str(policy.get("name"))
        + (" (default)" if policy.get("default") else "")
        for policy in swift.get("policies", ())
    ]
    if policies:
        yield "storage policies", ", ".join(policies)
    names = [name for section, name in _SWIFT_FEATURES if section in info]
    if names:
        yield "it also has", ", ".join(names)


def hapi_rows(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and values of the filter's capabilities.

    Args:
        section: the ``hapi`` section of ``/info``.
    """
    yield "protocol", f"{section.get('version')}; this client's {API_VERSION}"
    limits = (
        ("largest object computed on", "max_object_bytes"),
        ("largest model package", "max_package_bytes"),
    )
    for name, key in limits:
        yield name, size_text(section.get(key))
    multi = section.get("multi")
    if isinstance(multi, Mapping):
        yield (
            "objects of one request",
            f"up to {multi.get('max_objects')}, each of "
            f"{size_text(multi.get('max_object_bytes'))} at most",
        )
    compressions = list(_encoding_parts(section, 1))
    yield (
        "features travel as",
        ", ".join(dtypes(section))
        + (f"; each also {', '.join(compressions)}" if compressions else ""),
    )
    yield "transforms", ", ".join(section.get("transforms", ()))
    yield "numerics", ", ".join(section.get("numerics", ()))
    yield "feature cache", cache_text(section)
    yield "features are computed", places_text(section)
    library = section.get("model_library")
    yield "model library", library or "none: jobs upload their packages"
    for name, key in (
        ("profiles of packages", "profile"),
        ("indices of shards", "index"),
    ):
        yield name, "yes" if section.get(key) else "no"


def _encoding_parts(section: Mapping[str, Any], number: int) -> Sequence[str]:
    """Returns the n-th parts of the encodings' names, each once."""
    split = [name.split(";") for name in section.get("encodings", ())]
    return list(dict.fromkeys(p[number] for p in split if len(p) > number))
