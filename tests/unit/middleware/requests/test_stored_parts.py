"""Parts of static large objects that lie in one segment."""

import base64
import hashlib
import json

import pytest
from swift.common.swob import Request, Response

from hapi_middleware.requests.stored_parts import (
    ObjectSegment,
    find_elsewhere,
    find_segment,
)
from hapi_middleware.requests.subrequests import ObjectHead
from hapi_protocol.headers import ByteRange


def md5(text):
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def plain(name, length):
    return {"name": f"/parts/{name}", "hash": md5(name), "bytes": length}


RANGED = {**plain("r", 1000), "range": "100-199"}
INLINE = {"data": base64.b64encode(b"inline").decode()}
SUB = {**plain("s", 50), "sub_slo": True}
MANIFEST = [plain("a", 100), RANGED, INLINE, plain("b", 10)]
"""Bytes 0-99, 100-199, 200-205 and 206-215."""
ETAG = md5(
    md5("a") + f"{md5('r')}:100-199;" + md5("inline") + md5("b"),
)


@pytest.mark.parametrize(
    ("first", "last", "found"),
    [
        (0, 99, ObjectSegment("/parts/a", md5("a"), ByteRange(0, 99))),
        (20, 30, ObjectSegment("/parts/a", md5("a"), ByteRange(20, 30))),
        (207, 215, ObjectSegment("/parts/b", md5("b"), ByteRange(1, 9))),
        (99, 100, None),
        (120, 130, None),
        (201, 202, None),
        (206, 216, None),
    ],
)
def test_part_in_one_whole_segment_is_found(first, last, found):
    assert find_segment(MANIFEST, ETAG, ByteRange(first, last)) == found


def test_manifest_of_another_version_is_not_used():
    part = ByteRange(0, 9)
    assert find_segment(MANIFEST, md5("another"), part) is None
    assert find_segment(MANIFEST[:-1], ETAG, part) is None


def test_large_objects_in_large_objects_are_not_searched():
    manifest = [*MANIFEST, SUB]
    assert find_segment(manifest, ETAG, ByteRange(0, 9)) is None


def test_manifest_is_read_once_for_all_spans_of_a_version():
    """Segments of 24 kB made reads of manifests an eighth of the traffic."""
    reads = []
    manifest = [plain("a", 100), plain("b", 100)]

    def app(env, start_response):
        reads.append(env["QUERY_STRING"])
        body = json.dumps(manifest).encode()
        headers = {"X-Static-Large-Object": "True"}
        return Response(body=body, headers=headers)(env, start_response)

    def find(etag):
        env = Request.blank("/v1/AUTH_a/c/large").environ
        part = ByteRange(99, 100)
        head = ObjectHead(etag, 200, True, is_static_manifest=True)
        return find_elsewhere(app, env, "/AUTH_a/c/large", head, part)

    for _ in range(3):
        assert find(md5(md5("a") + md5("b"))) is None  # it lies in both
    assert reads == ["multipart-manifest=get"]
    for _ in range(2):  # an old replica answers: that is not kept
        assert find(md5("another")) is None
    assert len(reads) == 3
    manifest = MANIFEST  # it has data, which may be long
    for _ in range(2):
        assert find(ETAG) is None
    assert len(reads) == 5
