"""Tar shards: WebDataset grouping, limits, damage."""

import contextlib
import io
import re
import tarfile
import time
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest

from hapi_protocol.errors import UnsupportedError
from hapi_protocol.samples import ARRAY, IMAGE, Sample, SampleError, sniff
from hapi_protocol.shards import Limits, iter_samples


def tar_of(*members, format=tarfile.USTAR_FORMAT):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


LIMITS = Limits(max_key_bytes=150, max_sample_bytes=1000)


def samples_of(data, **options):
    return list(iter_samples(io.BytesIO(data), name="s.tar", **options))


THREE = tar_of(
    ("a/x.jpg", b"one"),
    ("a/x.cls", b"7\n"),
    ("b/x.jpg", b"two"),
    ("c.seg.png", b"three"),
    ("c.json", b'{"k": 1}'),
)


def test_members_with_one_key_make_one_sample():
    samples = samples_of(THREE)
    assert [sample.key for sample in samples] == ["a/x", "b/x", "c"]
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert samples[0].members == {"jpg": b"one", "cls": b"7\n"}
    assert samples[0].label_and_meta() == (7, None)
    assert samples[1].label_and_meta() == (None, None)
    assert samples[2].content(IMAGE) == b"three"
    assert samples[2].label_and_meta() == (None, '{"k": 1}')
    assert samples_of(tar_of()) == samples_of(b"") == []


def test_range_of_whole_members_gives_the_same_samples():
    whole = samples_of(THREE)
    first, last = whole[1], whole[2]
    piece = THREE[first.offset : last.offset + last.length]
    ranged = samples_of(
        piece, first_index=first.index, first_offset=first.offset
    )
    assert ranged == whole[1:]


def test_short_reads_change_nothing():
    stream = SimpleNamespace(read=partial(one_byte, io.BytesIO(THREE)))
    assert list(iter_samples(stream, name="s")) == samples_of(THREE)


def one_byte(stream, size):
    return stream.read(min(size, 1))


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_unicode_names_are_read_in_both_formats(format):
    name = "ü" * 90 + "/" + "n" * 150
    data = tar_of((f"{name}.jpg", b"x"), ("z.jpg", b"y"), format=format)
    samples = samples_of(data)
    assert [sample.key for sample in samples] == [name, "z"]
    assert samples[0].offset == 0
    assert samples[1].offset == samples[0].length


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"12", (12, None)),
        (b" -3 ", (-3, None)),
        (b"frog", (None, None)),
        (b"1_2", (None, None)),
        (b"9" * 40, (None, None)),
        (b"\xff", (None, None)),
    ],
)
def test_label_is_a_plain_integer(text, expected):
    (sample,) = samples_of(tar_of(("a.cls", text)))
    assert sample.label_and_meta() == expected


MASK = ("x.depth.png", b"depth"), ("x.cls", b"1"), ("x.JPG", b"image")


def test_exact_extension_is_the_image():
    (sample,) = samples_of(tar_of(*MASK))
    assert sample.content(IMAGE) == b"image"
    assert sample.image_error() is None
    named = replace(IMAGE, member="depth.png")
    assert sample.content(named) == b"depth"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["jpg", "png"], r"k\.jpg and k\.png: name one .* image='jpg'"),
        (["0.jpg", "1.jpg"], r"k\.0\.jpg and k\.1\.jpg: .*first dot"),
        (["json"], "has no image member"),
    ],
)
def test_sample_without_one_image_is_refused(names, message):
    (sample,) = samples_of(tar_of(*((f"k.{name}", b"x") for name in names)))
    with pytest.raises(SampleError, match=message):
        sample.content(IMAGE)
    assert (sample.image_error() is None) is (names == ["json"])


def _special(name, kind, data=b""):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    padding = bytes(-len(data) % 512)
    return info.tobuf(tarfile.GNU_FORMAT) + data + padding


def test_members_of_no_sample_are_passed_over():
    passed = []
    pieces = [
        tar_of((name, b"0"))[:1024]
        for name in ("README", "._x.jpg", ".DS_Store", "__MACOSX/x.cls")
    ]
    pieces += [
        _special("volume", b"V"),
        _special("folder", b"D", b"Yx.jpg\0" * 100),
    ]
    image, label = (
        tar_of(("a/x.jpg", b"i"))[:1024],
        tar_of(("a/x.cls", b"3"))[:1024],
    )
    data = image + b"".join(pieces) + label + b"".join(pieces) + bytes(1024)
    (sample,) = samples_of(data, on_passed=passed.append)
    assert sample.key == "a/x"
    assert sample.members == {"jpg": b"i", "cls": b"3"}
    assert len(passed) == 2 * len(pieces)
    piece = data[sample.offset : sample.offset + sample.length]
    assert samples_of(piece) == [sample]


