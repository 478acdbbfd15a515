"""Hostile model packages: tables of attacks, and what refuses each.

An attack that succeeds creates the file ``trace``. Attacks start from a valid
package, so that only the attack itself can be the reason of the refusal.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.package import zip_container
from hapi_splitter.package.writer import package_bytes

CODE = "<code>"
TRACE = "<trace>"
"""Text of a document that becomes an expression that creates the file, or
the path of the file."""
BATCH = {"batch": 1, "constant": 0}


class Attack(NamedTuple):
    """Builds a package; the message of its refusal matches an expression."""

    build: Callable[[Path], bytes]
    reason: str


@functools.cache
def valid_package() -> bytes:
    """Returns the package of a small network, which loads."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        )
        frozen = split(model.eval(), "2", sample_shape=(3, 8, 8)).frozen
    return package_bytes(frozen)


def members() -> dict[str, bytes]:
    """Returns the members of the valid package."""
    with zipfile.ZipFile(io.BytesIO(valid_package())) as package:
        return {name: package.read(name) for name in package.namelist()}


def document(name: str) -> dict[str, Any]:
    """Returns ``hapi.json`` or ``graph.json`` of the valid package."""
    found: dict[str, Any] = json.loads(members()[f"{name}.json"])
    return found


def filled(content: Any, trace: Path) -> bytes:
    """Returns JSON with the code and the path of an attack."""
    code = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    text = json.dumps(content).replace(CODE, code)
    return text.replace(TRACE, str(trace)).encode()


def repack(**changed: bytes) -> bytes:
    """Returns a valid container around changed members (``graph=…``)."""
    names = {name.partition(".")[0]: name for name in zip_container.MEMBERS}
    content = members() | {names[k]: v for k, v in changed.items()}
    return b"".join(zip_container.pack(content))


def framed(header: Any, trace: Path, num_bytes: int = 0) -> bytes:
    """Returns weights of a header and zeros."""
    text = filled(header, trace)
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def with_call(call: list[Any], trace: Path) -> bytes:
    """Replaces the first call; tensor 0 is the input, ``[B, 3, 8, 8]``."""
    graph = document("graph")
    graph["calls"][0][-len(call) :] = call
    return repack(graph=filled(graph, trace))


def with_program(calls: list[Any], trace: Path) -> bytes:
    """Replaces all calls by some without weights."""
    hapi = document("hapi") | {"names": ["x"] * len(calls), "cuts": []}
    return repack(
        hapi=filled(hapi, trace),
        graph=filled({"weights": 0, "calls": calls}, trace),
        weights=framed({}, trace),
    )


