"""Labels of samples: from the index to the integers of the loss."""

from __future__ import annotations

import operator
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hapi_client.data.label_texts import JsonLabels, check_label_source
from hapi_client.option_checks import check_types
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import LabelError

Labels: TypeAlias = (
    Mapping[str, int] | Callable[[str], int] | JsonLabels | str | None
)
"""A user's labels: a mapping from class name or key to integer, a function
of the key, ``"json:FIELD"`` or :class:`JsonLabels` for what ``.json`` members
state, None for the integers of the index, or :data:`OPTIONAL` for those if
present."""

OPTIONAL = "optional"
UNLABELLED = -1
"""Label of samples without one."""


def span_labels(
    spans: Sequence[Span], labels: Labels, class_names: Sequence[str] = ()
) -> list[npt.NDArray[np.int64]]:
    """Returns the labels of each span's samples, ``[samples]`` int64.

    Args:
        spans: spans of the data set.
        labels: the user's :data:`Labels`.
        class_names: names of the index's integers, if it has any.

    Raises:
        LabelError: ``missing_label`` naming the first shard and key
            without a label, or with a label without a name in the index.
    """
    return [
        np.array(
            [_label(span, row, labels, class_names) for row in span.rows],
            np.int64,
        )
        for span in spans
    ]


def read_source(labels: Labels) -> str | JsonLabels | None:
    """The part of a shard that states labels; None if it is not given.

    Raises:
        ClientError: ``bad_configuration`` for an unknown string, or another
            type.
    """
    if isinstance(labels, JsonLabels):
        return labels
    if isinstance(labels, Mapping):
        for key in labels:
            check_types({"key of labels": (str,)}, {"key of labels": key})
    elif not callable(labels):
        kinds = (str, Mapping, FunctionType, type(None))
        check_types({"labels": kinds}, {"labels": labels})
    if isinstance(labels, str) and labels != OPTIONAL:
        check_label_source(labels, f"{OPTIONAL!r} takes labels if present")
        return labels
    return None


def uses_index_labels(labels: Labels) -> bool:
    """True if the labels are the integers of the index."""
    return labels is None or isinstance(labels, str | JsonLabels)


def has_labels(labels: Sequence[npt.NDArray[np.int64]]) -> bool:
    """True if any sample of these spans has a label."""
    return any((numbers != UNLABELLED).any() for numbers in labels)


def renumber_labels(
    labels: Sequence[npt.NDArray[np.int64]],
    names: Sequence[str],
    wanted: Sequence[str],
    where: str,
) -> list[npt.NDArray[np.int64]]:
    """Converts labels to the class numbers of another index.

    Args:
        labels: labels of each span.
        names: class names of these labels; empty if they have none.
        wanted: class names of the other index; empty if it has none.
        where: data set of the labels, for errors.

    Raises:
        LabelError: ``missing_label`` for a class that the other index does
            not have, or if only one of the two has names.
    """
    if list(names) == list(wanted):
        return list(labels)
    numbers = {name: number for number, name in enumerate(wanted)}
    missing = sorted(set(names) - set(numbers))
    if missing or not names:
        raise LabelError(
            "missing_label",
            f"the classes of {where} differ from those of the data before "
            "it: "
            + (
                f"it has {missing[0]!r}{_other_form(missing[0], wanted)}"
                if missing
                else "its labels are integers without names"
            )
            + "; give labels= (--labels)",
        )
    # UNLABELLED is -1 and selects the last element.
    table = np.array(
        [*(numbers[name] for name in names), UNLABELLED], np.int64
    )
    return [table[numbers] for numbers in labels]


def _other_form(name: str, names: Iterable[str]) -> str:
    """Names one that looks the same in another Unicode form, if any."""
    normal = unicodedata.normalize("NFC", name)
    for other in names:
        if other != name and unicodedata.normalize("NFC", other) == normal:
            return (
                f", in another Unicode form ({name!a}) than {other!r} "
                f"({other!a})"
            )
    return ""


def _label(
    span: Span, row: IndexRow, labels: Labels, class_names: Sequence[str]
) -> int:
    if labels == OPTIONAL and row.label is None:
        return UNLABELLED
    if labels == OPTIONAL and row.label == UNLABELLED:
        raise _missing(
            span,
            row,
            f"has the label {UNLABELLED}, which stands for no label where "
            "labels are optional; remove its label, or give it another one",
        )
    if uses_index_labels(labels):
        if row.label is None:
            raise _missing(span, row, "has no label; give labels= (--labels)")
        if class_names and not 0 <= row.label < len(class_names):
            raise _missing(
                span,
                row,
                f"has the label {row.label}, but its index has names for 0 "
                f"to {len(class_names) - 1}; repair its .cls member and "
                "index it again, or give labels= (--labels)",
            )
        return row.label
    if callable(labels):
        return _to_integer(span, row, labels(row.key))
    assert isinstance(labels, Mapping), "checked with the index"
    if row.key in labels:
        return _to_integer(span, row, labels[row.key])
    name = _class_name(row.label, class_names)
    if name not in labels:
        raise _missing(
            span,
            row,
            f"has neither its key nor its class {name!r} in labels="
            f"{_other_form(name, labels)}",
        )
    return _to_integer(span, row, labels[name])


def _to_integer(span: Span, row: IndexRow, label: object) -> int:
    if isinstance(label, float) and label.is_integer():
        return int(label)  # a column of pandas with gaps
    try:
        return operator.index(label)  # type: ignore[arg-type]
    except TypeError:
        why = f"has the label {label!r} by labels=; give integers"
        raise _missing(span, row, why) from None


def _class_name(label: int | None, class_names: Sequence[str]) -> str:
    if label is None or not 0 <= label < len(class_names):
        return "" if label is None else str(label)
    return class_names[label]


def _missing(span: Span, row: IndexRow, why: str) -> LabelError:
    return LabelError(
        "missing_label",
        f"sample {row.key!r} of shard {span.shard} {why}",
        object_name=span.shard,
        details={"key": row.key},
    )
