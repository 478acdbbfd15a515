"""The feature ETag, and the key of a cache entry."""

import hashlib

from hapi_protocol.feature_identity import cache_key, feature_etag
from hapi_protocol.headers import ByteRange, SampleRange

ETAG = {
    "source_etag": "s",
    "model_digest": "m",
    "cut": 1,
    "transform": "eval",
    "encoding": "float32",
    "samples": None,
    "numerics_tag": "exact",
}


def test_feature_etag_changes_with_each_of_its_inputs():
    changes = [
        {},
        {"source_etag": "t"},
        {"model_digest": "n"},
        {"cut": 2},
        *(
            {"transform": f"train;seed={n // 2};epoch={n % 2}"}
            for n in range(4)
        ),
        {"encoding": "float16"},
        {"samples": SampleRange(0)},
        {"numerics_tag": "fast"},
        {"source_etag": "s1:m", "model_digest": ""},
    ]
    etags = {feature_etag(**ETAG | changed) for changed in changes}
    assert len(etags) == len(changes)
    assert all(etag.startswith('W/"') for etag in etags)


def test_cache_key_is_the_hash_of_etag_range_and_checksums():
    keys = {
        cache_key(etag, part, crc32s)
        for etag in ('W/"a"', 'W/"b"')
        for part in (None, ByteRange(0, 9), ByteRange(0, 8))
        for crc32s in ((), (10,), (10, 10))
    }
    assert len(keys) == 18
    for text in (b'W/"a" bytes=0-9', b'W/"b" bytes=0-8 0000000a,0000000a'):
        assert hashlib.sha256(text).hexdigest() in keys
