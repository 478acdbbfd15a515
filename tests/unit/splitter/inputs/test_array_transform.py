"""The input transform of NumPy arrays."""

import io
import pickle
import re
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from array_networks import npy
from hapi_protocol.samples import SampleError
from hapi_splitter.inputs.array_transform import (
    MAX_HEADER_BYTES,
    STORABLE_DTYPES,
    ArrayTransform,
)
from hapi_splitter.inputs.sample_format import transform_from_json

MATRIX = ArrayTransform((2, 3))
IDS = ArrayTransform((4,), "int64")


def header(text, version=(1, 0)):
    """Returns a ``.npy`` header with any text."""
    data = text.encode("latin1")
    size = struct.pack("<H" if version == (1, 0) else "<I", len(data))
    return b"\x93NUMPY" + bytes(version) + size + data


def header_with(shape=(2, 3), descr="<f4", fortran=False):
    fields = {"descr": descr, "fortran_order": fortran, "shape": shape}
    return header(f"{fields!r}\n")


@given(st.data())
def test_stored_values_are_converted_to_the_models_dtype(data):
    dtype = data.draw(st.sampled_from(sorted(STORABLE_DTYPES)))
    stored = np.dtype(data.draw(st.sampled_from(STORABLE_DTYPES[dtype])))
    order = data.draw(st.sampled_from("<>"))
    shape = data.draw(arrays_of.array_shapes(max_dims=5, max_side=3))
    array = data.draw(arrays_of.arrays(stored.newbyteorder(order), shape))
    if data.draw(st.booleans()):
        array = np.asfortranarray(array)
    sample = ArrayTransform(shape, dtype).read(npy(array))
    expected = torch.from_numpy(array.astype(dtype, order="C"))
    assert sample.dtype == expected.dtype
    assert sample.is_contiguous()
    # Bit for bit, including NaN payloads and both zeros.
    assert sample.numpy().tobytes() == expected.numpy().tobytes()


def test_format_version_2_is_read_to_memory_of_its_own():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.lib.format.write_array(sink := io.BytesIO(), array, version=(2, 0))
    for data in (sink.getvalue(), npy(array)):
        MATRIX.read(data).add_(1)
        assert torch.equal(MATRIX.read(data), torch.from_numpy(array))


GOOD = npy(np.zeros((2, 3), np.float32))
STORABLE = (
    "which may be stored as float32, float16, int16, int8, uint16, uint8"
)


class Payload:
    """A pickle that ends the process if it is loaded."""

    def __reduce__(self):
        return (exec, ("raise SystemExit",))


def with_pickle():
    array = np.empty((2, 3), object)
    array[0, 0] = Payload()
    np.save(sink := io.BytesIO(), array, allow_pickle=True)
    return sink.getvalue()


CODE = "{'descr': exit(), 'fortran_order': 0, 'shape': (2, 3)}"
LONG_INTEGERS = "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L)}"
OF_24 = "bytes of values, expected 24 for (2, 3) of float"
UNREADABLE = "damaged .npy: unreadable header"


BAD = {
    "no array": (b"RIFF....", "not a NumPy array (.npy)"),
    "nothing": (b"", "not a NumPy array (.npy)"),
    "pickle": (pickle.dumps(Payload()), "not a NumPy array (.npy)"),
    "zip of arrays": (b"PK\x03\x04" + GOOD, "not a NumPy array (.npy)"),
    "other version": (header("{}", (3, 0)), "a .npy of format 3.0; supp"),
    "cut in its header": (GOOD[:40], "truncated .npy: the header is inc"),
    "cut in its values": (GOOD[:-1], f"truncated .npy: 23 {OF_24}"),
    "more than its values": (GOOD + b"x", f"damaged .npy: 25 {OF_24}"),
    "no values": (header_with(), "truncated .npy: 0 bytes of values"),
    "long header": (
        header(" " * (MAX_HEADER_BYTES + 1)),
        f"a .npy header of {MAX_HEADER_BYTES + 1} bytes; at most 1024",
    ),
    "huge header": (
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        "a .npy header of 4294967295 bytes; at most 1024",
    ),
    "nested header": (header("(" * 1000), UNREADABLE),
    "signs": (header("-" * 1000 + "1"), UNREADABLE),
    "no dictionary": (header("[1, 2]"), UNREADABLE),
    "code": (header(CODE), UNREADABLE),
    "missing field": (header("{'shape': (2, 3)}"), UNREADABLE),
    "no dtype": (header_with(descr="<q9"), UNREADABLE),
    "no flag": (header_with(fortran=7), UNREADABLE),
    "Python 2": (header(LONG_INTEGERS), "a .npy header of Python 2; save"),
    "other shape": (
        npy(np.zeros((3, 2), np.float32)),
        "an array of shape (3, 2); the model takes (2, 3)",
    ),
    "one number": (npy(np.float32(1)), "an array of shape ()"),
    "more than there is memory": (
        header_with((1 << 40, 1 << 40)),
        "an array of shape (1099511627776, 1099511627776); the model takes",
    ),
    "negative shape": (header_with((-2, -3)), "an array of shape (-2, -3)"),
    "wider values": (
        npy(np.zeros((2, 3))),
        f"an array of float64; the model takes float32, {STORABLE}",
    ),
    "whole numbers": (npy(np.zeros((2, 3), np.int32)), "an array of int32;"),
    "complex": (npy(np.zeros((2, 3), np.complex64)), "an array of complex64"),
    "truth": (npy(np.zeros((2, 3), bool)), "an array of bool;"),
    "text": (npy(np.full((2, 3), "a")), "an array of str32;"),
    "objects": (with_pickle(), "an array of object;"),
    "fields": (npy(np.zeros((2, 3), [("a", "<f4")])), "an array of void32;"),
    "wide rows": (
        header_with(descr=("<f4", (1 << 20,))),
        "an array of void33554432;",
    ),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD)
