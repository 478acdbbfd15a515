"""What is in a package: its cuts and weights, from a few of its bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from hapi_splitter.package_head import (
    LOCAL_HEADER,
    PackageHead,
    fields_of,
    head_bytes,
    made,
    member_bytes,
    refused,
)
from hapi_splitter.strict_json import parse_json

MAX_TABLE_BYTES = 16 << 20
"""Of the weights' table of contents."""

_LENGTH_BYTES = 8

Read: TypeAlias = Callable[[int, int], bytes]
"""Bytes of a package: from where on, and how many."""


@dataclass(frozen=True)
class CutRow:
    """A cut, as the package states it.

    Attributes:
        index: from 1 on.
        module: where in the user's model it is.
        shape: of one sample's features there.
    """

    index: int
    module: str
    shape: tuple[int, ...]

    @property
    def sample_bytes(self) -> int:
        """Of float32 features."""
        return 4 * math.prod(self.shape)


@dataclass(frozen=True)
class PackageDetails:
    """What stands in a package beside its graph; nobody has checked it.

    Attributes:
        head: what it says of itself.
        cuts: that it has.
        transform: of images, as JSON; None where there is none.
        num_values: of its weights.
        weight_bytes: of all of them.
    """

    head: PackageHead
    cuts: tuple[CutRow, ...]
    transform: Mapping[str, Any] | None
    num_values: int
    weight_bytes: int

    @classmethod
    def read(cls, read: Read, first: bytes) -> PackageDetails:
        """
        Args:
            read: reads more of it.
            first: its first :func:`head_bytes` bytes, or more.

        Raises:
            PackageError: it is no package, or none of a known form.
        """
        tensors = _table_of_weights(read, head_bytes(first))

        def details(fields: Any) -> PackageDetails:
            # Calls are numbered behind the weights.
            names, before = fields["names"], len(tensors) + 1
            return cls(
                PackageHead.from_bytes(first),
                tuple(
                    CutRow(
                        index,
                        str(names[cut["call"] - before]),
                        tuple(map(int, cut["shape"])),
                    )
                    for index, cut in enumerate(fields["cuts"], 1)
                ),
                fields["transform"],
                sum(math.prod(each["shape"]) for each in tensors.values()),
                sum(
                    end - start
                    for each in tensors.values()
                    for start, end in [each["data_offsets"]]
                ),
            )

        return made(details, fields_of(first))


def _table_of_weights(read: Read, graph: int) -> Mapping[str, Any]:
    """
    Args:
        read: reads bytes.
        graph: where the member before the weights begins.
    """
    _, weights = _member(read, graph, b"graph.json")
    start, end = _member(read, weights, b"weights.safetensors")
    size = int.from_bytes(read(start, _LENGTH_BYTES), "little")
    if size > min(end - start, MAX_TABLE_BYTES):
        raise refused(f"its weights' table has {size} bytes")
    text = read(start + _LENGTH_BYTES, size)
    found = parse_json(text, "weights.safetensors", size)
    if not isinstance(found, dict):
        raise refused("its weights have no table")
    return found


def _member(read: Read, position: int, name: bytes) -> tuple[int, int]:
    """Where its content begins and ends."""
    header = read(position, LOCAL_HEADER.size + len(name))
    start = position + len(header)
    return start, start + member_bytes(header, name)
