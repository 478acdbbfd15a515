"""The head of a package: what it is, from its first bytes, without torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from hapi_protocol.errors import PackageError
from hapi_splitter.strict_json import parse_json

MAX_HEAD_BYTES = 8 << 20
_NAME = b"hapi.json"
_LOCAL = struct.Struct("<4s5H3I2H")
_PREFIX_BYTES = _LOCAL.size + len(_NAME)


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
        end = head_bytes(data)
        fields = parse_json(data[_PREFIX_BYTES:end], "hapi.json", end)
        try:
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
        except (
            KeyError,
            IndexError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise _refused(f"hapi.json has another form: {error!r}") from error


def head_bytes(start: bytes) -> int:
    """How many bytes of a package its head takes.

    Args:
        start: of the package, at least 39 bytes.

    Raises:
        PackageError: it is no package.
    """
    if len(start) < _PREFIX_BYTES or not start.startswith(b"PK\x03\x04"):
        raise _refused("not a zip file")
    fields = _LOCAL.unpack_from(start)
    length, name_bytes, extra_bytes = fields[8], fields[9], fields[10]
    name = start[_LOCAL.size : _PREFIX_BYTES]
    if name != _NAME or name_bytes != len(_NAME) or extra_bytes:
        raise _refused(f"its first member is not {_NAME.decode()}")
    if length > MAX_HEAD_BYTES:
        raise _refused(f"hapi.json has {length} bytes")
    return _PREFIX_BYTES + int(length)


def _shape(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def _refused(why: str) -> PackageError:
    return PackageError("bad_package", f"no model package: {why}")
