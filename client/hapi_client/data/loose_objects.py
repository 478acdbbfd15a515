"""Index rows of loose images and arrays, each an object of its own."""

from __future__ import annotations

import csv
import io
import json
import posixpath
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
    for number, info in enumerate(objects):
        length = info.length_bytes
        row = IndexRow(number, info.name, offset, length, None, etag=info.etag)
        rows.append(LabelledRow(row, text_of(info.name)))
        offset += length
    return rows


def object_labels(
    connection: Connection,
    location: Location,
    source: str | JsonLabels,
    names: Sequence[str],
) -> tuple[TextOf, str]:
    """Makes a function from an object's name to the text of its label.

    Rows of a table state a file's path in the data set, also as ``./a/b.jpg``,
    ``/a/b.jpg`` or ``a\\b.jpg``, or only its base name if no two files have
    it.

    Args:
        connection: connection to the account.
        location: the data set.
        names: names of all objects of the data set.
        source: ``cls`` for the first folder of the name, or the name of a
            table in the data set: CSV with a header, or JSON lines, with the
            fields ``file_name`` and ``label``; ``TABLE:FIELD`` takes
            another field than ``label``.

    Returns:
        The function, and how many rows of the table match.

    Raises:
        ClientError: ``bad_configuration``: the source is none of these.
        LabelError: the table is damaged or lacks a field, no row matches, or
            two rows give one file different labels.
    """
    start = len(folder_of(location))
    if source == DEFAULT_LABELS:
        return (
            lambda name: (
                name[start:].partition("/")[0] if "/" in name[start:] else None
            ),
            "",
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
        text = body.read().decode("utf-8-sig", "backslashreplace")
    files = _Files([name[start:] for name in names])
    texts: dict[str, str] = {}
    unknown: list[str] = []
    for number, fields in _records(text, path):
        missing = {FILE_FIELD, field} - fields.keys()
        if missing:
            raise _damaged(
                path,
                number,
                f"has no field {sorted(missing)[0]!r}; its fields are "
                f"{', '.join(map(str, fields)):.200}",
            )
        label = fields[field]
        if isinstance(label, bool) or not isinstance(label, int | str):
            raise _damaged(
                path,
                number,
                f"has the label {label!r:.80}; integers and texts are allowed",
            )
        stated = str(fields[FILE_FIELD])
        file = files.find(stated)
        if file is None:
            unknown.append(f"{stated!r:.80} (line {number})")
        elif texts.setdefault(file, str(label).strip()) != str(label).strip():
            raise _damaged(
                path,
                number,
                f"gives {stated!r:.80} the label {label!r:.80}, and an "
                f"earlier line {texts[file]!r:.80}",
            )
    if not texts:
        example = f", such as {unknown[0]}" if unknown else ""
        raise LabelError(
            "missing_label",
            f"{path}: none of its {len(unknown)} rows{example} states one of "
            f"the {len(names)} files of {location}, such as "
            f"{names[0][start:]!r}; {FILE_FIELD} is a path in the data set",
        )
    note = f"{path}: {len(texts)} of {len(names)} files have a label"
    if unknown:
        note += (
            f"; {len(unknown)} rows state no file of the data set, or one of "
            f"several with this base name, such as {unknown[0]}"
        )
    return lambda name: texts.get(name[start:]) or None, note


class _Files:
    """Finds files as tables state them.

    Args:
        paths: paths of all files, in the data set.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = frozenset(paths)
        self._by_base: dict[str, str | None] = {}
        for path in paths:
            base = path.rpartition("/")[2]
            # None if several files have it.
            self._by_base[base] = None if base in self._by_base else path

    def find(self, stated: str) -> str | None:
        """Returns the path of a file; None without one, or of several."""
        other = stated.replace("\\", "/")
        for path in (stated, other, posixpath.normpath(other).lstrip("/")):
            if path in self._paths:
                return path
        return None if "/" in other else self._by_base.get(other)


def _records(text: str, path: str) -> Iterator[tuple[int, dict[str, object]]]:
    if path.endswith(".csv"):
        reader = csv.DictReader(io.StringIO(text, newline=None))
        try:
            names = reader.fieldnames or ()
            if twice := [name for name in names if names.count(name) > 1]:
                raise _damaged(
                    path, 1, f"has the field {twice[0]!r:.80} twice"
                )
            for separator, name in ((";", "semicolons"), ("\t", "tabs")):
                if len(names) == 1 and separator in names[0]:
                    raise _damaged(
                        path, 1, f"has {name} between its fields, not commas"
                    )
            for fields in reader:
                # Fields that a short row lacks are None.
                yield (
                    reader.line_num,
                    {
                        name: "" if value is None else value
                        for name, value in fields.items()
                        if name is not None
                    },
                )
        except csv.Error as error:
            raise _damaged(path, reader.line_num + 1, str(error)) from error
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                fields = json.loads(line, object_pairs_hook=_unique)
            except (ValueError, RecursionError) as error:
                raise _damaged(path, number, f"is no JSON: {error}") from error
            if not isinstance(fields, dict):
                raise _damaged(path, number, "is no JSON object")
            yield number, fields


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field stands twice in one object")
    return fields


def _damaged(path: str, number: int, what: str) -> LabelError:
    return LabelError("missing_label", f"{path}: line {number} {what}")
