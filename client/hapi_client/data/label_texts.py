"""From what shards say about a sample's class to the index's integers.

A label's *text* is the sample's ``.cls`` member, or else the field ``cls`` of
its ``.json`` member; ``json:FIELD`` takes another field.  If all texts of a
data set are plain decimal integers, they are the labels.  Else all are names
of classes, numbered in sorted order.  Loose objects have folders or a table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hapi_protocol.data_index import (
    DEFAULT_LABELS,
    DataIndex,
    IndexRow,
    ShardIndex,
)
from hapi_protocol.errors import ClientError, LabelError
from hapi_protocol.samples import MAX_TEXT_BYTES, plain_integer

JSON_PREFIX = "json:"
LABEL_TABLE = re.compile(r"([^:]+\.(?:csv|jsonl))(?::(.+))?")
"""A table of labels of loose objects, and the field to take."""
_JSON_FIELD = re.compile(r"json:[^.]+(\.[^.]+)*")


@dataclass(frozen=True)
class JsonLabels:
    """Labels that a function makes of each sample's ``.json`` member.

    Args:
        function: from the parsed JSON to an integer, a name, or None for no
            label.
    """

    function: Callable[[Any], int | str | None]


@dataclass(frozen=True)
class LabelledRow:
    """An index row, and the text of its label.

    Attributes:
        row: the row; its label is set later.
        text: text of the label; None without one.
        problem: why there is none, if that is known.
    """

    row: IndexRow
    text: str | None = None
    problem: str = ""


def check_label_source(source: str, more: str = "") -> None:
    """Refuses a source of labels that is none.

    Args:
        source: the user's value.
        more: what is allowed as well, for the message.

    Raises:
        ClientError: ``bad_configuration`` naming what is allowed.
    """
    if source != DEFAULT_LABELS and not (
        _JSON_FIELD.fullmatch(source) or LABEL_TABLE.fullmatch(source)
    ):
        raise ClientError(
            "bad_configuration",
            f"labels is {source!r}; 'cls' takes .cls members, 'json:FIELD' a "
            "field of .json members, where dots go deeper, as in "
            "'json:annotation.class', and 'labels.csv' or 'labels.jsonl' a "
            f"table of loose objects{more and f'; {more}'}",
        )


def check_member_labels(source: str | JsonLabels) -> None:
    """Refuses a table for shards, whose members state the labels.

    Raises:
        ClientError: ``bad_configuration``.
    """
    if isinstance(source, str) and LABEL_TABLE.fullmatch(source):
        raise ClientError(
            "bad_configuration",
            f"labels is {source!r}, but only loose objects take labels from a "
            "table; 'cls' or 'json:FIELD' takes those of a shard's members",
        )


def label_text(
    source: str | JsonLabels, cls: str | None, meta: str | None, where: str
) -> tuple[str | None, str]:
    """The text of a sample's label, or None and why it has none.

    Args:
        source: ``cls``, ``json:FIELD``, or a function of the JSON.
        cls: text of the sample's ``.cls`` member, if it has one.
        meta: text of its ``.json`` member, if it has one.
        where: shard and key, for errors.

    Raises:
        LabelError: ``missing_label``: the JSON is damaged, or the value is
            neither an integer nor a text.
    """
    is_default = source == DEFAULT_LABELS
    if is_default and cls is not None:
        text = cls.strip()
        return text or None, "" if text else "has an empty .cls member"
    if meta is None:
        members = ".cls or .json" if is_default else ".json"
        size = f"{MAX_TEXT_BYTES // 1024} kB"
        return None, f"has no {members} member of at most {size}"
    try:
        value = json.loads(meta)
    except (ValueError, RecursionError) as error:
        problem = f"has a damaged .json member: {error}"
        if is_default:
            return None, problem
        raise _error(where, problem) from error
    problem = "has the label None"
    if isinstance(source, JsonLabels):
        value = source.function(value)
    else:
        path = source.removeprefix(JSON_PREFIX)
        problem = f"has no field {path!r} in its .json member{_fields(value)}"
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        return None, problem
    if isinstance(value, bool) or not isinstance(value, int | str):
        kind = type(value).__name__
        problem = f"has the label {value!r:.80} ({kind}) in its .json member"
        if is_default:
            return None, f"{problem}; integers and texts are labels"
        raise _error(where, f"{problem}; integers and texts are allowed")
    text = str(value).strip()
    problem = "has an empty label in its .json member"
    return text or None, "" if text else problem


def _fields(value: Any) -> str:
    if not isinstance(value, dict):
        return f", which is a {type(value).__name__}"
    return f", whose fields are {', '.join(map(str, value)):.200}"


def unlabelled_note(
    shards: Mapping[str, Sequence[LabelledRow]], source: str
) -> str | None:
    """Tells how many samples have no label and why; None if all have one."""
    count = sum(map(len, shards.values()))
    without = [
        (name, row)
        for name, rows in shards.items()
        for row in rows
        if row.text is None
    ]
    if not without:
        return None
    shard, first = without[0]
    many = (
        "no sample has a label"
        if len(without) == count
        else f"{len(without)} of {count} samples have no label"
    )
    why = f" {first.problem}" if first.problem else ""
    remedy = (
        "name another field, as in --labels json:annotation.class, or give "
        "labels= to the job"
        if source == DEFAULT_LABELS or source.startswith(JSON_PREFIX)
        else "give labels= to the job"
    )
    return f"{many}: {first.row.key!r} of {shard}{why}; {remedy}"


def _error(where: str, what: str) -> LabelError:
    return LabelError("missing_label", f"sample {where} {what}")


def labelled_rows(index: DataIndex) -> dict[str, list[LabelledRow]]:
    """The rows of an index with the texts of their labels, by shard."""
    names = index.class_names if index.labels_are_names else ()
    return {
        shard.name: [
            LabelledRow(row, _text_of(row.label, names)) for row in shard.rows
        ]
        for shard in index.shards
    }


def _text_of(label: int | None, names: Sequence[str]) -> str | None:
    if label is None:
        return None
    return names[label] if 0 <= label < len(names) else str(label)


def number_labels(
    shards: Mapping[str, Sequence[LabelledRow]],
    etags: Mapping[str, str],
    *,
    old: DataIndex,
    source: str = DEFAULT_LABELS,
) -> DataIndex:
    """Makes the index of a data set.

    Args:
        shards: all its rows, by shard.
        etags: ETag of each shard.
        old: an earlier index: its classes keep their numbers.
        source: where the texts come from, which the index states.
    """
    rows = [row for shard in shards.values() for row in shard]
    texts = {row.text for row in rows if row.text is not None}
    known = list(old.class_names)
    are_names = any(plain_integer(text) is None for text in texts)
    if are_names and not old.labels_are_names:
        # Until now texts were positions in the names, or had none.
        positions = dict(zip(map(str, range(len(known))), known, strict=True))
        shards = {
            name: [
                replace(row, text=positions.get(row.text or "", row.text))
                for row in shard
            ]
            for name, shard in shards.items()
        }
        texts = {positions.get(text, text) for text in texts}
    numbers: Mapping[str, int | None]
    if are_names:
        known += sorted(texts - {*known})
        numbers = {name: number for number, name in enumerate(known)}
    else:
        numbers = {text: plain_integer(text) for text in texts}
        known = [] if old.labels_are_names else known
    return DataIndex(
        tuple(
            ShardIndex(
                name,
                etags[name],
                tuple(_numbered(shards[name], numbers)),
            )
            for name in sorted(shards)
        ),
        tuple(known),
        labels=source,
        labels_are_names=are_names,
    )


def _numbered(
    rows: Iterable[LabelledRow], numbers: Mapping[str, int | None]
) -> Iterable[IndexRow]:
    for labelled in rows:
        label = None if labelled.text is None else numbers[labelled.text]
        yield replace(labelled.row, label=label)
