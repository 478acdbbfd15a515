"""Annotations: accepted and refused headers."""

import pytest

from hapi_protocol.errors import AnnotationError
from hapi_protocol.headers import (
    Annotation,
    ByteRange,
    ModelPath,
    SampleRange,
    is_annotated,
    parse_annotation,
)

MINIMAL = {"X-Hapi-Model": "models/abc.hapi", "X-Hapi-Cut": "3"}
SPAN = {"Range": "bytes=0-5"}
RANGED = SPAN | {"Samples": "0-1", "If-Source-Etag": "e"}


def parse(**changed):
    named = {f"X-Hapi-{name}": value for name, value in changed.items()}
    return parse_annotation({**MINIMAL, **named}, "AUTH_test")


def test_defaults_are_used_when_only_model_and_cut_are_given():
    assert parse() == Annotation(
        model=ModelPath("AUTH_test", "models", "abc.hapi"), cut=3
    )
    upper = {name.upper(): value for name, value in MINIMAL.items()}
    assert parse_annotation(upper, "AUTH_test") == parse()


@pytest.mark.parametrize(
    "model",
    [
        ModelPath("AUTH_a", "c", "o"),
        ModelPath("AUTH_a", "c c", "deep/er/o"),
        ModelPath("AUTH_a", "c", "ünï/%2F?&"),
        ModelPath("o", "o", "o/o"),
    ],
)
def test_annotation_survives_its_own_headers(model):
    annotation = Annotation(
        model=model,
        cut=7,
        encoding="float16",
        transform="train;seed=3;epoch=0",
        samples=SampleRange(3, 9),
        byte_range=ByteRange(512, 1023),
        crc32s=(0, *range(2**32 - 6, 2**32)),
        if_source_etag="d41d8",
    )
    headers = annotation.to_headers()
    assert parse_annotation(headers, "AUTH_other") == annotation


def test_index_request_needs_no_model():
    annotation = parse_annotation({"X-Hapi-Index": "true"}, "AUTH_test")
    assert annotation.index
    assert annotation.model is None
    assert annotation.to_headers() == {"X-Hapi-Index": "true"}


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"Modle": "x"}, "bad_annotation", "X-Hapi-Modle"),
        ({"Model": ""}, "bad_model", "missing"),
        ({"Model": "only-a-container"}, "bad_model", "only-a-"),
        ({"Model": "/AUTH_a/c"}, "bad_model", "/AUTH_a/c"),
        ({"Model": "/AUTH_a/../o"}, "bad_model", ".."),
        ({"Model": "c/o%00"}, "bad_model", "%00"),
        ({"Model": "c/%ff"}, "bad_model", "%ff"),
        ({"Cut": "0"}, "bad_cut", "'0'"),
        ({"Cut": "-1"}, "bad_cut", "'-1'"),
        ({"Cut": "two"}, "bad_cut", "'two'"),
        ({"Cut": "٣"}, "bad_cut", "'٣'"),
        ({"Cut": "9" * 30}, "bad_cut", "999"),
        ({"Encoding": "int4"}, "unknown_encoding", "float32"),
        ({"Encoding": "uint8;zip"}, "unknown_encoding", "X-Hapi-Encoding is"),
        ({"Transform": "train"}, "unknown_transform", "eval"),
        ({"Transform": "t;"}, "unknown_transform", "X-Hapi-Transform is 't;'"),
        ({"Numerics": "sloppy"}, "unknown_numerics", "exact"),
        ({"Samples": "5"}, "bad_samples", "'5'"),
        ({"Samples": "9-5"}, "bad_samples", "'9-5'"),
        ({"Samples": "0-99999999999"}, "bad_samples", "0-9999"),
        (SPAN | {"Samples": "0-1"}, "bad_range", "If-Source-Etag"),
        (SPAN | {"If-Source-Etag": "e"}, "bad_samples", "X-Hapi-Samples"),
        ({"Range": "bytes=5-"}, "bad_range", "bytes=5-"),
        ({"Range": "bytes=9-5"}, "bad_range", "bytes=9-5"),
        ({"Range": "lines=1-5"}, "bad_range", "lines"),
        *(
            (RANGED | {"Crc32": value}, "bad_range", "X-Hapi-Crc32 is")
            for value in ("", "0a", "0A0B0C0D,00000000", "0a0b0c0d")
        ),
        ({"Crc32": "0a0b0c0d", "Samples": "0-0"}, "bad_range", "Crc32 is"),
        ({"If-Source-Etag": '""'}, "bad_annotation", "ETag"),
        ({"Cache": "always"}, "bad_cache", "off"),
        ({"Index": "maybe"}, "bad_annotation", "maybe"),
        ({"Index": "true"}, "bad_annotation", "X-Hapi-Index"),
    ],
)
def test_bad_annotation_is_refused_with_its_code(changed, code, words):
    with pytest.raises(AnnotationError) as caught:
        parse(**changed)
    assert caught.value.code == code
    assert caught.value.status == 400
    assert words in caught.value.message


def test_accepted_values_are_kept_in_their_canonical_text():
    assert parse(Encoding="uint8;none").encoding == "uint8"
    assert parse(Encoding="uint8;lz4").encoding == "uint8;lz4"
    # Reserved: the worker refuses it.
    assert parse(Numerics="fast").numerics == "fast"


def test_missing_cut_is_named():
    with pytest.raises(AnnotationError, match="X-Hapi-Cut is missing"):
        parse_annotation({"X-Hapi-Model": "c/o"}, "AUTH_test")


def test_any_hapi_header_makes_an_annotation():
    assert is_annotated(["Accept", "x-hapi-anything"])
    assert not is_annotated(["Accept", "X-Happy"])


def test_sample_range_contains_its_ends():
    assert [i for i in range(9) if i in SampleRange(2, 4)] == [2, 3, 4]
    assert 10**6 in SampleRange(2)
