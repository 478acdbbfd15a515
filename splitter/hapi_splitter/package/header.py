"""Writes and reads the header of a package, a safetensors file; no torch.

A safetensors file is the length of its header in 8 bytes, little-endian, the
header, and the bytes of its tensors.  The header is a JSON object with dtype,
shape and offsets of each tensor, and texts in ``__metadata__``: here the JSON
documents ``hapi.json`` and ``graph.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from hapi_protocol.errors import PackageError, bad_package
from hapi_splitter.package.strict_json import parse_json

FORMAT = 5
"""Format of packages.  Formats 1 to 4 were zip files."""
DOCUMENTS = ("hapi.json", "graph.json")
ALIGNMENT = 64
"""Tensors are used in place, so their bytes begin at a multiple of it."""
MAX_HEADER_BYTES = 8 << 20
"""Longest header.  It has 130 to 200 bytes per call (vit_l_16: 777 calls,
105 KB; efficientnet_v2_l: 1,017 calls, 201 KB), so 20,000 nodes, the limit,
need half of it.  Parsed JSON takes up to 40 times as much memory: 320 MB."""
MAX_DIMS = 8
_METADATA = "__metadata__"
_LENGTH_BYTES = 8


class Header(NamedTuple):
    """The parsed header of a package.

    Attributes:
        hapi: document ``hapi.json``, not checked.
        graph: document ``graph.json``, not checked.
        tensors: entries of the tensors by name, not checked.
        end: position after the header, where the bytes of the tensors begin.
    """

    hapi: Any
    graph: Any
    tensors: dict[str, Any]
    end: int


def encode_header(
    documents: Mapping[str, Any], tensors: Mapping[str, Any]
) -> bytes:
    """Returns the start of a package, up to the bytes of its tensors.

    Args:
        documents: content of ``hapi.json`` and ``graph.json``.
        tensors: entry of each tensor by name.

    Raises:
        ValueError: if a number of a document is not finite.
    """
    texts = {name: _dump(content) for name, content in documents.items()}
    text = _dump({_METADATA: texts, **tensors}).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _dump(document: Any) -> str:
    # Sorted keys: equal documents give equal bytes, and so equal digests.
    return json.dumps(
        document, allow_nan=False, separators=(",", ":"), sort_keys=True
    )


def header_bytes(
    start: bytes | memoryview, max_bytes: int = MAX_HEADER_BYTES
) -> int:
    """Returns the length of a package's header with the 8 bytes before it.

    Args:
        start: at least the first 8 bytes of the package.
        max_bytes: limit of the header's length.

    Raises:
        PackageError: if it is not a package, or over the limit.
    """
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if len(start) < _LENGTH_BYTES or end % ALIGNMENT:
        raise _error("it does not begin with a header")
    if length > max_bytes:
        raise _error(
            f"its header has {length} bytes, more than the limit of "
            f"{max_bytes}"
        )
    return end


def parse_header(
    data: bytes | memoryview, max_bytes: int = MAX_HEADER_BYTES
) -> Header:
    """Parses the header of an untrusted package.

    Args:
        data: the package, or at least its first :func:`header_bytes` bytes.
        max_bytes: limit of the header's length.

    Raises:
        PackageError: if it is not a package, or over the limit.
    """
    end = header_bytes(data, max_bytes)
    if end > len(data):
        raise _error("its header is truncated")
    tensors = parse_json(bytes(data[_LENGTH_BYTES:end]), "the header")
    texts = tensors.pop(_METADATA, {}) if isinstance(tensors, dict) else {}
    is_valid = (
        isinstance(texts, dict)
        and set(texts) == set(DOCUMENTS)
        and all(isinstance(text, str) for text in texts.values())
    )
    if not is_valid:
        raise _error(f"{_METADATA} must have the texts {DOCUMENTS}")
    hapi, graph = (parse_json(texts[name], name) for name in DOCUMENTS)
    return Header(hapi, graph, tensors, end)


def are_sizes(values: Any) -> bool:
    """True for a list of integers that can be sizes or offsets."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 48 for value in values
    )


def _error(reason: str) -> PackageError:
    return bad_package(f"not a model package: {reason}")
