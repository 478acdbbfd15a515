"""Hostile model packages, one builder per attack.

An attack that succeeds creates the file ``trace``. Builders start from a valid
package, so that only the attack itself can be the reason of the refusal.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.package import zip_container
from hapi_splitter.package.writer import package_bytes

Document = dict[str, Any]


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


def repack(**changed: bytes) -> bytes:
    """Returns a valid container around changed members (``graph=…``)."""
    names = {name.partition(".")[0]: name for name in zip_container.MEMBERS}
    content = members() | {names[k]: v for k, v in changed.items()}
    return b"".join(zip_container.pack(content))


def with_graph(change: Callable[[Document], None]) -> bytes:
    graph = json.loads(members()["graph.json"])
    change(graph)
    return repack(graph=json.dumps(graph).encode())


def with_hapi(change: Callable[[Document], None]) -> bytes:
    hapi = json.loads(members()["hapi.json"])
    change(hapi)
    return repack(hapi=json.dumps(hapi).encode())


def with_call(op: str, args: list[Any]) -> bytes:
    """Replaces the first call; tensor 0 is the input, ``[B, 3, 8, 8]``."""

    def change(graph: Document) -> None:
        graph["calls"][0][1:] = [op, args]

    return with_graph(change)


def with_only(op: str, args: list[Any]) -> bytes:
    """Returns a program of one call and no weights."""
    return _program([[1, op, args]])


class _Touch:
    """An object whose unpickling creates a file."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._trace,)


def code(trace: Path) -> str:
    """Returns an expression that creates the file."""
    return f"__import__('pathlib').Path({str(trace)!r}).touch()"


def pickled_member(trace: Path) -> bytes:
    return repack(weights=pickle.dumps(_Touch(trace)))


def pickled_graph(trace: Path) -> bytes:
    return repack(graph=pickle.dumps(_Touch(trace)))


def extra_member(trace: Path) -> bytes:
    return _zipped(
        [*members().items(), ("sample_inputs.pt", pickle.dumps(_Touch(trace)))]
    )


def expression_as_size(trace: Path) -> bytes:
    return with_call("aten.reshape.default", [0, [code(trace), 192]])


def expression_in_affine(trace: Path) -> bytes:
    size = {"batch": code(trace), "constant": 0}
    return with_call("aten.reshape.default", [0, [size, 192]])


def guard_string(trace: Path) -> bytes:
    return with_graph(lambda graph: graph.update(guards=[code(trace)]))


def range_constraints(trace: Path) -> bytes:
    return with_hapi(lambda hapi: hapi.update(constraints=[code(trace)]))


def operator_path(trace: Path) -> bytes:
    return with_call("torch.hub.load", [str(trace.parent), code(trace)])


def from_file_operator(trace: Path) -> bytes:
    return with_call("aten.from_file.default", [str(trace), True, 4])


def operator_of_another_namespace(trace: Path) -> bytes:
    return with_call("os.system.default", [f"touch {trace}"])


def attribute_walk_operator(trace: Path) -> bytes:
    return with_call("aten.relu.default.__globals__", [0])


def custom_operator(trace: Path) -> bytes:
    return with_call("hapi.touch.default", [0, str(trace)])


def call_id_injection(trace: Path) -> bytes:
    def change(graph: Document) -> None:
        graph["calls"][0][0] = f"x = {code(trace)}"

    return with_graph(change)


def cut_name_injection(trace: Path) -> bytes:
    def change(hapi: Document) -> None:
        hapi["names"][0] = f"x'); {code(trace)} #"

    return with_hapi(change)


def weight_name_injection(trace: Path) -> bytes:
    header = {
        f"w; {code(trace)}": {
            "dtype": "F32",
            "shape": [1],
            "data_offsets": [0, 4],
        }
    }
    text = json.dumps(header).encode()
    return repack(weights=struct.pack("<Q", len(text)) + text + bytes(4))


def dtype_injection(trace: Path) -> bytes:
    return with_call("aten.mean.dim", [0, [1], False, code(trace)])


def conversion_to_float64(trace: Path) -> bytes:
    return with_call("aten._to_copy.default", [0, "float64"])


