"""Hostile model packages: tables of attacks, and what refuses each.

An attack that succeeds creates the file ``trace``. Attacks start from a valid
package, so that only the attack itself can be the reason of the refusal.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.package.header import MAX_HEADER_BYTES, parse_header
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


def parts() -> dict[str, Any]:
    """The texts, the table of tensors and their bytes in a valid package."""
    data = valid_package()
    hapi, graph, tensors, end = parse_header(data)
    return {
        "hapi": json.dumps(hapi).encode(),
        "graph": json.dumps(graph).encode(),
        "tensors": tensors,
        "data": data[end:],
    }


def document(name: str) -> dict[str, Any]:
    """Returns ``hapi.json`` or ``graph.json`` of the valid package."""
    found: dict[str, Any] = json.loads(parts()[name])
    return found


def filled(content: Any, trace: Path) -> bytes:
    """Returns JSON with the code and the path of an attack."""
    code = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    text = json.dumps(content).replace(CODE, code)
    return text.replace(TRACE, str(trace)).encode()


def repack(**changed: Any) -> bytes:
    """Returns a valid file of changed parts (``graph=…``)."""
    part = parts() | changed
    texts = {
        f"{name}.json": part[name].decode("latin-1")
        for name in ("hapi", "graph")
    }
    header = {"__metadata__": texts, **part["tensors"]}
    return framed(json.dumps(header).encode()) + part["data"]


def framed(text: bytes) -> bytes:
    """Returns a header of a text with its length and padding."""
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text


def with_header(before: bytes, after: bytes, _: Path) -> bytes:
    """Replaces a text in the header."""
    data = valid_package()
    end = parse_header(data).end
    assert before in data[8:end]
    return framed(data[8:end].replace(before, after, 1).rstrip()) + data[end:]


def with_length(length: int, _: Path) -> bytes:
    """Declares another length of the header."""
    return struct.pack("<Q", length) + valid_package()[8:]


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
        tensors={},
        data=b"",
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
        tensors={"1": entry},
        data=data,
    )


def with_hapi(fields: dict[str, Any], trace: Path) -> bytes:
    return repack(hapi=filled(document("hapi") | fields, trace))


class _Touch:
    """An object whose unpickling creates a file."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._trace,)


def pickled(trace: Path) -> bytes:
    return pickle.dumps(_Touch(trace))


def cut_name_injection(trace: Path) -> bytes:
    names = [f"x'); {CODE} #", *document("hapi")["names"][1:]]
    return with_hapi({"names": names}, trace)


def weight_name_injection(trace: Path) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    tensors = json.loads(filled({f"w; {CODE}": entry}, trace))
    return repack(tensors=tensors, data=bytes(4))


def with_offsets(*spans: tuple[int, int]) -> bytes:
    """Makes each weight four floats; the first ones get other offsets."""
    entry = {"dtype": "F32", "shape": [4]}
    count = document("graph")["weights"]
    rest = [(16 * node, 16 * node + 16) for node in range(count)]
    tensors = {
        str(node): {**entry, "data_offsets": list(span)}
        for node, span in enumerate([*spans, *rest[len(spans) :]], 1)
    }
    return repack(tensors=tensors, data=bytes(16 * count))


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


HUGE = (1 << 62) - 1
RESHAPE, COPY = "aten.reshape.default", "aten._to_copy.default"
NO_INTEGER = "argument 'shape' .* must be an integer"
NO_DTYPE = "argument 'dtype' .* must be null or one of"
ON_BATCH = "would mix samples: it acts on the batch"
NO_HEADER = "not a model package: it does not begin with a header"
NO_TEXTS = "__metadata__ must have the texts"

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