def test_invalid_array_is_refused(data, message):
    with pytest.raises(SampleError) as caught:
        MATRIX.read(data)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_claimed_size_is_not_allocated():
    transform = ArrayTransform((1 << 20, 64))
    tracemalloc.start()
    try:
        with pytest.raises(SampleError, match="truncated"):
            transform.read(header_with((1 << 20, 64)) + b"x" * 1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 2, 9], None),
        ([-7, 1, 2, 9], None),
        ([0, 1, 2, 10], "the id 10 at [3]; the model accepts ids from 0 to 9"),
        ([0, 5, 2, 10], "the id 5 at [1]; the model accepts ids from 0 to 4"),
        ([0, -1, 2, 10], "the id -1 at [1]; the model accepts ids from 0"),
        ([0, 1, 2, 2**63 - 1], f"the id {2**63 - 1} at [3];"),
    ],
)
def test_ids_outside_the_models_limits_are_refused(ids, message):
    data = npy(np.array(ids))
    assert IDS.read(data).tolist() == ids
    limits = torch.tensor([0, 5, 10, 10])
    if message is None:
        assert IDS.read(data, limits).tolist() == ids
        return
    with pytest.raises(SampleError, match=re.escape(message)):
        IDS.read(data, limits)


@pytest.mark.parametrize("dtype", ["uint64", "float32"])
def test_dtypes_that_lose_ids_are_refused(dtype):
    with pytest.raises(SampleError, match=f"an array of {dtype}"):
        IDS.read(npy(np.zeros(4, dtype)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": [2, 3]}, "shape must be a tuple"),
        ({"shape": ()}, "1 to 5 whole numbers"),
        ({"shape": (1,) * 6}, "1 to 5 whole numbers"),
        ({"shape": (0,)}, "from 1 to"),
        ({"shape": (True,)}, "whole numbers"),
        ({"shape": (2.0,)}, "whole numbers"),
        ({"shape": (1 << 21,)}, "from 1 to 1048576"),
        ({"shape": (1 << 20, 1 << 10)}, "take 4294967296 bytes each"),
        ({"dtype": "float64"}, "float32, int64, not 'float64'"),
        ({"dtype": "int32"}, "one of float32, int64"),
        ({"dtype": 3}, "not 3"),
        ({"dtype": ["int64"]}, "one of float32, int64"),
    ],
)
def test_invalid_transform_is_refused(fields, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        ArrayTransform(**{"shape": (2, 3), **fields})


def test_transform_survives_json():
    for transform in (MATRIX, IDS):
        assert transform_from_json(transform.to_json()) == transform


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"shape": [2]}, "the fields dtype, shape"),
        (
            {"shape": [2], "dtype": "int64", "mean": 0},
            "the fields dtype, shape",
        ),
        ({"shape": 2, "dtype": "int64"}, "shape must be a tuple"),
        ({"shape": [2], "dtype": None}, "dtype must be"),
        ({"shape": [{}], "dtype": "int64"}, "shape must be"),
        ([2], "is an object with the fields"),
        ("npy", "is an object with the fields"),
    ],
)
def test_untrusted_json_is_checked(document, message):

    with pytest.raises(ValueError, match=message):
        transform_from_json(document)
