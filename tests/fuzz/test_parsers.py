"""Parsers of what others wrote: damaged input ends in a documented error.

Each target changes valid input at random, from a seed of its own.
``HAPI_FUZZ_CASES`` sets the number of cases of each; a crash ends pytest.
"""

import functools
import io
import json
import os
import random
import tarfile
import time
import zipfile

import numpy as np
import pytest
from PIL import Image, features

from hapi_protocol.data_index import DataIndex, IndexRow, ShardIndex
from hapi_protocol.errors import (
    AnnotationError,
    DataIndexError,
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
from hapi_splitter.inputs.image_decode import FORMATS, decode_image
from hapi_splitter.inputs.named_arrays import NamedArrays
from hapi_splitter.package.reader import load_package
from hostile import members, repack, valid_package
from photos import shard
from worker_under_test import job_for

CASES = int(os.environ.get("HAPI_FUZZ_CASES", "2000"))
MAX_SECONDS = 1.0
"""Longest CPU time of one case."""
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)
NUMBERS += (2**63 - 1, 2**63, 2**64 - 1)


KINDS = [k for k in FORMATS if k != "avif" or features.check("avif")]


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Changes bits, numbers, digits and pieces of some bytes."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        if not changed:
            break
        place = chance.randrange(len(changed))
        kind = chance.randrange(7)
        if kind == 0:
            changed[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[place] = chance.choice(b'\0\xff 09-{["\n\x1b')
        elif kind == 2:
            size = chance.choice((1, 2, 4, 8))
            number = chance.choice(NUMBERS) % 256**size
            order = chance.choice(("little", "big"))
            changed[place : place + size] = number.to_bytes(size, order)
        elif kind == 3:
            del changed[place : place + chance.choice((1, 4, 64, 512))]
        elif kind == 4:
            piece = changed[place : place + chance.choice((1, 4, 64, 512))]
            changed[place:place] = piece * chance.choice((1, 2, 50))
        elif kind == 5:
            del changed[place:]
        else:
            digits = b"9" * chance.choice((1, 20, 400, 60_000))
            changed[place:place] = digits
    return bytes(changed)


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
    """A container around a damaged member, or a damaged container."""
    name = chance.choice((None, *members()))
    if name is None:
        return damaged(chance, valid_package())
    content = damaged(chance, members()[name])
    return repack(**{name.partition(".")[0]: content})


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


def fuzz(name, make, read, allowed):
    """Reads damaged input, each case within the limit of time."""
    chance = random.Random(name)
    refused = 0
    for number in range(CASES):
        data = make(chance)
        started = time.thread_time()
        try:
            read(data)
        except allowed:
            refused += 1
        except Exception as error:
            raise AssertionError(f"case {number} of {name}") from error
        seconds = time.thread_time() - started
        assert seconds < MAX_SECONDS, (name, number, seconds)
    # Else nothing was damaged.
    assert refused > CASES / 20, (name, refused)


@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_refused(name):
    make, read, allowed = READERS[name]
    valid = make()
    read(valid)
    fuzz(name, lambda chance: damaged(chance, valid), read, allowed)


def test_damaged_packages_are_refused():
    load_package(valid_package())
    fuzz("package", package_of, load_package, PackageError)


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
