"""Reads metadata of a package from its header, without torch.

Nothing here is checked against the graph; :mod:`hapi_splitter.package.reader`
does that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hapi_protocol.errors import bad_package
from hapi_splitter.package.header import (
    MAX_DIMS,
    Header,
    are_sizes,
    parse_header,
)


@dataclass(frozen=True)
class CutRow:
    """An unchecked cut from the package's table.

    Attributes:
        index: number of the cut, from 1.
        module: name of the module in the user's model.
        shape: shape of one sample's features.
    """

    index: int
    module: str
    shape: tuple[int, ...]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's features in float32."""
        return 4 * math.prod(self.shape)


@dataclass(frozen=True)
class PackageMetadata:
    """Unchecked metadata of a package and its weights.

    Attributes:
        sample_shape: shape of one input sample.
        cuts: all cuts in order, at least one.
        transform: input transform as JSON; None for none.
        producer: versions of the writing software by name.
        num_values: number of entries of all weights.
        weight_bytes: size of all weights.
    """

    sample_shape: tuple[int, ...]
    cuts: tuple[CutRow, ...]
    transform: Mapping[str, Any] | None
    producer: dict[str, str]
    num_values: int
    weight_bytes: int

    @classmethod
    def from_bytes(cls, data: bytes) -> PackageMetadata:
        """Parses the start of a package.

        Args:
            data: the first :func:`~hapi_splitter.package.header.header_bytes`
                bytes of a package, or more.

        Raises:
            PackageError: if it is not a package, or lacks a field.
        """
        header = parse_header(data)
        try:
            return cls._from_header(header)
        except (
            *(KeyError, IndexError, AttributeError),
            *(TypeError, ValueError, OverflowError),
        ) as error:
            raise bad_package(
                f"not a model package: unexpected fields: {error!r:.200}"
            ) from error

    @classmethod
    def _from_header(cls, header: Header) -> PackageMetadata:
        fields, tensors = header.hapi, header.tensors.values()
        # Ids of calls follow those of the weights.
        names, first_call = fields["names"], len(tensors) + 1
        cuts = tuple(
            CutRow(
                index,
                str(names[cut["call"] - first_call]),
                _shape(cut["shape"]),
            )
            for index, cut in enumerate(fields["cuts"], 1)
        )
        if not cuts:
            raise ValueError("no cuts")
        return cls(
            sample_shape=_shape(fields["sample"]),
            cuts=cuts,
            transform=fields["transform"],
            producer={
                str(name): str(version)
                for name, version in fields["producer"].items()
            },
            num_values=sum(
                math.prod(_shape(entry["shape"])) for entry in tensors
            ),
            weight_bytes=sum(
                end - start
                for entry in tensors
                for start, end in [entry["data_offsets"]]
            ),
        )


def _shape(sizes: Any) -> tuple[int, ...]:
    if not are_sizes(sizes) or len(sizes) > MAX_DIMS:
        raise ValueError(f"the invalid shape {sizes!r:.80}")
    return tuple(sizes)
