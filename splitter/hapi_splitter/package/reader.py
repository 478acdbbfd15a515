"""Model packages: writing, and loading from strangers.

A package is a zip of exactly three stored members (see
:mod:`hapi_splitter.container`):

``hapi.json``
    format version, sample shape, input transform, table of cuts, versions
    of the producer.
``graph.json``
    the program: a flat list of ATen calls (:mod:`hapi_splitter.program`).
``weights.safetensors``
    the weights, named by their ids.

The same program and weights give the same bytes; a package is named by
their sha256. Loading evaluates nothing: it reads numbers, checks every call
against the table of operators and recomputes all shapes.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hapi_protocol.errors import PackageError
from hapi_splitter.cuts import CUT_NAME, Cut, FrozenGraph
from hapi_splitter.graph.program import program_from_json
from hapi_splitter.graph.shapes import ShapeLimits, infer
from hapi_splitter.inputs.array_transform import MAX_DIMS
from hapi_splitter.inputs.sample_format import (
    InputTransform,
    SampleForm,
    transform_from_json,
)
from hapi_splitter.package import zip_container as container
from hapi_splitter.package.strict_json import parse_json
from hapi_splitter.package.weights import read_weights
from hapi_splitter.package.writer import (
    FORMAT,
    FORMAT_OF_ARRAYS,
    cut_row,
    format_of,
)

_HAPI_FIELDS = {"format", "sample", "transform", "names", "cuts", "producer"}


@dataclass(frozen=True, slots=True)
class PackageLimits:
    """What a package may ask for.

    Args:
        package_bytes: length of the file.
        json_bytes: length of each JSON member.
        nodes: calls of the program.
        parameters: entries of all weights together.
        shapes: of intermediate tensors and of the work per sample.
    """

    package_bytes: int = 2 << 30
    json_bytes: int = 8 << 20
    nodes: int = 20_000
    parameters: int = 1 << 30
    shapes: ShapeLimits = field(default_factory=ShapeLimits)


def load_package(
    data: bytes | bytearray | memoryview | Path,
    *,
    limits: PackageLimits | None = None,
    digest: str | None = None,
) -> FrozenGraph:
    """Reads a package.

    Args:
        data: its bytes, or its file. Files and writable buffers are used
            in place and must not change afterwards; of read-only buffers
            the weights are copied.
        limits: what it may ask for.
        digest: the sha256 it must have, hexadecimal.

    Raises:
        PackageError: naming what is wrong; nothing of it has run then.
        OSError: as opening the file does.
    """
    limits = limits or PackageLimits()
    view = _map(data) if isinstance(data, Path) else memoryview(data)
    view = view.cast("B")
    if len(view) > limits.package_bytes:
        raise _error(
            f"the package has {len(view)} bytes, more than the limit of "
            f"{limits.package_bytes}"
        )
    found = hashlib.sha256(view).hexdigest()
    if digest is not None and digest != found:
        raise _error(f"the package has the digest {found}, not {digest:.80}")
    members = container.unpack(view)
    return _read(members, limits, found)


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise _error(f"{path} is empty")
        # A private mapping: torch warns about memory it cannot write.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _read(
    members: dict[str, memoryview], limits: PackageLimits, digest: str
) -> FrozenGraph:
    documents = {
        name: _parse(members[name], name, limits)
        for name in ("hapi.json", "graph.json")
    }
    hapi = documents["hapi.json"]
    known = (FORMAT, FORMAT_OF_ARRAYS)
    if not isinstance(hapi, dict) or hapi.get("format") not in known:
        raise _error(
            f"hapi.json: its format is neither {FORMAT} nor {FORMAT_OF_ARRAYS}"
        )
    if set(hapi) != _HAPI_FIELDS:
        raise _error(f"hapi.json must have {sorted(_HAPI_FIELDS)}")
    sample = _read_sample(hapi["sample"])
    transform = _read_transform(hapi["transform"], sample)
    if hapi["format"] != format_of(transform):
        raise _error(
            f"hapi.json: its format is {hapi['format']!r:.20}, that of such "
            f"a transform {format_of(transform)}"
        )
    program = program_from_json(documents["graph.json"], limits.nodes)
    names = _read_names(hapi["names"], len(program.calls))
    weights_data = members["weights.safetensors"]
    if weights_data.readonly:
        weights_data = memoryview(bytearray(weights_data))
    weights = read_weights(weights_data, program.num_weights)
    parameters = sum(weight.numel() for weight in weights.values())
    if parameters > limits.parameters:
        raise _error(
            f"{parameters} parameters, more than the limit of "
            f"{limits.parameters}"
        )
    form = SampleForm.of(transform, sample)
    values = infer(program, weights, form, limits.shapes)
    frozen = FrozenGraph(program, weights, values, names, transform, digest)
    _check_cuts(hapi["cuts"], frozen.cuts)
    return frozen


def _parse(data: memoryview, name: str, limits: PackageLimits) -> Any:
    if len(data) > limits.json_bytes:
        raise _error(
            f"{name} has {len(data)} bytes, more than the limit of "
            f"{limits.json_bytes} (about {limits.nodes} nodes fit)"
        )
    return parse_json(bytes(data), name, limits.json_bytes)


def _read_sample(shape: Any) -> tuple[int, ...]:
    fine = (
        isinstance(shape, list)
        and 0 < len(shape) <= MAX_DIMS
        and all(type(size) is int and 0 < size <= 1 << 20 for size in shape)
    )
    if not fine:
        raise _error(f"hapi.json: no sample has the shape {shape!r:.80}")
    return tuple(shape)


def _read_transform(
    document: Any, sample: tuple[int, ...]
) -> InputTransform | None:
    if document is None:
        return None
    try:
        transform = transform_from_json(document)
    except ValueError as error:
        raise _error(f"hapi.json, transform: {error}") from None
    if transform.output_shape != sample:
        raise _error(
            f"hapi.json: the transform yields {transform.output_shape}, the "
            f"model takes {sample}"
        )
    return transform


def _read_names(names: Any, count: int) -> Sequence[str]:
    fine = (
        isinstance(names, list)
        and len(names) == count
        and all(isinstance(n, str) and CUT_NAME.fullmatch(n) for n in names)
    )
    if not fine:
        raise _error(
            f"hapi.json: 'names' must be {count} names of letters, digits, "
            "dots and underscores"
        )
    return list(names)


def _check_cuts(stated: Any, found: Sequence[Cut]) -> None:
    expected = [cut_row(cut) for cut in found]
    if not isinstance(stated, list) or len(stated) != len(expected):
        raise _error(
            f"hapi.json states other cuts than the {len(expected)} there are"
        )
    for index, (row, true_row) in enumerate(
        zip(stated, expected, strict=True), 1
    ):
        if row != true_row:
            raise _error(
                f"hapi.json states {row!r:.120} for cut {index}, which is "
                f"{true_row}"
            )


def _error(message: str) -> PackageError:
    return PackageError("bad_package", message)
