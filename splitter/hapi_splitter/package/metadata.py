"""Reads metadata of a package from a few of its bytes, without torch.

Nothing here is checked against the graph; :mod:`hapi_splitter.package.reader`
does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from hapi_protocol.errors import PackageError
from hapi_splitter.package.strict_json import parse_json
from hapi_splitter.package.zip_container import LOCAL_HEADER

MAX_HEAD_BYTES = 8 << 20
MAX_TENSOR_TABLE_BYTES = 16 << 20
_HEAD_NAME = b"hapi.json"
_PREFIX_BYTES = LOCAL_HEADER.size + len(_HEAD_NAME)
_TABLE_LENGTH_BYTES = 8

ReadBytes: TypeAlias = Callable[[int, int], bytes]
"""Reads bytes of a package: from a position, a number of bytes."""
T = TypeVar("T")


@dataclass(frozen=True)
class PackageHead:
    """Unchecked metadata from ``hapi.json``.

    Attributes:
        sample_shape: of one input sample.
        output_shape: of one sample's features at the last cut.
        num_cuts: number of cuts.
        last_module: module in which the frozen region ends.
        producer: versions of the writing software by name.
    """

    sample_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    num_cuts: int
    last_module: str
    producer: dict[str, str]

    @classmethod
    def from_bytes(cls, data: bytes) -> PackageHead:
        """Parses the start of a package.

        Args:
            data: the first :func:`head_bytes` bytes of a package, or more.

        Raises:
            PackageError: it is no package, or has an unknown format.
        """
        return _build(cls._from_fields, _parse_head(data))

    @classmethod
    def _from_fields(cls, fields: Any) -> PackageHead:
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


def _parse_head(data: bytes) -> Any:
    end = head_bytes(data)
    return parse_json(data[_PREFIX_BYTES:end], "hapi.json", end)


def _build(build: Callable[[Any], T], fields: Any) -> T:
    """Calls ``build`` and turns errors of unexpected fields into refusals."""
    try:
        return build(fields)
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise _error(f"unexpected fields in hapi.json: {error!r}") from error


def head_bytes(start: bytes) -> int:
    """Returns the length of a package's head.

    Args:
        start: at least the first 39 bytes of the package.

    Raises:
        PackageError: it is no package.
    """
    length = _content_bytes(start, _HEAD_NAME)
    if length > MAX_HEAD_BYTES:
        raise _error(
            f"hapi.json has {length} bytes, more than the limit of "
            f"{MAX_HEAD_BYTES}"
        )
    return _PREFIX_BYTES + length


def _content_bytes(start: bytes, expected: bytes) -> int:
    """Returns the length of a member's content from its local header.

    Raises:
        PackageError: it is no such header, or another member's.
    """
    end = LOCAL_HEADER.size + len(expected)
    if len(start) < end or not start.startswith(b"PK\x03\x04"):
        raise _error("not a zip file")
    fields = LOCAL_HEADER.unpack_from(start)
    length, name_bytes, extra_bytes = fields[8], fields[9], fields[10]
    name = start[LOCAL_HEADER.size : end]
    if name != expected or name_bytes != len(expected) or extra_bytes:
        raise _error(f"its next member is not {expected.decode()}")
    return int(length)


def _shape(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def _error(reason: str) -> PackageError:
    return PackageError("bad_package", f"not a model package: {reason}")


@dataclass(frozen=True)
class CutRow:
    """An unchecked cut from the package's table.

    Attributes:
        index: number of the cut, from 1.
        module: name of the module in the user's model.
        shape: of one sample's features.
    """

    index: int
    module: str
    shape: tuple[int, ...]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's features in float32."""
        return 4 * math.prod(self.shape)


@dataclass(frozen=True)
class PackageDetails:
    """Unchecked metadata of a package and its weights.

    Attributes:
        head: metadata of the package.
        cuts: all cuts in order.
        transform: input transform as JSON; None for none.
        num_values: number of entries of all weights.
        weight_bytes: size of all weights.
    """

    head: PackageHead
    cuts: tuple[CutRow, ...]
    transform: Mapping[str, Any] | None
    num_values: int
    weight_bytes: int

    @classmethod
    def read(cls, read: ReadBytes, first: bytes) -> PackageDetails:
        """Reads the metadata of a package.

        Args:
            read: reads more bytes of the package.
            first: its first :func:`head_bytes` bytes, or more.

        Raises:
            PackageError: it is no package, or has an unknown format.
        """
        tensors = _read_tensor_table(read, head_bytes(first))

        def details(fields: Any) -> PackageDetails:
            # Ids of calls follow those of the weights.
            names, first_call = fields["names"], len(tensors) + 1
            return cls(
                PackageHead.from_bytes(first),
                tuple(
                    CutRow(
                        index,
                        str(names[cut["call"] - first_call]),
                        _shape(cut["shape"]),
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

        return _build(details, _parse_head(first))


def _read_tensor_table(
    read: ReadBytes, graph_offset: int
) -> Mapping[str, Any]:
    """Reads the header of the safetensors member, which follows the graph."""
    _, weights_offset = _content_span(read, graph_offset, b"graph.json")
    start, end = _content_span(read, weights_offset, b"weights.safetensors")
    size = int.from_bytes(read(start, _TABLE_LENGTH_BYTES), "little")
    if size > min(end - start, MAX_TENSOR_TABLE_BYTES):
        raise _error(f"the table of its weights has {size} bytes")
    text = read(start + _TABLE_LENGTH_BYTES, size)
    table = parse_json(text, "weights.safetensors", size)
    if not isinstance(table, dict):
        raise _error("its weights have no table")
    return table


def _content_span(
    read: ReadBytes, offset: int, name: bytes
) -> tuple[int, int]:
    """Returns the start and end of a member's content."""
    header = read(offset, LOCAL_HEADER.size + len(name))
    start = offset + len(header)
    return start, start + _content_bytes(header, name)
