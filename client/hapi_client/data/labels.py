"""Labels of samples: from the index to the integers of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.errors import ClientError, LabelError

Labels: TypeAlias = Mapping[str, int] | Callable[[str], int] | str | None
"""A user's labels: a mapping from class name or key to integer, a function
of the key, None for the integers of the index, or :data:`OPTIONAL` for those
if present."""

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
        ClientError: ``bad_configuration`` for a string that is not
            :data:`OPTIONAL`.
    """
    if isinstance(labels, str) and labels != OPTIONAL:
        raise ClientError(
            "bad_configuration",
            f"labels is {labels!r}; the only string allowed is {OPTIONAL!r}",
        )
    return [
        np.array(
            [_label(span, row, labels, class_names) for row in span.rows],
            np.int64,
        )
        for span in spans
    ]


def uses_index_labels(labels: Labels) -> bool:
    """True if the labels are the integers of the index."""
    return labels is None or labels == OPTIONAL


def has_labels(labels: Sequence[npt.NDArray[np.int64]]) -> bool:
    """True if any sample of these spans has a label."""
    return any((each != UNLABELLED).any() for each in labels)


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
                f"it has {missing[0]!r}"
                if missing
                else "its labels are integers without names"
            )
            + "; give labels=",
        )
    # UNLABELLED is -1 and selects the last element.
    table = np.array(
        [*(numbers[name] for name in names), UNLABELLED], np.int64
    )
    return [table[each] for each in labels]


def _label(
    span: Span, row: IndexRow, labels: Labels, class_names: Sequence[str]
) -> int:
    if labels == OPTIONAL and row.label is None:
        return UNLABELLED
    if labels is None or isinstance(labels, str):
        if row.label is None:
            raise _missing(
                span, row, "has no integer .cls member; give labels="
            )
        if class_names and not 0 <= row.label < len(class_names):
            raise _missing(
                span,
                row,
                f"has the label {row.label}, but its index has names for 0 "
                f"to {len(class_names) - 1}; repair its .cls member and "
                "index it again, or give labels=",
            )
        return row.label
    if not isinstance(labels, Mapping):
        return int(labels(row.key))
    if row.key in labels:
        return int(labels[row.key])
    name = _class_name(row.label, class_names)
    if name not in labels:
        raise _missing(
            span,
            row,
            f"has neither its key nor its class {name!r} in labels=",
        )
    return int(labels[name])


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
