"""Annotations: accepted and refused headers, and the feature ETag."""

from __future__ import annotations

import hashlib

import pytest

from hapi_protocol.errors import AnnotationError
from hapi_protocol.headers import (
    Annotation,
    ByteRange,
    ModelPath,
    SampleRange,
    cache_key,
    feature_etag,
    is_annotated,
    parse_annotation,
)

MINIMAL = {"X-Hapi-Model": "models/abc.hapi", "X-Hapi-Cut": "3"}


def parse(**changed):
    return parse_annotation({**MINIMAL, **changed}, "AUTH_test")


def test_defaults_are_used_when_only_model_and_cut_are_given():
    assert parse() == Annotation(
        model=ModelPath("AUTH_test", "models", "abc.hapi"), cut=3
    )


def test_headers_are_read_in_any_case():
    headers = {name.upper(): value for name, value in MINIMAL.items()}
    assert parse_annotation(headers, "AUTH_test") == parse()


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
        ({"X-Hapi-Modle": "x"}, "bad_annotation", "X-Hapi-Modle"),
        ({"X-Hapi-Model": ""}, "bad_model", "missing"),
        ({"X-Hapi-Model": "only-a-container"}, "bad_model", "only-a-"),
        ({"X-Hapi-Model": "/AUTH_a/c"}, "bad_model", "/AUTH_a/c"),
        ({"X-Hapi-Model": "/AUTH_a/../o"}, "bad_model", ".."),
        ({"X-Hapi-Model": "c/o%00"}, "bad_model", "%00"),
        ({"X-Hapi-Model": "c/%ff"}, "bad_model", "%ff"),
        ({"X-Hapi-Cut": "0"}, "bad_cut", "'0'"),
        ({"X-Hapi-Cut": "-1"}, "bad_cut", "'-1'"),
        ({"X-Hapi-Cut": "two"}, "bad_cut", "'two'"),
        ({"X-Hapi-Cut": "٣"}, "bad_cut", "'٣'"),
        ({"X-Hapi-Cut": "9" * 30}, "bad_cut", "999"),
        ({"X-Hapi-Encoding": "int4"}, "unknown_encoding", "float32"),
        (
            {"X-Hapi-Encoding": "uint8;zip"},
            "unknown_encoding",
            "X-Hapi-Encoding is 'uint8;zip'",
        ),
        ({"X-Hapi-Transform": "train"}, "unknown_transform", "eval"),
        (
            {"X-Hapi-Transform": "train;seed=1;epoch=02"},
            "unknown_transform",
            "X-Hapi-Transform is 'train;seed=1;epoch=02'",
        ),
        ({"X-Hapi-Numerics": "sloppy"}, "unknown_numerics", "exact"),
        ({"X-Hapi-Samples": "5"}, "bad_samples", "'5'"),
        ({"X-Hapi-Samples": "9-5"}, "bad_samples", "'9-5'"),
        ({"X-Hapi-Samples": "0-99999999999"}, "bad_samples", "0-9999"),
        (
            {"X-Hapi-Range": "bytes=0-5", "X-Hapi-Samples": "0-1"},
            "bad_range",
            "If-Source-Etag",
        ),
        (
            {"X-Hapi-Range": "bytes=0-5", "X-Hapi-If-Source-Etag": "e"},
            "bad_samples",
            "X-Hapi-Samples",
        ),
        ({"X-Hapi-Range": "bytes=5-"}, "bad_range", "bytes=5-"),
        ({"X-Hapi-Range": "bytes=9-5"}, "bad_range", "bytes=9-5"),
        ({"X-Hapi-Range": "lines=1-5"}, "bad_range", "lines"),
        ({"X-Hapi-If-Source-Etag": '""'}, "bad_annotation", "ETag"),
        ({"X-Hapi-Cache": "always"}, "bad_cache", "off"),
        ({"X-Hapi-Index": "maybe"}, "bad_annotation", "maybe"),
        ({"X-Hapi-Index": "true"}, "bad_annotation", "X-Hapi-Index"),
    ],
)
def test_bad_annotation_is_refused_with_its_code(changed, code, words):
    with pytest.raises(AnnotationError) as caught:
        parse(**changed)
    assert caught.value.code == code
    assert caught.value.status == 400
    assert words in caught.value.message


def test_encoding_is_parsed_to_its_canonical_text():
    assert parse(**{"X-Hapi-Encoding": "uint8;none"}).encoding == "uint8"
    assert parse(**{"X-Hapi-Encoding": "uint8;lz4"}).encoding == "uint8;lz4"


def test_missing_cut_is_named():
    with pytest.raises(AnnotationError, match="X-Hapi-Cut is missing"):
        parse_annotation({"X-Hapi-Model": "c/o"}, "AUTH_test")


def test_reserved_numerics_parses_so_that_the_worker_can_refuse_it():
    assert parse(**{"X-Hapi-Numerics": "fast"}).numerics == "fast"


def test_any_hapi_header_makes_an_annotation():
    assert is_annotated(["Accept", "x-hapi-anything"])
    assert not is_annotated(["Accept", "X-Happy"])


def test_sample_range_contains_its_ends():
    assert [i in SampleRange(2, 4) for i in range(1, 6)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert 10**6 in SampleRange(2)


ETAG = {
    "source_etag": "s",
    "model_digest": "m",
    "cut": 1,
    "transform": "eval",
    "encoding": "float32",
    "samples": None,
    "numerics_tag": "exact",
}


@pytest.mark.parametrize(
    "changed",
    [
        {"source_etag": "t"},
        {"model_digest": "n"},
        {"cut": 2},
        {"transform": "train;seed=0;epoch=0"},
        {"encoding": "float16"},
        {"samples": SampleRange(0)},
        {"numerics_tag": "fast"},
        {"source_etag": "s1:m", "model_digest": ""},
    ],
)
def test_feature_etag_changes_with_each_of_its_inputs(changed):
    etag = feature_etag(**ETAG)
    assert etag.startswith('W/"')
    assert feature_etag(**{**ETAG, **changed}) != etag


def test_cache_key_is_the_hash_of_etag_and_range():
    keys = {
        cache_key(etag, part)
        for etag in ('W/"a"', 'W/"b"')
        for part in (None, ByteRange(0, 9), ByteRange(0, 8))
    }
    assert len(keys) == 6
    text = b'W/"a" bytes=0-9'
    assert hashlib.sha256(text).hexdigest() in keys


def test_feature_etag_changes_with_seed_and_epoch():
    texts = [f"train;seed={n // 2};epoch={n % 2}" for n in range(4)]
    assert len({feature_etag(**{**ETAG, "transform": t}) for t in texts}) == 4