def weights_of_float64(trace: Path) -> bytes:
    weights = members()["weights.safetensors"]
    return repack(weights=weights.replace(b'"F32"', b'"F64"', 1))


def weights_of_float16(trace: Path) -> bytes:
    weights = members()["weights.safetensors"]
    return repack(weights=weights.replace(b'"F32"', b'"F16"', 1))


def product_of_integers(trace: Path) -> bytes:
    return _program(
        [
            [1, "aten._to_copy.default", [0, "int64"]],
            [2, "aten.matmul.default", [1, 1]],
        ]
    )


def in_place_operator(trace: Path) -> bytes:
    return with_call("aten.relu_.default", [0])


def out_operator(trace: Path) -> bytes:
    return with_call("aten.add.out", [0, 0, 1, 0])


def random_operator(trace: Path) -> bytes:
    return with_call("aten.rand_like.default", [0])


def dropout_in_attention(trace: Path) -> bytes:
    return with_call(
        "aten.scaled_dot_product_attention.default",
        [0, 0, 0, None, 0.5, False, None],
    )


def roll_over_the_batch(trace: Path) -> bytes:
    return with_only("aten.roll.default", [0, [1], [0]])


def flip_of_the_batch(trace: Path) -> bytes:
    return with_only("aten.flip.default", [0, [-4]])


def softmax_over_the_batch(trace: Path) -> bytes:
    return with_only("aten.softmax.int", [0, 0, None])


def reshape_across_samples(trace: Path) -> bytes:
    sizes = [3, {"batch": 1, "constant": 0}, 8, 8]
    return with_only("aten.reshape.default", [0, sizes])


def forward_reference(trace: Path) -> bytes:
    return with_only("aten.relu.default", [1])


def lookup_of_computed_ids(trace: Path) -> bytes:
    """An id beyond the table would end a GPU's process."""
    graph = json.loads(members()["graph.json"])
    weight, first = graph["calls"][0][2][1], graph["weights"] + 1
    calls = [
        [first, "aten.reshape.default", [weight, [4, 27]]],
        [first + 1, "aten._to_copy.default", [0, "int64"]],
        [first + 2, "aten.embedding.default", [first, first + 1]],
    ]
    hapi = json.loads(members()["hapi.json"])
    hapi |= {"names": ["x"] * len(calls), "cuts": []}
    return repack(
        hapi=json.dumps(hapi).encode(),
        graph=json.dumps(graph | {"calls": calls}).encode(),
    )


def number_out_of_range(trace: Path) -> bytes:
    return repack(graph=b'{"weights":0,"calls":[[1,"x",[1e999]]]}')


def not_a_number(trace: Path) -> bytes:
    return repack(graph=b'{"weights":0,"calls":[[1,"x",[NaN]]]}')


def repeated_key(trace: Path) -> bytes:
    return repack(graph=b'{"weights":0,"weights":1,"calls":[]}')


def deep_nesting(trace: Path) -> bytes:
    return repack(graph=b"[" * 1_000_000)


def huge_integer(trace: Path) -> bytes:
    return repack(graph=b'{"weights":' + b"9" * 100_000 + b',"calls":[]}')


def ten_million_nodes(trace: Path) -> bytes:
    call = b'[1,"aten.relu.default",[0]],'
    calls = call * 10_000_000
    return repack(graph=b'{"weights":0,"calls":[' + calls[:-1] + b"]}")


def too_many_nodes(trace: Path) -> bytes:
    calls = [[i, "aten.relu.default", [i - 1]] for i in range(1, 20_002)]
    return repack(graph=json.dumps({"weights": 0, "calls": calls}).encode())


def huge_intermediate(trace: Path) -> bytes:
    sizes = [{"batch": 1, "constant": 0}, 1 << 21, 3, 8, 8]
    calls = [
        [1, "aten.unsqueeze.default", [0, 1]],
        [2, "aten.expand.default", [1, sizes]],
        [3, "aten.contiguous.default", [2]],
    ]
    return _program(calls)