WRONG_HEADERS: Mapping[str, tuple[bytes, bytes, str]] = {
    "float64 weights": (b'"F32"', b'"F64"', "has the unsupported dtype 'F64'"),
    "tensor size": (
        b'"shape":[4]',
        b'"shape":[9]',
        "shape and offsets do not match",
    ),
    "negative size": (
        b'"shape":[4]',
        b'"shape":[-4]',
        "has the invalid shape",
    ),
    "field of a tensor": (b'"shape":[4]', b'"shape":[4],"x":1', "must have"),
    "extra document": (
        b'"graph.json":',
        b'"sample_inputs.pt":"x","graph.json":',
        NO_TEXTS,
    ),
    "missing document": (b'"graph.json":', b'"graph.jso":', NO_TEXTS),
    "repeated document": (
        b'"graph.json":',
        b'"graph.json":"{}","graph.json":',
        "the header is not acceptable JSON: a key is repeated",
    ),
    "repeated tensor": (
        b'{"1":',
        b'{"1":{},"1":',
        "the header is not acceptable JSON: a key is repeated",
    ),
    "second metadata": (
        b'"__metadata__":',
        b'"__metadata__":{},"__metadata__":',
        "the header is not acceptable JSON: a key is repeated",
    ),
    "no metadata": (b'"__metadata__":', b'"_metadata_":', NO_TEXTS),
    "bytes that are not UTF-8": (b'"F32"', b'"\xff32"', "can't decode byte"),
    "bytes after the object": (b'{"1":', b'{} {"1":', "Extra data"),
}
"""A text in the header, and what replaces it."""

WRONG_LENGTHS: Mapping[str, tuple[int, str]] = {
    "header of no bytes": (0, NO_HEADER),
    "unaligned header": (121, NO_HEADER),
    "short header": (120, "the header is not acceptable JSON"),
    "header over the limit": (MAX_HEADER_BYTES + 56, "more than the limit"),
    "header of 2**63 bytes": (2**63 + 56, "more than the limit"),
    "header after the file": (MAX_HEADER_BYTES - 8, "header is truncated"),
}

WRONG_OFFSETS: Mapping[str, tuple[list[tuple[int, int]], str]] = {
    "overlapping tensors": ([(0, 16), (0, 16)], "overlap or leave gaps"),
    "gap between tensors": ([(0, 16), (32, 48)], "overlap or leave gaps"),
    "unaligned tensor": ([(1, 17)], "shape and offsets do not match"),
    "offsets in reverse": ([(16, 0)], "shape and offsets do not match"),
    "tensor after the file": ([(960, 976)], "ends after the file"),
}

OTHERS: Mapping[str, Attack] = {
    "pickled header": Attack(
        lambda trace: framed(pickled(trace)),
        "the header is not acceptable JSON",
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
        ten_million_nodes, r"header has \d+ bytes, more than the limit"
    ),
    "too many nodes": Attack(
        too_many_nodes, "20001 calls .* limit of 20000 nodes"
    ),
    "cut shape": Attack(wrong_cut_shape, "records .* for cut 1, expected"),
    "output without samples": Attack(
        output_without_samples, "must be a batch of floating-point samples"
    ),
    "header that is a list": Attack(lambda _: framed(b"[]"), NO_TEXTS),
    "metadata that is a text": Attack(
        lambda _: framed(b'{"__metadata__":"x"}'), NO_TEXTS
    ),
    "documents that are objects": Attack(
        lambda _: framed(b'{"__metadata__":{"hapi.json":{},"graph.json":{}}}'),
        NO_TEXTS,
    ),
    "deep header": Attack(
        lambda _: framed(b"[" * 1_000_000), "nested too deeply"
    ),
    "prepended": Attack(lambda _: b"#!/bin/sh\n" + valid_package(), NO_HEADER),
    "appended": Attack(
        lambda _: valid_package() + b"\n", "bytes after its last tensor"
    ),
    "truncated": Attack(lambda _: valid_package()[:-4], "ends after the file"),
    "truncated header": Attack(
        lambda _: valid_package()[:100], "header is truncated"
    ),
    "zip": Attack(lambda _: b"PK\x03\x04" + bytes(200), NO_HEADER),
    "pickle": Attack(pickled, NO_HEADER),
    "empty": Attack(lambda _: b"", NO_HEADER),
    "seven bytes": Attack(lambda _: b"\x38" + bytes(6), NO_HEADER),
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
    for name, (before, after, reason) in WRONG_HEADERS.items():
        found[name] = Attack(part(with_header, before, after), reason)
    for name, (length, reason) in WRONG_LENGTHS.items():
        found[name] = Attack(part(with_length, length), reason)
    for name, (spans, reason) in WRONG_OFFSETS.items():
        found[name] = Attack(
            lambda _, spans=spans: with_offsets(*spans), reason
        )
    return found | OTHERS
