"""Loads and checks untrusted model packages.

A package is a safetensors file (:mod:`hapi_splitter.package.header`) of the
weights, named by their ids, with two JSON documents in its metadata:

``hapi.json``
    format version, sample shape, input transform, table of cuts, versions
    of the producer.
``graph.json``
    the program: a flat list of ATen calls
    (:mod:`hapi_splitter.graph.program`).

The same program and weights give the same bytes; a package is named by their
sha256. Loading never evaluates package content as code: it reads numbers,
checks every call against the table of operators and recomputes all shapes.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hapi_protocol.errors import bad_package
from hapi_splitter.cuts import CUT_NAME, Cut, FrozenGraph
from hapi_splitter.graph.program import program_from_json
from hapi_splitter.graph.shapes import ShapeLimits, infer
from hapi_splitter.inputs.array_transform import MAX_DIMS
from hapi_splitter.inputs.sample_format import (
    InputTransform,
    SampleForm,
    transform_from_json,
)
from hapi_splitter.package.header import (
    FORMAT,
    MAX_HEADER_BYTES,
    Header,
    parse_header,
)
from hapi_splitter.package.weights import read_weights
from hapi_splitter.package.writer import cut_row

_HAPI_FIELDS = {"format", "sample", "transform", "names", "cuts", "producer"}


@dataclass(frozen=True, slots=True)
class PackageLimits:
    """Upper limits on the size and cost of a package.

    Args:
        package_bytes: length of the file.
        header_bytes: length of the header, which has both documents.
        nodes: calls of the program.
        parameters: entries of all weights together.
        loaded_bytes: bytes of all weights as a worker holds them, some of
            them folded; only the validating process checks it.
        shapes: limits on intermediate tensors and operations per sample.
    """

    package_bytes: int = 2 << 30
    header_bytes: int = MAX_HEADER_BYTES
    nodes: int = 20_000
    parameters: int = 1 << 30
    loaded_bytes: int = 1 << 40
    shapes: ShapeLimits = field(default_factory=ShapeLimits)


def load_package(
    data: bytes | bytearray | memoryview | Path,
    *,
    limits: PackageLimits | None = None,
    digest: str | None = None,
) -> FrozenGraph:
    """Loads a package and checks all of its content.

    Args:
        data: the package, or the path of its file. Files and writable buffers
            are used in place and must not change afterwards; weights of
            read-only buffers are copied.
        limits: upper limits; None means the defaults.
        digest: expected sha256, hexadecimal.

    Raises:
        PackageError: naming the fault; nothing of the package has run.
        OSError: if the file cannot be opened.
    """
    limits = limits or PackageLimits()
    view = _map(data) if isinstance(data, Path) else memoryview(data)
    view = view.cast("B")
    if len(view) > limits.package_bytes:
        raise bad_package(
            f"the package has {len(view)} bytes, more than the limit of "
            f"{limits.package_bytes}"
        )
    actual = hashlib.sha256(view).hexdigest()
    if digest is not None and digest != actual:
        raise bad_package(
            f"the package has the digest {actual}, not {digest:.80}"
        )
    header = parse_header(view, limits.header_bytes)
    return _read(header, view[header.end :], limits, actual)


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        # A private mapping, because torch warns about read-only memory.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _read(
    header: Header, data: memoryview, limits: PackageLimits, digest: str
) -> FrozenGraph:
    hapi = header.hapi
    if not isinstance(hapi, dict) or hapi.get("format") != FORMAT:
        raise bad_package(f"hapi.json: its format is not {FORMAT}")
    if set(hapi) != _HAPI_FIELDS:
        raise bad_package(f"hapi.json must have {sorted(_HAPI_FIELDS)}")
    sample = _read_sample(hapi["sample"])
    transform = _read_transform(hapi["transform"], sample)
    program = program_from_json(header.graph, limits.nodes)
    names = _read_names(hapi["names"], len(program.calls))
    if data.readonly:
        data = memoryview(bytearray(data))
    weights = read_weights(header.tensors, data, program.num_weights)
    parameters = sum(weight.numel() for weight in weights.values())
    if parameters > limits.parameters:
        raise bad_package(
            f"{parameters} parameters, more than the limit of "
            f"{limits.parameters}"
        )
    form = SampleForm.of(transform, sample)
    values = infer(program, weights, form, limits.shapes)
    frozen = FrozenGraph(program, weights, values, names, transform, digest)
    _check_cuts(hapi["cuts"], frozen.cuts)
    if not frozen.cuts or frozen.cuts[-1].node != program.output:
        raise bad_package(
            f"its output, tensor {program.output}, must be a batch of "
            "floating-point samples that depend on the input"
        )
    return frozen


def _read_sample(shape: Any) -> tuple[int, ...]:
    is_valid = (
        isinstance(shape, list)
        and 0 < len(shape) <= MAX_DIMS
        and all(type(size) is int and 0 < size <= 1 << 20 for size in shape)
    )
    if not is_valid:
        raise bad_package(f"hapi.json: invalid sample shape {shape!r:.80}")
    return tuple(shape)


def _read_transform(
    document: Any, sample: tuple[int, ...]
) -> InputTransform | None:
    if document is None:
        return None
    try:
        transform = transform_from_json(document)
    except ValueError as error:
        raise bad_package(f"hapi.json, transform: {error}") from None
    if transform.output_shape != sample:
        raise bad_package(
            f"hapi.json: the transform yields {transform.output_shape}, the "
            f"model takes {sample}"
        )
    return transform


def _read_names(names: Any, count: int) -> Sequence[str]:
    is_valid = (
        isinstance(names, list)
        and len(names) == count
        and all(isinstance(n, str) and CUT_NAME.fullmatch(n) for n in names)
    )
    if not is_valid:
        raise bad_package(
            f"hapi.json: 'names' must be {count} names of letters, digits, "
            "dots and underscores"
        )
    return list(names)


def _check_cuts(recorded: Any, cuts: Sequence[Cut]) -> None:
    if not isinstance(recorded, list) or len(recorded) != len(cuts):
        raise bad_package(
            f"hapi.json must record {len(cuts)} cuts, those of the graph"
        )
    for row, cut in zip(recorded, cuts, strict=True):
        if row != cut_row(cut):
            raise bad_package(
                f"hapi.json records {row!r:.120} for cut {cut.index}, "
                f"expected {cut_row(cut)}"
            )
