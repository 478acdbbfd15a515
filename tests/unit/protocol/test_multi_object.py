"""Framing of many objects in one job's body."""

import io
import json
import tarfile

import pytest

from framed_objects import framed
from hapi_protocol.errors import AnnotationError
from hapi_protocol.multi_object import END, ObjectEntry, iter_objects, padding

MAX_BYTES = 5000
NAMES = (
    *("a.jpg", "a.png", "a", "a.tar.gz", "dir/a.jpg", "/leading", "../up"),
    *("00000001.json", "a\nb", "ü.jpg", "日" * 341, "x" * 1024, "a.jpg"),
)


class Slow:
    """A stream that returns at most 700 bytes per read."""

    def __init__(self, data):
        self._file = io.BytesIO(data)

    def read(self, size, /):
        return self._file.read(min(size, 700))


def sample():
    return [
        (
            ObjectEntry(n, name, 404, None, "not_found: gone")
            if n % 3 == 2
            else ObjectEntry(n, name, 200, f"etag{n}"),
            b"" if n % 3 == 2 else bytes([n]) * (n * 100),
        )
        for n, name in enumerate(NAMES)
    ]


def read(data, num_objects):
    return iter_objects(Slow(data), num_objects, MAX_BYTES)


def test_objects_with_any_name_survive_the_framing():
    objects = sample()
    assert list(read(framed(objects), len(objects))) == objects
    # The tar has no names of objects.
    with tarfile.open(fileobj=io.BytesIO(framed(objects))) as archive:
        members = [(info.name, info.size) for info in archive]
    assert members[:3] == [
        ("00000000.json", members[0][1]),
        ("00000000.img", 0),
        ("00000001.json", members[2][1]),
    ]
    assert all(name[:8].isdigit() for name, _ in members)


@pytest.mark.parametrize("difference", [-1, 1])
def test_another_number_of_objects_is_refused(difference):
    objects = sample()
    with pytest.raises(AnnotationError):
        list(read(framed(objects), len(objects) + difference))


def test_object_over_the_limit_is_skipped_with_an_error():
    assert json.loads(ObjectEntry(0, "a", 200, "e").meta()) == {
        "status": 200,
        "etag": "e",
    }
    objects = [
        (ObjectEntry(0, "long", 200, "e"), bytes(MAX_BYTES + 1)),
        (ObjectEntry(1, "next", 200, "f"), b"next"),
    ]
    (long, no_bytes), following = read(framed(objects), 2)

    assert (long.status, long.etag, no_bytes) == (413, "e", b"")
    assert long.error is not None
    assert long.error.startswith("object_too_large: 5001 bytes; at most 5000")
    assert following == objects[1]


def entry_of(position=0, **changes):
    fields = {"index": 0, "key": "a", "status": 404, "etag": None}
    fields |= {"error": "not_found: x", **changes}
    return member(f"{position:08d}.json", json.dumps(fields).encode())


def member(name, data, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    return info.tobuf(tarfile.USTAR_FORMAT) + data + padding(len(data))


GOOD = entry_of(error=None)
WRONG_FIELDS = [{"index": 1}, {"index": None}, {"key": None}, {"label": 1}]
WRONG_FIELDS += [
    {"status": "404"},
    {"status": None},
    {"etag": 5},
    {"error": 5},
]
WRONG_TEXTS = [b"{", b"[]", b'{"index": 0}', bytes(70_000)]


def test_bodies_of_these_tests_are_valid_without_their_fault():
    assert list(read(entry_of() + END, 1))
    assert list(read(GOOD + member("00000000.img", b"x") + END, 1))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        entry_of()[:-1],
        entry_of(),
        entry_of() + bytes(512) + b"\xff" * 512,
        bytes(2048),
        b"\xff" * 2048,
        entry_of(1, index=1) + END,
        *(entry_of(**fields) + END for fields in WRONG_FIELDS),
        *(member("00000000.json", text) + END for text in WRONG_TEXTS),
        member("00000000.json", b"{}", tarfile.SYMTYPE) + END,
        GOOD + END,
        GOOD + entry_of(1, index=1) + END,
        GOOD + member("00000001.img", b"x") + END,
        GOOD + member("00000000.img", bytes(1000))[:-1],
    ],
)
def test_wrong_framing_is_refused(body):
    with pytest.raises(AnnotationError) as caught:
        list(read(body, 1))

    assert caught.value.code == "bad_request"
