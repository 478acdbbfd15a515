"""Builds and parses bodies of jobs over many objects."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from typing import Any

from hapi_protocol.multi_object import (
    END,
    ObjectEntry,
    entry_member,
    object_header,
    padding,
)


def framed(objects: Iterable[tuple[ObjectEntry, bytes]]) -> bytes:
    """The body that the filter sends, without bytes of failed objects."""
    parts = []
    for number, (entry, data) in enumerate(objects):
        parts.append(entry_member(entry, number))
        if entry.error is None:
            parts += [object_header(number, len(data)), data]
            parts.append(padding(len(data)))
    return b"".join(parts) + END


def good(contents: Iterable[bytes]) -> list[tuple[ObjectEntry, bytes]]:
    """Entries of objects that could all be read."""
    return [
        (ObjectEntry(n, f"dir/{n}.jpg", 200, f"etag{n}"), data)
        for n, data in enumerate(contents)
    ]


def taken_apart(body: bytes) -> list[tuple[dict[str, Any], bytes | None]]:
    """Fields of each entry, and the object's bytes or None."""
    objects: list[tuple[dict[str, Any], bytes | None]] = []
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        for info in archive:
            file = archive.extractfile(info)
            assert file is not None
            data = file.read()
            place, _, extension = info.name.partition(".")
            if extension == "json":
                objects.append((json.loads(data), None))
            else:
                objects[-1] = (objects[-1][0], data)
            assert objects[-1][0]["index"] == int(place) == len(objects) - 1
    return objects