def test_bytes_behind_the_end_of_a_tar_are_refused():
    first, second = tar_of(("a.jpg", b"a")), tar_of(("b.jpg", b"b"))
    end = 1024 + 512
    count = len(first) - end + 1025  # headers and content, without padding
    message = f"byte {end}: {count - 512} bytes follow the tar's end"
    with pytest.raises(UnsupportedError, match=message) as caught:
        samples_of(first + second)
    assert caught.value.code == "damaged_shard"
    assert len(samples_of(first + bytes(100_000))) == 1


def test_keys_of_other_encodings_do_not_collide():
    names = [(f"{letter}.jpg".encode("latin-1"), b"x") for letter in "éè"]
    data = b"".join(
        tar_of((name.decode("utf-8", "surrogateescape"), content))[:1024]
        for name, content in names
    )
    assert [s.key for s in samples_of(data)] == [r"\xe9", r"\xe8"]


NO_FILES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)
NO_FILES += (tarfile.CHRTYPE, tarfile.BLKTYPE, b"Z")
EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
EXTENDED += (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def _link(kind):
    info = tarfile.TarInfo("a.jpg")
    info.type, info.linkname = kind, "/etc/passwd"
    return info.tobuf(tarfile.USTAR_FORMAT)


def _header(size, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo("a.jpg")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def _continued_sparse():
    """A sparse header whose map continues in the next block."""
    header = bytearray(_header(0, tarfile.GNUTYPE_SPARSE))
    header[482] = 1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _pax(records, kind=tarfile.XHDTYPE):
    head = tarfile.TarInfo("pax")
    head.type, head.size = kind, len(records)
    padding = bytes(-len(records) % 512)
    return head.tobuf(tarfile.USTAR_FORMAT) + records + padding


TWO_IMAGES = tar_of(("a.jpg", bytes(600)), ("a.png", bytes(600)))
DAMAGED = [
    *(THREE[:1000], THREE[:100], b"x" * 600),
    *(_link(kind) for kind in NO_FILES),
    _header(0, tarfile.GNUTYPE_SPARSE),
    _pax(b"") + _continued_sparse(),
    _pax(b"22 GNU.sparse.map=0,1\n") + _header(1),
    tar_of(("a.jpg", b"1"), ("a.jpg", b"2")),
]
EXCESSIVE = [
    _header(10**12),
    *(_header(10**11, kind) for kind in EXTENDED),
    _pax(b"21 size=999999999999\n") + _header(0),
    _pax(b"", tarfile.XGLTYPE) * 200 + _header(0),
    _pax(bytes(40_000)) * 2 + _header(0),
    _pax(b"11 size=-1\n") + _header(0),
    tar_of(("a.json", b" " * 70_000)),
    tar_of(("a.cls", b"1" * 70_000)),
    tar_of((f"a.{'e' * 300}", b""), format=tarfile.PAX_FORMAT),
    tar_of((f"{'k' * 90}/{'n' * 80}.jpg", b"")),
    TWO_IMAGES,
    tar_of(*((f"a.{i}", b"") for i in range(40))),
]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        *((data, "damaged_shard") for data in DAMAGED),
        *((data, "limit_exceeded") for data in EXCESSIVE),
    ],
)
def test_damage_and_excess_are_refused_by_name(data, code):
    with pytest.raises(UnsupportedError, match=r"s\.tar, byte") as caught:
        samples_of(data, limits=LIMITS)
    assert caught.value.code == code


class CountingReader:
    """A stream of zeros after ``start`` that counts the bytes read."""

    def __init__(self, start):
        self._start = io.BytesIO(start)
        self.num_read = 0

    def read(self, size):
        piece = self._start.read(size) or bytes(min(size, 4096))
        self.num_read += len(piece)
        return piece


@pytest.mark.parametrize(
    ("start", "limits"),
    [
        (_header(1 << 30), Limits()),
        (tar_of(("a.cls", b" " * 70_000))[:512], Limits()),
        (_header(1 << 30, tarfile.XHDTYPE), Limits()),
        (_pax(b"19 size=1073741824\n") + _header(0), Limits()),
        (TWO_IMAGES[:2048], Limits(max_sample_bytes=1000)),
        (
            tar_of(("a.jpg", b"1"), ("a.png", bytes(600)))[:1536],
            Limits(max_members_per_sample=1),
        ),
        (tar_of(("a.jpg", b"1"), ("a.jpg", bytes(600)))[:1536], Limits()),
    ],
)
def test_excess_is_refused_before_it_is_read(start, limits):
    stream = CountingReader(start)
    with pytest.raises(UnsupportedError):
        list(iter_samples(stream, name="s.tar", limits=limits))
    assert stream.num_read == len(start)


