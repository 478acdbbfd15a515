"""From what an index says of a sample to the integer the loss needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hapi_protocol.errors import LabelError
from hapi_protocol.index import IndexRow, Span

Labels: TypeAlias = Mapping[str, int] | Callable[[str], int] | None
"""What a user may give: class name or key to integer; a function of the
key; None for the integers of the index."""


def span_labels(
    spans: Sequence[Span], labels: Labels, class_names: Sequence[str] = ()
) -> list[npt.NDArray[np.int64]]:
    """The labels of each span's samples, ``[samples]`` int64.

    Args:
        spans: of the data set.
        labels: see :data:`Labels`.
        class_names: of the index's integers, if it knows them.

    Raises:
        LabelError: ``missing_label`` naming the first shard and key
            without a label.
    """
    return [
        np.array(
            [_label(span, row, labels, class_names) for row in span.rows],
            np.int64,
        )
        for span in spans
    ]


def _label(
    span: Span, row: IndexRow, labels: Labels, class_names: Sequence[str]
) -> int:
    if labels is None:
        if row.label is None:
            raise _missing(
                span, row, "has no integer .cls member; give labels="
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
            f"is in labels= neither by its key nor by its class {name!r}",
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
