"""What ``/info`` says of a store, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hapi_protocol.versions import API_VERSION
from hapi_splitter.units import bytes_text

_OF_SWIFT = (
    ("bulk_upload", "bulk"),
    ("slo", "slo"),
    ("dlo", "dlo"),
    ("symlink", "symlink"),
    ("tempurl", "tempurl"),
    ("object_versioning", "object versioning"),
    ("s3api", "s3api"),
    ("staticweb", "staticweb"),
)
"""Sections of filters that a user may ask for, and their names."""


def dtypes(section: Mapping[str, Any]) -> list[str]:
    """Number formats in which features may travel."""
    return list(_parts(section, 0))


def cache_text(section: Mapping[str, Any]) -> str:
    """Whether features are kept."""
    if section.get("cache"):
        return "on: features are kept where a job asks for it"
    return "off: each epoch is computed anew"


def size_text(num_bytes: int | None) -> str:
    """Of a limit."""
    return "any size" if num_bytes is None else bytes_text(num_bytes)


def swift_rows(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What matters of Swift itself: names and values.

    Args:
        info: all of ``/info``.
    """
    swift = info.get("swift", {})
    yield "Swift", str(swift.get("version", "of an unknown version"))
    yield "largest object", size_text(swift.get("max_file_size"))
    policies = [
        str(each.get("name")) + (" (default)" if each.get("default") else "")
        for each in swift.get("policies", ())
    ]
    if policies:
        yield "storage policies", ", ".join(policies)
    found = [name for section, name in _OF_SWIFT if section in info]
    if found:
        yield "it also has", ", ".join(found)


def hapi_rows(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the filter can do: names and values.

    Args:
        section: ``hapi`` of ``/info``.
    """
    yield "protocol", f"{section.get('version')}; this client's {API_VERSION}"
    limits = (
        ("largest object computed on", "max_object_bytes"),
        ("largest model package", "max_package_bytes"),
    )
    for name, key in limits:
        yield name, size_text(section.get(key))
    yield from _multi_rows(section.get("multi"))
    compressions = list(_parts(section, 1))
    yield (
        "features travel as",
        ", ".join(dtypes(section))
        + (f"; each also {', '.join(compressions)}" if compressions else ""),
    )
    yield "transforms", ", ".join(section.get("transforms", ()))
    yield "numerics", ", ".join(section.get("numerics", ()))
    yield "feature cache", cache_text(section)
    yield "profiles of packages", _is_there(section.get("profile"))
    yield "indices of shards", _is_there(section.get("index"))


def _multi_rows(multi: Any) -> Iterator[tuple[str, str]]:
    if isinstance(multi, Mapping):
        largest = size_text(multi.get("max_object_bytes"))
        yield (
            "objects of one request",
            f"up to {multi.get('max_objects')}, each of {largest} at most",
        )


def _parts(section: Mapping[str, Any], number: int) -> Sequence[str]:
    """Of the encodings' names, each once."""
    split = [each.split(";") for each in section.get("encodings", ())]
    return list(dict.fromkeys(p[number] for p in split if len(p) > number))


def _is_there(wanted: object) -> str:
    return "yes" if wanted else "no"
