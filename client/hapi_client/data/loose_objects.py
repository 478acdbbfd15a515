"""Index rows of loose images and arrays, each an object of its own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence

from hapi_client.data.label_texts import (
    LABEL_TABLE,
    JsonLabels,
    LabelledRow,
)
from hapi_client.data.listing import folder_of
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location
from hapi_protocol.data_index import DEFAULT_LABELS, IndexRow
from hapi_protocol.errors import ClientError, LabelError

FILE_FIELD = "file_name"
LABEL_FIELD = "label"

TextOf = Callable[[str], str | None]


def group_rows(
    objects: Sequence[ObjectInfo], text_of: TextOf
) -> list[LabelledRow]:
    """Makes the rows of a group of objects.

    Args:
        objects: the group's objects, in order.
        text_of: the text of an object's label, from its name.
    """
    rows = []
    offset = 0
    for number, each in enumerate(objects):
        length = each.length_bytes
        row = IndexRow(number, each.name, offset, length, None, etag=each.etag)
        rows.append(LabelledRow(row, text_of(each.name)))
        offset += length
    return rows


def object_labels(
    connection: Connection, location: Location, source: str | JsonLabels
) -> TextOf:
    """Makes a function from an object's name to the text of its label.

    Args:
        connection: connection to the account.
        location: the data set.
        source: ``cls`` for the first folder of the name, or the name of a
            table in the data set: CSV with a header, or JSON lines, with the
            fields ``file_name`` and ``label``; ``TABLE:FIELD`` takes
            another field than ``label``.

    Raises:
        ClientError: ``bad_configuration``: the source is none of these.
        LabelError: the table is damaged or lacks a field.
    """
    start = len(folder_of(location))
    if source == DEFAULT_LABELS:
        return lambda name: (
            name[start:].partition("/")[0] if "/" in name[start:] else None
        )
    table = isinstance(source, str) and LABEL_TABLE.fullmatch(source)
    if not table:
        raise ClientError(
            "bad_configuration",
            f"labels is {source!r}, but the samples of {location} are loose "
            "objects: 'cls' takes their folders, 'labels.csv' or "
            "'labels.jsonl' a table in the data set",
        )
    path, field = table[1], table[2] or LABEL_FIELD
    with connection.open(
        location.container, location.object_name(path)
    ) as body:
        text = body.read().decode("utf-8-sig", "replace")
    texts: dict[str, str] = {}
    for number, fields in _records(text, path):
        missing = {FILE_FIELD, field} - fields.keys()
        if missing:
            raise _damaged(
                path,
                number,
                f"has no field {sorted(missing)[0]!r}; its fields are "
                f"{', '.join(map(str, fields)):.200}",
            )
        texts[str(fields[FILE_FIELD])] = str(fields[field]).strip()
    return lambda name: texts.get(name[start:]) or None


def _records(text: str, path: str) -> Iterator[tuple[int, dict[str, object]]]:
    if path.endswith(".csv"):
        yield from enumerate(csv.DictReader(io.StringIO(text)), 2)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise _damaged(path, number, f"is no JSON: {error}") from error
            if not isinstance(fields, dict):
                raise _damaged(path, number, "is no JSON object")
            yield number, fields


def _damaged(path: str, number: int, what: str) -> LabelError:
    return LabelError("missing_label", f"{path}: line {number} {what}")
