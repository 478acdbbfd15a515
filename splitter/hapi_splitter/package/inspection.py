"""The head of a package: what it is, from its first bytes, without torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from hapi_protocol.errors import PackageError
from hapi_splitter.package.strict_json import parse_json

MAX_HEAD_BYTES = 8 << 20
_NAME = b"hapi.json"
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_PREFIX_BYTES = LOCAL_HEADER.size + len(_NAME)

T = TypeVar("T")


@dataclass(frozen=True)
class PackageHead:
    """What a package says of itself; nobody has checked it.

    Attributes:
        sample_shape: of one input, without the batch.
        output_shape: of the features of the last cut, likewise.
        num_cuts: that it has.
        last_module: where its frozen region ends.
        producer: versions of what wrote it, by name.
    """

    sample_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    num_cuts: int
    last_module: str
    producer: dict[str, str]

    @classmethod
    def from_bytes(cls, data: bytes) -> PackageHead:
        """
        Args:
            data: the first :func:`head_bytes` bytes of a package, or more.

        Raises:
            PackageError: it is no package, or none of a known form.
        """
        return made(cls._of, fields_of(data))

    @classmethod
    def _of(cls, fields: Any) -> PackageHead:
        cuts = [_shape(cut["shape"]) for cut in fields["cuts"]]
        return cls(
            sample_shape=_shape(fields["sample"]),
            output_shape=cuts[-1],
            num_cuts=len(cuts),
            last_module=str(fields["names"][-1]),
            producer={
                str(name): str(version)
                for name, version in fields["producer"].items()
            },
        )


def fields_of(data: bytes) -> Any:
    """The document of a head.

    Raises:
        PackageError: it is none.
    """
    end = head_bytes(data)
    return parse_json(data[_PREFIX_BYTES:end], "hapi.json", end)


def made(make: Callable[[Any], T], fields: Any) -> T:
    """What is made of such a document.

    Raises:
        PackageError: it has another form than ``make`` expects.
    """
    try:
        return make(fields)
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise refused(f"hapi.json has another form: {error!r}") from error


def head_bytes(start: bytes) -> int:
    """How many bytes of a package its head takes.

    Args:
        start: of the package, at least 39 bytes.

    Raises:
        PackageError: it is no package.
    """
    length = member_bytes(start, _NAME)
    if length > MAX_HEAD_BYTES:
        raise refused(f"hapi.json has {length} bytes")
    return _PREFIX_BYTES + length


def member_bytes(start: bytes, wanted: bytes) -> int:
    """Of the content behind a member's local header.

    Raises:
        PackageError: it is no such header, or another member's.
    """
    end = LOCAL_HEADER.size + len(wanted)
    if len(start) < end or not start.startswith(b"PK\x03\x04"):
        raise refused("not a zip file")
    fields = LOCAL_HEADER.unpack_from(start)
    length, name_bytes, extra_bytes = fields[8], fields[9], fields[10]
    name = start[LOCAL_HEADER.size : end]
    if name != wanted or name_bytes != len(wanted) or extra_bytes:
        raise refused(f"a member is not {wanted.decode()}")
    return int(length)


def _shape(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def refused(why: str) -> PackageError:
    """That there is no package."""
    return PackageError("bad_package", f"no model package: {why}")


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