def with_weight(
    dtype: str, data: bytes, calls: list[Any], trace: Path
) -> bytes:
    """Replaces program and weights; tensor 1 is a vector of ``dtype``."""
    size = {"I64": 8, "BOOL": 1}[dtype]
    shape = [len(data) // size]
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    hapi = document("hapi") | {"names": ["x"] * len(calls), "cuts": []}
    return repack(
        hapi=filled(hapi, trace),
        graph=filled({"weights": 1, "calls": calls}, trace),
        weights=framed({"1": entry}, trace) + data,
    )


def with_hapi(fields: dict[str, Any], trace: Path) -> bytes:
    return repack(hapi=filled(document("hapi") | fields, trace))


def with_text(before: bytes, after: bytes, trace: Path) -> bytes:
    """Replaces a text in the header of the weights."""
    weights = members()["weights.safetensors"]
    return repack(weights=weights.replace(before, after, 1))


def with_field(
    offset: int, layout: str, value: int, trace: Path, *, entry: int = 0
) -> bytes:
    """Changes a field of a directory entry (offsets: APPNOTE 4.3.12)."""
    data = bytearray(valid_package())
    position = -1
    for _ in range(entry + 1):
        position = data.index(b"PK\x01\x02", position + 1)
    values = [value] * (len(layout) - 1)
    struct.pack_into(layout, data, position + offset, *values)
    return bytes(data)


def zipped(
    content: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED
) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as package:
        for name, data in content:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            # Avoids zipfile's warning about repeated names.
            package.NameToInfo.pop(name, None)
            package.writestr(info, data)
    return buffer.getvalue()


class _Touch:
    """An object whose unpickling creates a file."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._trace,)


def pickled(trace: Path) -> bytes:
    return pickle.dumps(_Touch(trace))


def pickled_member(trace: Path) -> bytes:
    return repack(weights=pickled(trace))


def cut_name_injection(trace: Path) -> bytes:
    names = [f"x'); {CODE} #", *document("hapi")["names"][1:]]
    return with_hapi({"names": names}, trace)


def weight_name_injection(trace: Path) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return repack(weights=framed({f"w; {CODE}": entry}, trace, 4))


def overlapping_tensors(trace: Path) -> bytes:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    count = document("graph")["weights"]
    header = {str(node): entry for node in range(1, count + 1)}
    return repack(weights=framed(header, trace, 16))


def lookup_of_computed_ids(trace: Path) -> bytes:
    """An id beyond the table would end a GPU's process."""
    graph = document("graph")
    weight, first = graph["calls"][0][2][1], graph["weights"] + 1
    calls = [
        [first, "aten.reshape.default", [weight, [4, 27]]],
        [first + 1, "aten._to_copy.default", [0, "int64"]],
        [first + 2, "aten.embedding.default", [first, first + 1]],
    ]
    hapi = document("hapi") | {"names": ["x"] * len(calls), "cuts": []}
    return repack(
        hapi=filled(hapi, trace),
        graph=filled(graph | {"calls": calls}, trace),
    )


def ten_million_nodes(trace: Path) -> bytes:
    calls = b'[1,"aten.relu.default",[0]],' * 10_000_000
    return repack(graph=b'{"weights":0,"calls":[' + calls[:-1] + b"]}")


def too_many_nodes(trace: Path) -> bytes:
    calls = [[i, "aten.relu.default", [i - 1]] for i in range(1, 20_002)]
    return repack(graph=filled({"weights": 0, "calls": calls}, trace))


def wrong_cut_shape(trace: Path) -> bytes:
    cuts = document("hapi")["cuts"]
    cuts[0]["shape"] = [4, 1, 1]
    return with_hapi({"cuts": cuts}, trace)


def output_without_samples(trace: Path) -> bytes:
    """Convolution and batch norm are dead; the output is a weight's."""
    graph, hapi = document("graph"), document("hapi")
    convolution, norm, relu = graph["calls"][:3]
    relu[-1][0] = 1
    graph["calls"] = [convolution, norm, relu]
    hapi |= {"names": hapi["names"][:3], "cuts": hapi["cuts"][:1]}
    return repack(hapi=filled(hapi, trace), graph=filled(graph, trace))


def duplicate_member(trace: Path) -> bytes:
    content = members()
    graph = ("graph.json", content["graph.json"])
    return zipped([("hapi.json", content["hapi.json"]), graph, graph])


HUGE = (1 << 62) - 1
RESHAPE, COPY = "aten.reshape.default", "aten._to_copy.default"
NO_INTEGER = "argument 'shape' .* must be an integer"
NO_DTYPE = "argument 'dtype' .* must be null or one of"
ON_BATCH = "would mix samples: it acts on the batch"
NOT_A_ZIP = "not a zip file"
BEHIND_END = "comment or bytes after its end"

UNKNOWN_OPERATORS: Mapping[str, list[Any]] = {
    "torch.hub.load": [TRACE, CODE],
    "aten.from_file.default": [TRACE, True, 4],
    "os.system.default": [f"touch {TRACE}"],
    "aten.relu.default.__globals__": [0],
    "hapi.touch.default": [0, TRACE],
    "aten.relu_.default": [0],
    "aten.add.out": [0, 0, 1, 0],
    "aten.rand_like.default": [0],
}
"""Arguments of operators that are not allowed."""

WRONG_CALLS: Mapping[str, tuple[list[Any], str]] = {
    "expression as size": ([RESHAPE, [0, [CODE, 192]]], NO_INTEGER),
    "expression in affine": (
        [RESHAPE, [0, [{"batch": CODE, "constant": 0}, 192]]],
        NO_INTEGER,
    ),
    "call id": (
        [f"x = {CODE}", RESHAPE, [0, [BATCH, 192]]],
        "ids must be consecutive",
    ),
    "dtype": (["aten.mean.dim", [0, [1], False, CODE]], NO_DTYPE),
    "float64": ([COPY, [0, "float64"]], NO_DTYPE),
    "dropout": (
        [
            "aten.scaled_dot_product_attention.default",
            [0, 0, 0, None, 0.5, False, None],
        ],
        "argument 'dropout_p' .* must be 0",
    ),
}
"""First calls: operator and arguments, or all with the id."""

WRONG_PROGRAMS: Mapping[str, tuple[list[Any], str]] = {
    "product of integers": (
        [[1, COPY, [0, "int64"]], [2, "aten.matmul.default", [1, 1]]],
        "matmul.default: its argument 'self' is of torch.int64",
    ),
    "roll": ([[1, "aten.roll.default", [0, [1], [0]]]], ON_BATCH),
    "flip": ([[1, "aten.flip.default", [0, [-4]]]], ON_BATCH),
    "softmax": ([[1, "aten.softmax.int", [0, 0, None]]], ON_BATCH),
    "reshape": (
        [[1, RESHAPE, [0, [3, BATCH, 8, 8]]]],
        "would mix samples: it moves entries",
    ),
    "own values as indices": (
        [[1, COPY, [0, "int64"]], [2, "aten.gather.default", [0, 1, 1]]],
        "cannot be checked",
    ),
    "gather of samples": (
        [
            [1, "aten.argmax.default", [0, 1, True]],
            [2, "aten.gather.default", [0, 0, 1]],
        ],
        "would mix samples|cannot be checked",
    ),
    "forward reference": (
        [[1, "aten.relu.default", [1]]],
        "must be the id of an earlier tensor",
    ),
    "overflowing size": (
        [[1, "aten.pad.default", [0, [HUGE, HUGE], None]]],
        "cannot run",
    ),
    "huge intermediate": (
        [
            [1, "aten.unsqueeze.default", [0, 1]],
            [2, "aten.expand.default", [1, [BATCH, 1 << 21, 3, 8, 8]]],
            [3, "aten.contiguous.default", [2]],
        ],
        "bytes per sample exceeds the limit",
    ),
    "endless work": (
        [
            [1, "aten.slice.Tensor", [0, 1, 0, 1, 1]],
            [2, "aten.slice.Tensor", [1, 2, 0, 1, 1]],
            [3, "aten.slice.Tensor", [2, 3, 0, 1, 1]],
            [4, RESHAPE, [3, [BATCH, 1, 1]]],
            [5, "aten.expand.default", [4, [BATCH, 16384, 16384]]],
            [6, "aten.matmul.default", [5, 5]],
            [7, "aten.matmul.default", [6, 6]],
        ],
        r"limit of \d+ floating-point operations",
    ),
}

SELECT = [2, "aten.index_select.default", [0, 2, 1]]
COUNT = [
    [2, COPY, [1, "int64"]],
    [3, "aten.index_select.default", [0, 1, 2]],
]
WRONG_INDICES: Mapping[str, tuple[str, bytes, list[Any], str]] = {
    "row after the last": (
        "I64",
        struct.pack("<2q", 0, 8),
        [SELECT],
        "from 0 to 8. cannot be checked",
    ),
    "negative row": (
        "I64",
        struct.pack("<2q", 0, -1),
        [SELECT],
        "from -1 to 0. cannot be checked",
    ),
    # It would pass for 0 or 1 and could select row 255.
    "bool of 255": ("BOOL", b"\0\xff", COUNT, "neither 0 nor 1"),
}
"""Dtype and bytes of a weight, and the program that selects with it."""

WRONG_GRAPHS: Mapping[str, tuple[bytes, str]] = {
    "out of range": (
        b'{"weights":0,"calls":[[1,"x",[1e999]]]}',
        "out of range",
    ),
    "not a number": (
        b'{"weights":0,"calls":[[1,"x",[NaN]]]}',
        "NaN is not a number",
    ),
    "repeated key": (
        b'{"weights":0,"weights":1,"calls":[]}',
        "a key is repeated",
    ),
    "deep nesting": (b"[" * 1_000_000, "nested too deeply"),
    "huge integer": (
        b'{"weights":' + b"9" * 100_000 + b',"calls":[]}',
        "not acceptable JSON: 9{40} is out of range",
    ),
}

WRONG_HAPI: Mapping[str, tuple[dict[str, Any], str]] = {
    "range constraints": ({"constraints": [CODE]}, "hapi.json must have"),
    "no cut": ({"cuts": []}, "must record . cuts"),
    "sample shape": ({"sample": [3, 9, 9]}, "cannot run: shape .* is invalid"),
    "transform": (
        {
            "transform": {
                "resize_size": 1 << 40,
                "crop_size": 8,
                "mean": [0, 0, 0],
                "std": [1, 1, 1],
                "interpolation": "bilinear",
                "antialias": True,
            }
        },
        "resize_size must be 1 to",
    ),
    # Crops a column a million times as high as wide.
    "augmentation": (
        {
            "transform": ImageTransform(8, 8).to_json()
            | {
                "augmentation": Augmentation().to_json()
                | {"ratio": [1e-6, 1e-6]}
            }
        },
        "ratio must be two numbers",
    ),
}

WRONG_WEIGHTS: Mapping[str, tuple[bytes, bytes, str]] = {
    "float64 weights": (b'"F32"', b'"F64"', "has the unsupported dtype 'F64'"),
    "tensor size": (
        b'"shape":[4]',
        b'"shape":[9]',
        "shape and offsets do not match",
    ),
}

WRONG_FIELDS: Mapping[str, tuple[int, str, int, int, str]] = {
    "encrypted": (8, "<H", 1, 0, "is encrypted"),
    "overlap": (42, "<I", 0, 1, "overlaps another"),
    "one size": (20, "<I", 0x7FFFFFFF, 0, "has two different sizes"),
    "both sizes": (20, "<II", 0x7FFFFFFF, 2, "ends after the file"),
    "checksum": (
        16,
        "<I",
        zlib.crc32(b"other"),
        0,
        "header differs from the directory",
    ),
}
"""Offset, layout, value and number of an entry of the zip directory."""

OTHERS: Mapping[str, Attack] = {
    "pickled weights": Attack(
        pickled_member, "its header has an invalid length"
    ),
    "pickled graph": Attack(
        lambda trace: repack(graph=pickled(trace)),
        "graph.json is not acceptable JSON",
    ),
    "guards": Attack(
        lambda trace: repack(
            graph=filled(document("graph") | {"guards": [CODE]}, trace)
        ),
        "must be an object of 'weights' and 'calls'",
    ),
    "cut name": Attack(cut_name_injection, "'names' must be"),
    "weight name": Attack(weight_name_injection, "tensors must be named 1 to"),
    "computed ids": Attack(
        lookup_of_computed_ids, "it must look up unchanged int64 ids"
    ),
    "ten million nodes": Attack(
        ten_million_nodes, r"graph.json has \d+ bytes, more than the limit"
    ),
    "too many nodes": Attack(
        too_many_nodes, "20001 calls .* limit of 20000 nodes"
    ),
    "cut shape": Attack(wrong_cut_shape, "records .* for cut 1, expected"),
    "output without samples": Attack(
        output_without_samples, "must be a batch of floating-point samples"
    ),
    "overlapping tensors": Attack(
        overlapping_tensors, "shape and offsets do not match|overlap"
    ),
    "truncated weights": Attack(
        lambda _: repack(weights=members()["weights.safetensors"][:-4]),
        "ends after the file",
    ),
    "extra member": Attack(
        lambda trace: zipped(
            [*members().items(), ("sample_inputs.pt", pickled(trace))]
        ),
        "4 members instead of 3",
    ),
    "duplicate member": Attack(
        duplicate_member, "'graph.json' instead of weights.safetensors"
    ),
    "fourth member of the same name": Attack(
        lambda _: zipped([*members().items(), ("graph.json", b"{}")]),
        "4 members instead of 3",
    ),
    "deflated": Attack(
        lambda _: zipped([*members().items()], zipfile.ZIP_DEFLATED),
        "is compressed, not stored",
    ),
    "prepended": Attack(
        lambda _: b"#!/bin/sh\n" + valid_package(),
        "directory is not at the end",
    ),
    "appended": Attack(lambda _: valid_package() + b"\n", BEHIND_END),
    "comment": Attack(
        lambda _: valid_package()[:-2] + struct.pack("<H", 5) + b"hello",
        BEHIND_END,
    ),
    "pickle": Attack(pickled, NOT_A_ZIP),
    "empty": Attack(lambda _: b"", NOT_A_ZIP),
    "truncated": Attack(lambda _: valid_package()[:-100], NOT_A_ZIP),
}


def attacks() -> dict[str, Attack]:
    """All attacks by name."""
    part = functools.partial
    found = {
        name: Attack(
            part(with_call, [name, arguments]),
            re.escape(f"{name!r} is not in the table"),
        )
        for name, arguments in UNKNOWN_OPERATORS.items()
    }
    for build, table in (
        (with_call, WRONG_CALLS),
        (with_program, WRONG_PROGRAMS),
        (with_hapi, WRONG_HAPI),
    ):
        for name, (change, reason) in table.items():
            found[name] = Attack(part(build, change), reason)
    for name, (*weight, reason) in WRONG_INDICES.items():
        found[name] = Attack(part(with_weight, *weight), reason)
    for name, (graph, reason) in WRONG_GRAPHS.items():
        found[name] = Attack(
            lambda _, graph=graph: repack(graph=graph), reason
        )
    for name, (before, after, reason) in WRONG_WEIGHTS.items():
        found[name] = Attack(part(with_text, before, after), reason)
    for name, (*field, entry, reason) in WRONG_FIELDS.items():
        found[name] = Attack(part(with_field, *field, entry=entry), reason)
    return found | OTHERS
