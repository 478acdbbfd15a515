"""Texts of encodings, precision floors, and groups of values."""

import pytest

from hapi_protocol.encodings import (
    DTYPES,
    ENCODINGS,
    PRECISIONS,
    Encoding,
    allowed_encodings,
    num_groups,
)
from hapi_protocol.errors import AnnotationError


def test_encodings_combine_every_dtype_and_compression():
    assert len(ENCODINGS) == len(set(ENCODINGS)) == 12
    assert (
        ENCODINGS[:4] == DTYPES == ("float32", "float16", "bfloat16", "uint8")
    )
    assert set(ENCODINGS[4:]) == {
        f"{dtype};{compression}"
        for dtype in DTYPES
        for compression in ("lz4", "zstd")
    }
    assert [str(Encoding.parse(text)) for text in ENCODINGS] == list(ENCODINGS)
    assert str(Encoding.parse("uint8;none")) == "uint8"
    assert Encoding.parse("uint8;none") == Encoding("uint8")


@pytest.mark.parametrize(
    "text",
    [
        *("", "float", "Float32", "uint8;", "uint8; zstd", "uint8;zstd;lz4"),
        *(";zstd", "zstd", "uint8,zstd", "x" * 5000),
    ],
)
def test_unknown_encoding_is_refused_with_the_allowed_ones(text):
    with pytest.raises(AnnotationError) as caught:
        Encoding.parse(text, what="the encoding of the test")
    assert caught.value.code == "unknown_encoding"
    assert caught.value.details["allowed"] == list(ENCODINGS)
    assert "the encoding of the test is '" in caught.value.message
    assert all(known in caught.value.message for known in ENCODINGS)
    assert len(caught.value.to_body()) < 2000


def test_encoding_of_unknown_parts_is_refused():
    with pytest.raises(AnnotationError, match="'int4;none'"):
        Encoding("int4")
    with pytest.raises(AnnotationError, match="'uint8;gzip'"):
        Encoding("uint8", "gzip")


def test_floor_allows_encodings_that_are_precise_enough():
    allowed = [set(allowed_encodings(floor)) for floor in PRECISIONS]
    assert allowed[0] == {"float32", "float32;lz4", "float32;zstd"}
    assert allowed[0] < allowed[1] < allowed[2] == set(ENCODINGS)
    assert allowed[1] - allowed[0] == {
        text for text in ENCODINGS if "float16" in text
    }
    of_half = allowed_encodings("lossless", "bfloat16")
    assert of_half[0] == "bfloat16"
    assert {text for text in of_half if "float16" not in text} == allowed[0]
    assert not any(text.startswith("float16") for text in of_half)
    with pytest.raises(ValueError, match="lossless, half, uint8"):
        allowed_encodings("int8")


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((), 1),
        ((1,), 1),
        ((512,), 1),
        ((64, 7, 7), 64),
        ((64, 4, 8), 64),
        ((64, 31), 1),
        ((64, 1, 1), 1),
        ((197, 768), 197),
        ((0, 100), 1),
        ((100, 0), 1),
    ],
)
def test_channel_is_a_group_from_32_values_on(shape, groups):
    assert num_groups(shape) == groups
