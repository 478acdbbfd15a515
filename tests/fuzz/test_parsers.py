"""Parsers of what others wrote: damaged input ends in a documented error.

Each target changes valid input at random, from a seed of its own.
``HAPI_FUZZ_CASES`` sets the number of cases of each; a crash ends pytest.
"""

import contextlib
import functools
import io
import json
import random
import tarfile
import zipfile
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, features

from fuzzing import damaged, fuzz
from hapi_client.data.loose_objects import object_labels
from hapi_client.swift.swift_url import parse_location
from hapi_protocol import data_index
from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import (
    AnnotationError,
    DataIndexError,
    LabelError,
    PackageError,
    TruncatedStreamError,
    UnavailableError,
    UnsupportedError,
)
from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import Row, feature_schema, index_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.headers import REQUEST_HEADERS, parse_annotation
from hapi_protocol.job_messages import JobRequest
from hapi_protocol.multi_object import (
    END,
    ObjectEntry,
    entry_member,
    iter_objects,
    object_header,
    padding,
)
from hapi_protocol.samples import IMAGE, SNIFF_BYTES, SampleError, sniff
from hapi_protocol.shards import iter_samples
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_header import FORMATS
from hapi_splitter.inputs.named_arrays import NamedArrays
from hapi_splitter.package.reader import load_package
from hostile import framed, parts, repack, valid_package
from photos import shard
from worker_under_test import job_for

KINDS = [k for k in FORMATS if k != "avif" or features.check("avif")]