def endless_work(trace: Path) -> bytes:
    batch = {"batch": 1, "constant": 0}
    calls: list[list[Any]] = [
        [1, "aten.slice.Tensor", [0, 1, 0, 1, 1]],
        [2, "aten.slice.Tensor", [1, 2, 0, 1, 1]],
        [3, "aten.slice.Tensor", [2, 3, 0, 1, 1]],
        [4, "aten.reshape.default", [3, [batch, 1, 1]]],
        [5, "aten.expand.default", [4, [batch, 16384, 16384]]],
        [6, "aten.matmul.default", [5, 5]],
        [7, "aten.matmul.default", [6, 6]],
    ]
    return _program(calls)


def overflowing_size(trace: Path) -> bytes:
    huge = (1 << 62) - 1
    return with_only("aten.pad.default", [0, [huge, huge], None])


def wrong_cut_shape(trace: Path) -> bytes:
    def change(hapi: Document) -> None:
        hapi["cuts"][0]["shape"] = [4, 1, 1]

    return with_hapi(change)


def missing_cut(trace: Path) -> bytes:
    return with_hapi(lambda hapi: hapi["cuts"].pop())


def wrong_sample_shape(trace: Path) -> bytes:
    return with_hapi(lambda hapi: hapi.update(sample=[3, 9, 9]))


def hostile_transform(trace: Path) -> bytes:
    transform = {
        "resize_size": 1 << 40,
        "crop_size": 8,
        "mean": [0, 0, 0],
        "std": [1, 1, 1],
        "interpolation": "bilinear",
        "antialias": True,
    }
    return with_hapi(lambda hapi: hapi.update(transform=transform))


def hostile_augmentation(trace: Path) -> bytes:
    """Crops a column a million times as high as wide."""
    augmentation = Augmentation().to_json() | {"ratio": [1e-6, 1e-6]}
    transform = ImageTransform(8, 8).to_json()
    transform["augmentation"] = augmentation
    return with_hapi(lambda hapi: hapi.update(transform=transform))


def overlapping_tensors(trace: Path) -> bytes:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    count = json.loads(members()["graph.json"])["weights"]
    header = {str(node): entry for node in range(1, count + 1)}
    text = json.dumps(header).encode()
    return repack(weights=struct.pack("<Q", len(text)) + text + bytes(16))


def wrong_tensor_size(trace: Path) -> bytes:
    weights = members()["weights.safetensors"]
    return repack(weights=weights.replace(b'"shape":[4]', b'"shape":[9]', 1))


def truncated_weights(trace: Path) -> bytes:
    return repack(weights=members()["weights.safetensors"][:-4])


def duplicate_member(trace: Path) -> bytes:
    content = members()
    graph = ("graph.json", content["graph.json"])
    return _zipped([("hapi.json", content["hapi.json"]), graph, graph])


def fourth_member_of_the_same_name(trace: Path) -> bytes:
    return _zipped([*members().items(), ("graph.json", b"{}")])


def deflated_member(trace: Path) -> bytes:
    return _zipped(list(members().items()), zipfile.ZIP_DEFLATED)


def encrypted_member(trace: Path) -> bytes:
    return _patched_directory(8, "<H", 1)


def overlapping_members(trace: Path) -> bytes:
    return _patched_directory(42, "<I", 0, entry=1)


def wrong_member_size(trace: Path) -> bytes:
    return _patched_directory(20, "<I", 0x7FFFFFFF)


def wrong_member_sizes(trace: Path) -> bytes:
    return _patched_directory(20, "<II", 0x7FFFFFFF, 0x7FFFFFFF, entry=2)


def wrong_checksum(trace: Path) -> bytes:
    return _patched_directory(16, "<I", zlib.crc32(b"other"))


def prepended_bytes(trace: Path) -> bytes:
    return b"#!/bin/sh\n" + valid_package()


def appended_bytes(trace: Path) -> bytes:
    return valid_package() + b"\n"


def comment(trace: Path) -> bytes:
    return valid_package()[:-2] + struct.pack("<H", 5) + b"hello"


def not_a_zip(trace: Path) -> bytes:
    return pickle.dumps(_Touch(trace))


def empty(trace: Path) -> bytes:
    return b""


def truncated_package(trace: Path) -> bytes:
    return valid_package()[:-100]


def _program(calls: list[list[Any]]) -> bytes:
    hapi = json.loads(members()["hapi.json"])
    hapi |= {"names": ["x"] * len(calls), "cuts": []}
    weights = b"{}"
    return repack(
        hapi=json.dumps(hapi).encode(),
        graph=json.dumps({"weights": 0, "calls": calls}).encode(),
        weights=struct.pack("<Q", len(weights)) + weights,
    )


