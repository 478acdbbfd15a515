"""Writes model packages and computes their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hapi_splitter.cuts import Cut, FrozenGraph
from hapi_splitter.package.header import FORMAT
from hapi_splitter.package.weights import file_pieces


@dataclass(frozen=True, slots=True)
class PackageInfo:
    """A package that has been written.

    Args:
        digest: sha256 of its bytes, hexadecimal.
        length_bytes: size of the file.
        path: path of the file.
    """

    digest: str
    length_bytes: int
    path: Path


def write_package(frozen: FrozenGraph, path: Path | str) -> PackageInfo:
    """Writes a frozen region to a file.

    Raises:
        ValueError: for a fast region.
        OSError: if the file cannot be written.
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
    """Returns the content of the package."""
    return b"".join(package_pieces(frozen))


def digest_of(frozen: FrozenGraph, algorithm: str = "sha256") -> str:
    """Returns the sha256 of the package, or another digest, hexadecimal."""
    digest = hashlib.new(algorithm, usedforsecurity=algorithm != "md5")
    for piece in package_pieces(frozen):
        digest.update(piece)
    return digest.hexdigest()


def package_pieces(frozen: FrozenGraph) -> Iterator[bytes | memoryview]:
    """Returns the content of a package in pieces.

    Raises:
        ValueError: for a fast region.
    """
    if frozen.is_fast:
        raise ValueError(
            "a package cannot be written from a fast region; use the region "
            "that it was made from"
        )
    hapi = {
        "format": FORMAT,
        "sample": list(frozen.input_shape),
        "transform": frozen.transform and frozen.transform.to_json(),
        "names": list(frozen.names),
        "cuts": [cut_row(cut) for cut in frozen.cuts],
        "producer": {
            name: metadata.version(name) for name in ("torch", "torchvision")
        },
    }
    documents = {"hapi.json": hapi, "graph.json": frozen.program.to_json()}
    return file_pieces(documents, frozen.weights)


def cut_row(cut: Cut) -> dict[str, Any]:
    """Returns a cut's entry in the package's table."""
    return {"call": cut.node, "shape": list(cut.shape), "dtype": cut.dtype}