def tar() -> bytes:
    """A shard with what tars may have: long names, pax records, labels."""
    sink = io.BytesIO(shard(2, size=16))
    with tarfile.open(
        fileobj=sink, mode="a", format=tarfile.PAX_FORMAT
    ) as archive:
        for name, data in (
            ("é" * 90 + "/k.jpg", b"x"),
            ("n.json", b'{"cls": 12}'),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.pax_headers = {"comment": "12"}
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def read_tar(data: bytes) -> None:
    for sample in iter_samples(io.BytesIO(data), name="s.tar"):
        sample.label_and_meta()
        sample.image_error()


def index() -> bytes:
    rows = tuple(IndexRow(n, f"k{n}", 512 * n, 512, n) for n in range(9))
    shards = (ShardIndex("a.tar", "e", rows), ShardIndex("b.tar", "f", ()))
    return DataIndex(shards, ("cat", "dog")).to_bytes()


def read_index(data: bytes) -> None:
    found = DataIndex.from_bytes(data)
    found.spans()
    found.to_bytes()


ODD = (None, True, [], {}, [1], "", "x" * 70_000, 2**70, {"a": [None]})


def odd_index(chance: random.Random) -> bytes:
    """Batches and metadata that no release of ours writes."""
    schema = data_index._schema()
    facts = {
        "version": data_index.INDEX_VERSION,
        "class_names": ["cat"],
        "labels": "cls",
        "labels_are_names": False,
        "empty": {"e.tar": "e"},
        "objects": {},
    }
    for name in chance.sample(sorted(facts), chance.choice((0, 0, 1, 2))):
        facts[name] = chance.choice(ODD)
    names = ("a.tar", "a.tar", "b.tar", "", ".", "../x", "a\0", "k" * 5000)
    numbers = (0, 1, 512, 512, -1, 2**31 - 1, 2**50, 2**62)
    options = pa.ipc.IpcWriteOptions(
        compression=chance.choice((None, None, None, "zstd", "lz4"))
    )
    sink = io.BytesIO()
    metadata = {data_index._METADATA: json.dumps(facts).encode()}
    with pa.ipc.new_stream(
        sink, schema.with_metadata(metadata), options=options
    ) as writer:
        for _ in range(chance.choice((0, 1, 2, 30))):
            count = chance.choice((0, 1, 2, 200))
            zeros = pa.array([0] * count, pa.int32())
            length = chance.choice((512, 512, chance.choice(numbers)))
            offsets = [n * 512 for n in range(count)]
            if chance.random() < 0.2 and count:
                offsets[-1] = chance.choice(numbers)
            columns = [
                pa.DictionaryArray.from_arrays(
                    zeros, pa.array([chance.choice(names)])
                ),
                pa.DictionaryArray.from_arrays(zeros, pa.array(["e"])),
                pa.array([*range(count)], pa.int32()),
                pa.array(["k"] * count, pa.utf8()),
                pa.array(offsets, pa.int64()),
                pa.array([length] * count, pa.int64()),
                pa.array([None] * count, pa.int64()),
                pa.array([None] * count, pa.uint32()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    data = sink.getvalue()
    return damaged(chance, data) if chance.random() < 0.3 else data


def stream(*, has_features: bool = True) -> bytes:
    sink = io.BytesIO()
    schema = feature_schema((4,), "uint8") if has_features else index_schema()
    writer = FeatureStreamWriter(sink, schema)
    rows = [Row(n, f"k{n}", n, "{}", None, 512 * n, 512) for n in range(5)]
    if has_features:
        rows[2] = Row(2, "k2", None, None, "an error")
        scales = np.ones((4, 1), np.float32)
        values = np.zeros((4, 4), np.uint8)
        writer.write(rows, values, {"read": 0.5}, scale=scales, zero=scales)
    else:
        writer.write(rows, None, {"read": 0.5})
    writer.close(source_etag="e", source_bytes=99)
    return sink.getvalue()


def package_of(chance: random.Random) -> bytes:
    """A package around a damaged part, or a damaged package."""
    name = chance.choice((None, "header", "hapi", "graph", "data"))
    package = valid_package()
    if name is None:
        return damaged(chance, package)
    if name == "header":
        end = len(package) - len(parts()["data"])
        return framed(damaged(chance, package[8:end])) + package[end:]
    return repack(**{name: damaged(chance, parts()[name])})


def headers_of(chance: random.Random) -> dict[str, str]:
    valid = {
        "X-Hapi-Model": "/AUTH_a/models/m.hapi",
        "X-Hapi-Cut": "3",
        "X-Hapi-Encoding": "uint8;lz4",
        "X-Hapi-Transform": "train;seed=1;epoch=2",
        "X-Hapi-Samples": "0-63",
        "X-Hapi-Range": "bytes=0-511",
        "X-Hapi-If-Source-Etag": '"e"',
        "X-Hapi-Cache": "read",
    }
    for name in chance.sample(sorted(valid), chance.choice((1, 2, 3))):
        text = damaged(chance, valid.pop(name).encode()).decode("latin-1")
        valid[chance.choice((name, *REQUEST_HEADERS))] = text
    return valid


NAMES = [f"d/{folder}/{n}.jpg" for folder in "ab" for n in range(4)]


def label_table(chance: random.Random) -> tuple[str, bytes]:
    """A name and content of a table, sometimes of another kind."""
    rows = [
        (chance.choice((name[2:], f"./{name[2:]}", name[-5:])), number % 2)
        for number, name in enumerate(NAMES)
    ]
    csv = "file_name,label\n" + "".join(f"{n},{k}\n" for n, k in rows)
    lines = "".join(
        json.dumps({"file_name": n, "label": k}) + "\n" for n, k in rows
    )
    text = chance.choice((csv, lines))
    if chance.random() < 0.2:
        text = text.replace("\n", "\r").replace(",", chance.choice(";\t"))
    return (
        chance.choice(("labels.csv", "labels.jsonl")),
        damaged(chance, text.encode(chance.choice(("utf-8", "utf-16")))),
    )


def read_label_table(table: tuple[str, bytes]) -> None:
    name, content = table
    opened = contextlib.nullcontext(io.BytesIO(content))
    text_of, note = object_labels(
        SimpleNamespace(open=lambda *_: opened),
        parse_location("swift://c/d"),
        name,
        NAMES,
    )
    assert note
    for each in NAMES:
        text_of(each)


def npy() -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.zeros((2, 3), np.float32))
    return sink.getvalue()


def npz() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.npy", npy())
        archive.writestr("b.npy", npy())
    return sink.getvalue()


def objects() -> bytes:
    entries = [ObjectEntry(n, f"o{n}", 200, "e") for n in range(2)]
    data = b"image"
    return (
        b"".join(
            entry_member(each, each.index)
            + object_header(each.index, len(data))
            + data
            + padding(len(data))
            for each in entries
        )
        + END
    )


ARRAY = ArrayTransform((2, 3))
ARRAYS = NamedArrays.of(a=ARRAY, b=ARRAY)


def job() -> bytes:
    return job_for(b"source").to_body()


def image(kind: str) -> bytes:
    sink = io.BytesIO()
    colours = np.random.default_rng(0).integers(0, 255, (24, 24, 3), np.uint8)
    options = {"progressive": True} if kind == "jpeg" else {}
    Image.fromarray(colours).save(sink, kind.upper(), **options)
    return sink.getvalue()


READERS = {
    "tar": (tar, read_tar, UnsupportedError),
    "index": (index, read_index, DataIndexError),
    "features": (
        stream,
        lambda data: list(read_features(data)),
        TruncatedStreamError,
    ),
    "index stream": (
        functools.partial(stream, has_features=False),
        lambda data: list(read_features(data)),
        TruncatedStreamError,
    ),
    "npy": (npy, ARRAY.read, SampleError),
    "npz": (npz, ARRAYS.read, SampleError),
    "objects": (
        objects,
        lambda data: list(iter_objects(io.BytesIO(data), 2, 1000)),
        AnnotationError,
    ),
    "job": (
        job,
        JobRequest.from_body,
        (AnnotationError, UnavailableError),  # of another version
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_refused(name):
    make, read, allowed = READERS[name]
    valid = make()
    read(valid)
    fuzz(name, lambda chance: damaged(chance, valid), read, allowed)


def test_damaged_packages_are_refused():
    load_package(valid_package())
    fuzz("package", package_of, load_package, PackageError)


def test_damaged_tables_of_labels_are_refused():
    fuzz("labels", label_table, read_label_table, LabelError)


def test_odd_indexes_are_refused():
    fuzz("odd index", odd_index, read_index, DataIndexError)


def test_damaged_headers_are_refused():
    fuzz(
        "headers",
        headers_of,
        lambda headers: parse_annotation(headers, "AUTH_a"),
        AnnotationError,
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_images_are_refused(kind):
    valid = image(kind)
    decode_image(valid)

    def read(data):
        if sniff(data[:SNIFF_BYTES]) in IMAGE.kinds:
            decode_image(data, max_pixels=1 << 20)
        else:
            raise SampleError("no image")

    fuzz(kind, lambda chance: damaged(chance, valid), read, SampleError)


def test_damage_is_seen():
    """A parser that swallows everything would not pass."""
    with pytest.raises(AssertionError, match="nothing"):
        fuzz("nothing", lambda _: b"", lambda _: None, ValueError)
    with pytest.raises(AssertionError, match="case 0 of keys"):
        fuzz(
            "keys", lambda _: b"", lambda _: json.loads(b"{}")["a"], ValueError
        )
