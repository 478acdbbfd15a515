"""Encodings of features on the wire: names and sizes.

An encoding is a number format and a lossless compression of the Arrow
buffers.  Its text form is ``dtype`` or ``dtype;compression``, for instance
``float16`` or ``uint8;zstd``.  The conversion itself is in
``hapi_splitter.encodings``; this module imports neither torch nor NumPy, so
that the filter can use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hapi_protocol.errors import AnnotationError

WIRE_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "float32": "float32",
        "float16": "float16",
        # Arrow has no bfloat16: its bits are sent as integers.
        "bfloat16": "uint16",
        "uint8": "uint8",
    }
)
"""NumPy's name of the wire type of each dtype.

A new dtype also needs: ``_VALUE_BYTES`` and ``_PRECISION_DTYPES`` here,
conversion and error bound in ``hapi_splitter.encodings``, the largest
reduction in ``hapi_splitter.planner.costs``, the help of ``--encoding`` in
``hapi_client.cli.options``, and a row in ``docs/reference/protocol.rst``.
"""

DTYPES = tuple(WIRE_DTYPES)
COMPRESSIONS = ("none", "lz4", "zstd")

MIN_CHANNEL_VALUES = 32
"""Minimum values of a channel with its own scale and zero.  Smaller channels
share one pair per sample: 8 bytes each would add over 25 % to their values."""

_VALUE_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
)


@dataclass(frozen=True)
class Encoding:
    """A number format and a compression.

    ``str()`` gives the canonical text, without ``;none``.

    Attributes:
        dtype: one of :data:`DTYPES`.
        compression: one of :data:`COMPRESSIONS`.

    Raises:
        AnnotationError: ``unknown_encoding``, names what is allowed.
    """

    dtype: str
    compression: str = "none"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.compression not in COMPRESSIONS:
            raise _unknown(f"{self.dtype};{self.compression}")

    def __str__(self) -> str:
        if self.compression == "none":
            return self.dtype
        return f"{self.dtype};{self.compression}"

    @classmethod
    def parse(cls, text: str, *, what: str = "encoding") -> Encoding:
        """Parses the text of an encoding.

        Args:
            text: ``dtype`` or ``dtype;compression``; ``dtype;none`` is
                ``dtype``.
            what: name of the value in the error.

        Raises:
            AnnotationError: ``unknown_encoding``, names what is allowed.
        """
        dtype, separator, compression = text.partition(";")
        if not separator:
            compression = "none"
        if dtype not in DTYPES or compression not in COMPRESSIONS:
            raise _unknown(text, what)
        return cls(dtype, compression)

    @property
    def wire_dtype(self) -> str:
        """NumPy's name of the values' type on the wire."""
        return WIRE_DTYPES[self.dtype]

    @property
    def value_bytes(self) -> int:
        """Bytes of one value on the wire, uncompressed."""
        return _VALUE_BYTES[self.dtype]

    @property
    def is_quantised(self) -> bool:
        """True if each group of values has a scale and a zero."""
        return self.dtype == "uint8"

    def sample_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of one sample's features on the wire, uncompressed.

        Args:
            shape: shape of the sample, without the batch dimension.
        """
        values = self.value_bytes * math.prod(shape)
        return values + 8 * num_groups(shape) * self.is_quantised


ENCODINGS: tuple[str, ...] = tuple(
    str(Encoding(dtype, compression))
    for compression in COMPRESSIONS
    for dtype in DTYPES
)
"""All canonical texts, the default first."""

PRECISIONS = ("lossless", "half", "uint8")
"""Lowest precisions on the wire, from exact to coarse."""

_PRECISION_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "lossless": ("float32",),
        "half": ("float32", "float16", "bfloat16"),
        "uint8": DTYPES,
    }
)


def allowed_encodings(
    min_precision: str, dtype: str = "float32"
) -> tuple[str, ...]:
    """The canonical texts of the encodings of a lowest precision.

    Args:
        min_precision: one of :data:`PRECISIONS`: ``lossless`` allows
            float32, ``half`` the two 16-bit formats as well, ``uint8`` all.
        dtype: dtype of the features, which is allowed since it loses nothing,
            and comes first.

    Raises:
        ValueError: another precision.
    """
    if min_precision not in _PRECISION_DTYPES:
        raise ValueError(
            f"min_precision is {min_precision!r}; allowed: "
            f"{', '.join(PRECISIONS)}"
        )
    dtypes = {dtype, *_PRECISION_DTYPES[min_precision]}
    texts = [
        name for name in ENCODINGS if Encoding.parse(name).dtype in dtypes
    ]
    return tuple(sorted(texts, key=lambda text: text != dtype))


def num_groups(shape: Sequence[int]) -> int:
    """Number of groups of one sample's values that share a scale and a zero.

    The groups are equal runs of the sample's values in row-major order: one
    per channel (dimension 0 of a shape with two dimensions or more) if a
    channel has :data:`MIN_CHANNEL_VALUES` values or more, else one.

    Args:
        shape: shape of the sample, without the batch dimension.
    """
    if len(shape) < 2 or shape[0] == 0:
        return 1
    return shape[0] if math.prod(shape[1:]) >= MIN_CHANNEL_VALUES else 1


def _unknown(text: str, what: str = "encoding") -> AnnotationError:
    return AnnotationError(
        "unknown_encoding",
        f"{what} is {text!r:.80}; allowed: {', '.join(ENCODINGS)}",
        details={"value": text[:80], "allowed": list(ENCODINGS)},
    )
