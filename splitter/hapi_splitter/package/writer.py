"""Writes model packages and computes their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hapi_splitter.cuts import Cut, FrozenGraph
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.sample_format import InputTransform
from hapi_splitter.package import zip_container as container
from hapi_splitter.package.weights import write_weights

FORMAT = 1
FORMAT_OF_ARRAYS = 2
"""Of packages whose input is arrays.  What is older refuses them by this
number, and reads all others."""


def format_of(transform: InputTransform | None) -> int:
    is_array = isinstance(transform, ArrayTransform)
    return FORMAT_OF_ARRAYS if is_array else FORMAT


_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PackageInfo:
    """A package that has been written.

    Args:
        digest: sha256 of its bytes, hexadecimal.
        length_bytes: of the file.
        path: where it is.
    """

    digest: str
    length_bytes: int
    path: Path


def write_package(frozen: FrozenGraph, path: Path | str) -> PackageInfo:
    """Writes a frozen region; ``frozen.digest`` is its name from then on.

    Raises:
        PackageError: when it passes 4 GiB.
        ValueError: of a fast region.
        OSError: as opening and writing the file do.
    """
    path = Path(path)
    digest, length = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in package_pieces(frozen):
            file.write(piece)
            digest.update(piece)
            length += len(piece)
    return PackageInfo(digest.hexdigest(), length, path)


def package_bytes(frozen: FrozenGraph) -> bytes:
    """What :func:`write_package` would write."""
    return b"".join(package_pieces(frozen))


def digest_of(frozen: FrozenGraph) -> str:
    """The sha256 that :func:`write_package` would give the package."""
    digest = hashlib.sha256()
    for piece in package_pieces(frozen):
        digest.update(piece)
    return digest.hexdigest()


def package_pieces(frozen: FrozenGraph) -> Iterator[bytes]:
    """The bytes of a package, in pieces.

    Raises:
        ValueError: of a fast region.
    """
    if frozen.is_fast:
        raise ValueError(
            "a package cannot be written from a fast region; write it from "
            "the one that this was made from"
        )
    hapi = _dump(
        {
            "format": format_of(frozen.transform),
            "sample": list(frozen.input_shape),
            "transform": frozen.transform and frozen.transform.to_json(),
            "names": list(frozen.names),
            "cuts": [cut_row(cut) for cut in frozen.cuts],
            "producer": {
                name: metadata.version(name)
                for name in ("torch", "torchvision")
            },
        }
    )
    graph = _dump(frozen.program.to_json())
    lengths = {"hapi.json": len(hapi), "graph.json": len(graph)}
    offset = container.data_offset(lengths, "weights.safetensors")
    # White space up to an aligned start: weights are used where they lie.
    graph += b" " * (-offset % _ALIGNMENT)
    return container.pack(
        {
            "hapi.json": hapi,
            "graph.json": graph,
            "weights.safetensors": write_weights(frozen.weights),
        }
    )


def cut_row(cut: Cut) -> dict[str, Any]:
    return {"call": cut.node, "shape": list(cut.shape), "dtype": cut.dtype}


def _dump(document: Any) -> bytes:
    return json.dumps(
        document, allow_nan=False, separators=(",", ":"), sort_keys=True
    ).encode()