def _zipped(
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


def _patched_directory(
    offset: int, layout: str, *values: int, entry: int = 0
) -> bytes:
    """Changes a field of a directory entry (offsets: APPNOTE 4.3.12)."""
    data = bytearray(valid_package())
    position = -1
    for _ in range(entry + 1):
        position = data.index(b"PK\x01\x02", position + 1)
    struct.pack_into(layout, data, position + offset, *values)
    return bytes(data)


HOSTILE: Mapping[Callable[[Path], bytes], str] = MappingProxyType(
    {
        pickled_member: "its header has an invalid length",
        pickled_graph: "graph.json is not acceptable JSON",
        extra_member: "4 members instead of 3",
        expression_as_size: "argument 'shape' .* must be an integer",
        expression_in_affine: "argument 'shape' .* must be an integer",
        guard_string: "must be an object of 'weights' and 'calls'",
        range_constraints: "hapi.json must have",
        operator_path: "'torch.hub.load' is not in the table",
        from_file_operator: "'aten.from_file.default' is not in the table",
        operator_of_another_namespace: "'os.system.default' is not in",
        attribute_walk_operator: "__globals__' is not in the table",
        custom_operator: "'hapi.touch.default' is not in the table",
        call_id_injection: "ids must be consecutive",
        cut_name_injection: "'names' must be",
        weight_name_injection: "tensors must be named 1 to",
        dtype_injection: "argument 'dtype' .* must be null or one of",
        conversion_to_float64: "argument 'dtype' .* must be null or one of",
        weights_of_float64: "has the unsupported dtype 'F64'",
        weights_of_float16: "has the unsupported dtype 'F16'",
        product_of_integers: "matmul.default: its argument 'self' is of "
        "torch.int64",
        in_place_operator: "'aten.relu_.default' is not in the table",
        out_operator: "'aten.add.out' is not in the table",
        random_operator: "'aten.rand_like.default' is not in the table",
        dropout_in_attention: "argument 'dropout_p' .* must be 0",
        roll_over_the_batch: "would mix samples: it acts on the batch",
        flip_of_the_batch: "would mix samples: it acts on the batch",
        softmax_over_the_batch: "would mix samples: it acts on the batch",
        reshape_across_samples: "would mix samples: it moves entries",
        lookup_of_computed_ids: "it must look up unchanged int64 ids",
        forward_reference: "must be the id of an earlier tensor",
        number_out_of_range: "out of range",
        not_a_number: "NaN is not a number",
        repeated_key: "a key is repeated",
        deep_nesting: "nested too deeply",
        huge_integer: "not acceptable JSON",
        ten_million_nodes: r"graph.json has \d+ bytes, more than the limit",
        too_many_nodes: "20001 calls .* limit of 20000 nodes",
        huge_intermediate: "bytes per sample exceeds the limit",
        endless_work: r"limit of \d+ floating-point operations",
        overflowing_size: "cannot run",
        wrong_cut_shape: "records .* for cut 1, expected",
        missing_cut: "must record . cuts",
        wrong_sample_shape: "cannot run: shape .* is invalid",
        hostile_transform: "resize_size must be 1 to",
        hostile_augmentation: "ratio must be two numbers",
        overlapping_tensors: "shape and offsets do not match|overlap",
        wrong_tensor_size: "shape and offsets do not match",
        truncated_weights: "ends after the file",
        duplicate_member: "'graph.json' instead of weights.safetensors",
        fourth_member_of_the_same_name: "4 members instead of 3",
        deflated_member: "is compressed, not stored",
        encrypted_member: "is encrypted",
        overlapping_members: "overlaps another",
        wrong_member_size: "has two different sizes",
        wrong_member_sizes: "ends after the file",
        wrong_checksum: "header differs from the directory",
        prepended_bytes: "directory is not at the end",
        appended_bytes: "comment or bytes after its end",
        comment: "comment or bytes after its end",
        not_a_zip: "not a zip file",
        empty: "not a zip file",
        truncated_package: "not a zip file",
    }
)
"""Regular expression of the refusal's message, by attack."""