@pytest.mark.parametrize(
    ("member", "max_members"),
    [(_header(0, tarfile.DIRTYPE), 10_001), (_header(0), 2), (_pax(b""), 129)],
)
def test_endless_empty_members_are_refused(member, max_members):
    stream = CountingReader(member * 20_000)
    with pytest.raises(UnsupportedError):
        list(iter_samples(stream, name="s.tar"))
    assert stream.num_read <= max_members * len(member)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_headers_fail_with_our_error_or_not_at_all(seed):
    random = Random(seed)
    whole = b"".join(
        [
            _pax(b"15 path=b.jpg\n\n"),
            _pax(b"22 GNU.sparse.map=0,1\n"),
            _pax(b"") + _continued_sparse(),
            tar_of((f"{'n' * 150}.jpg", b""), format=tarfile.GNU_FORMAT),
        ]
    )
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(random.choice((1, 2, 4))):
            value = random.choice(b"\0 019=xgLS\xff")
            data[random.randrange(len(data))] = value
        _fix_checksums(data)
        with contextlib.suppress(UnsupportedError):
            samples_of(bytes(data))


def _fix_checksums(data):
    for start in range(0, len(data), 512):
        if data[start + 257 : start + 262] == b"ustar":
            data[start + 148 : start + 156] = b" " * 8
            total = sum(data[start : start + 512])
            data[start + 148 : start + 156] = b"%06o\0 " % total


def _record(keyword, value):
    size = len(keyword) + len(value) + 3
    size += len(str(size + len(str(size))))
    return b"%d %s=%s\n" % (size, keyword, value)


@pytest.mark.parametrize(
    "records",
    [
        *(b"garbage", b"12 size=abc\n", b"5 =a\n", b"99 a=b\n", b"6 a=bcd\n"),
        *(b"0 a=b\n", b"6 abc\n", b"9" * 60_000, _record(b"size", b"9" * 20)),
    ],
)
def test_garbage_in_an_extended_header_is_refused(records):
    with pytest.raises(UnsupportedError, match="broken extended") as caught:
        samples_of(_pax(records) + _header(0))
    assert caught.value.code == "damaged_shard"


@pytest.mark.parametrize(
    "records",
    [
        b"9" * 60_000,
        b"\0" + b"9" * 60_000,
        _record(b"path", b"9" * 60_000),
        _record(b"size", b"9" * 60_000),
        _record(b"mtime", b"9" * 60_000),
        _record(b"GNU.sparse.map", b"9" * 60_000),
        _record(b"9" * 60_000, b""),
    ],
    ids=lambda records: repr(records[:20]),
)
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_long_numbers_in_extended_headers_take_no_time(records, kind):
    start = time.process_time()
    with contextlib.suppress(UnsupportedError):
        samples_of(_pax(records, kind) + _header(0))
    assert time.process_time() - start < 0.5


def test_first_extended_header_of_a_member_counts():
    records = _record(b"path", b"n.jpg") + _record(b"size", b"3") + b"\0 end"
    data = _pax(records) + _pax(_record(b"path", b"x.png")) + _header(0)
    (sample,) = samples_of(data + b"abc" + bytes(509))
    assert (sample.key, sample.members) == ("n", {"jpg": b"abc"})


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"\xff\xd8\xff\xe0", "jpeg"),
        (b"\x89PNG\r\n\x1a\n", "png"),
        (b"\x93NUMPY\x01\x00", "npy"),
        (THREE[:512], "tar"),
        (tar_of()[:512], "tar"),
        (b"hello", None),
        (b"x" * 512, None),
        (b"", None),
    ],
)
def test_kind_is_detected_by_magic_bytes(start, kind):
    assert sniff(start) == kind


@pytest.mark.parametrize(
    ("members", "medium", "words"),
    [
        (["txt"], IMAGE, "tif, tiff, avif) but only: txt"),
        (["jpg", "cls"], ARRAY, "no array member (npy) but only: jpg, cls"),
        (["npy"], IMAGE, "npy; give the job an ArrayTransform for arrays"),
    ],
)
def test_missing_member_is_named(members, medium, words):
    sample = Sample(0, "a", 0, members=dict.fromkeys(members, b""))
    with pytest.raises(SampleError, match=re.escape(words)):
        sample.content(medium)


def test_medium_of_a_member_is_its_last_extension():
    members = {"left.NPY": b"array", "seg.png": b"image", "jpg.txt": b"text"}
    sample = Sample(0, "a", 0, members=members)
    assert sample.content(ARRAY) == b"array"
    assert sample.content(IMAGE) == b"image"
