"""The head of a package: what it is, from its first bytes, without torch."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hapi_protocol.errors import PackageError
from hapi_splitter.strict_json import parse_json

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
