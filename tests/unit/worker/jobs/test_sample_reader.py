"""Objects and samples that the worker refuses before it reads them."""

import io
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hapi_protocol.errors import UnsupportedError
from hapi_protocol.headers import SampleRange
from hapi_protocol.samples import IMAGE, Sample, SampleError
from hapi_protocol.shards import Limits
from hapi_worker.execution.decode import image_decoder
from hapi_worker.jobs.sample_reader import SampleReader, read_start
from hapi_worker.peer import ClientDisconnectedError
from networks import small_transform
from photos import tar_of
from worker_under_test import job_for

MAX_SAMPLES = 3
LIMITS = Limits(max_member_bytes=5000, max_sample_bytes=5000)
DECODE = partial(image_decoder, small_transform(), max_pixels=10_000)


class CountingBody:
    """A job's body, and how many of its bytes were taken."""

    def __init__(self, data):
        self._stream = io.BytesIO(data)
        self.bytes_read = 0

    def read(self, size, /):
        piece = self._stream.read(min(size, 1000))
        self.bytes_read += len(piece)
        return piece

    def drain(self):
        while self.read(1000):
            pass


def read(body, data, **changes):
    job = job_for(data, **changes)
    start = read_start(body)
    return SampleReader(start, body, job, IMAGE, LIMITS, MAX_SAMPLES).samples()


class IncompleteBody(CountingBody):
    """A body whose end the filter does not send: the object is damaged."""

    def read(self, size, /):
        piece = super().read(size)
        if not piece:
            raise ClientDisconnectedError("the body is incomplete")
        return piece


@pytest.mark.parametrize(
    ("asked", "before"),
    [
        ({}, [0, 1]),
        ({"samples": SampleRange(1)}, [1]),
        ({"samples": SampleRange(0, 1), "is_split": True}, [0]),
    ],
)
def test_last_sample_of_a_whole_object_waits_for_its_end(asked, before):
    data = tar_of((f"{n}.jpg", b"x") for n in range(3))
    # All members, and tar's two zero blocks.
    samples = read(IncompleteBody(data[: 3 * 1024 + 1024]), data, **asked)
    assert [next(samples).index for _ in before] == before
    with pytest.raises(ClientDisconnectedError):
        next(samples)


def jpeg(width, height, mode="RGB"):
    sink = io.BytesIO()
    Image.new(mode, (width, height)).save(sink, "JPEG")
    return sink.getvalue()


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return (Path.touch, (self._path,))


def array_of_objects(path):
    sink = io.BytesIO()
    array = np.array([Trap(path)], dtype=object)
    np.save(sink, array, allow_pickle=True)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("data", "code", "said", "max_read"),
    [
        (
            tar_of((f"{n}.jpg", b"") for n in range(MAX_SAMPLES + 100)),
            "limit_exceeded",
            "more than 3 samples",
            4000,
        ),
        (
            tar_of([("a.jpg", bytes(6000))]),
            "limit_exceeded",
            "'a.jpg' has 6000 bytes; at most 5000",
            1000,
        ),
        (
            tar_of([("a.jpg", bytes(3000)), ("a.png", bytes(3000))]),
            "limit_exceeded",
            "'a' has 6000 bytes or more; at most 5000",
            5000,
        ),
        (
            jpeg(8, 8) + bytes(5000),
            "limit_exceeded",
            "bytes; at most 5000",
            1000,
        ),
        (
            b"\x93NUMPY\x01\x00" + bytes(5000),
            "unsupported_object",
            "it is a NumPy array (.npy), and the model takes images",
            1000,
        ),
        (
            b"no image" + bytes(5000),
            "unsupported_object",
            "not a tar of samples",
            1000,
        ),
    ],
    ids=["samples", "member", "sample", "image", "npy", "text"],
)
def test_object_over_a_limit_is_refused_before_it_is_read(
    data, code, said, max_read
):
    body = CountingBody(data)
    with pytest.raises(UnsupportedError) as caught:
        list(read(body, data))
    assert caught.value.code == code
    assert said in caught.value.message
    assert "shard-000.tar" in caught.value.message
    assert body.bytes_read <= max_read


def test_object_at_its_limits_is_read():
    data = tar_of([("a.jpg", bytes(5000)), ("b.jpg", b""), ("c.jpg", b"")])
    samples = list(read(CountingBody(data), data))
    assert [len(each.members["jpg"]) for each in samples] == [5000, 0, 0]


def test_range_that_goes_beyond_the_last_sample_ends_with_it():
    data = tar_of((f"{n}.jpg", b"") for n in range(3))
    wanted = SampleRange(1, 99)
    found = list(read(CountingBody(data), data, samples=wanted))
    assert [each.index for each in found] == [1, 2]
    with pytest.raises(UnsupportedError) as caught:
        list(read(CountingBody(data), data, samples=SampleRange(3, 99)))
    assert caught.value.code == "samples_out_of_range"


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (
            {"npy": b"\x93NUMPY"},
            "no image member (jpg, jpeg, jpe, jfif, png, webp",
        ),
        ({"npy": b"\x93NUMPY"}, "only: npy"),
        ({"jpg": b"\x93NUMPY\x01\x00"}, "of the format NPY; the allowed"),
        ({"jpg": jpeg(101, 100)}, "101x100 pixels is over the limit of 10000"),
        ({"png": jpeg(101, 100)}, "101x100 pixels is over the limit of 10000"),
        ({f"x{n}": b"" for n in range(900)}, "only: x0, x1"),
    ],
)
def test_sample_that_cannot_be_used_says_why(members, said):
    decode = DECODE()
    sample = Sample(0, "s", 0, members=members)
    with pytest.raises(SampleError) as caught:
        decode(sample)
    assert said in str(caught.value)
    assert "sample 's'" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_image_at_the_limit_of_pixels_is_decoded(mode):
    decode = DECODE()
    sample = Sample(0, "s", 0, members={"png": jpeg(100, 100, mode)})
    assert decode(sample).shape == (3, 64, 64)


@pytest.mark.parametrize("extension", ["npy", "jpg", "json", "cls"])
def test_no_member_is_ever_unpickled(tmp_path, extension):
    trap = array_of_objects(tmp_path / "sprung")
    data = tar_of([(f"a.{extension}", trap)])
    decode = DECODE()
    for sample in read(CountingBody(data), data):
        sample.label_and_meta()
        with pytest.raises(SampleError):
            decode(sample)
    with pytest.raises(UnsupportedError):
        list(read(CountingBody(trap), trap))
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap[trap.index(b"\x80") :])  # the trap would have worked
    assert (tmp_path / "sprung").exists()


def test_cmyk_and_gray_have_the_colours_that_they_show():
    colours = {}
    for mode, colour in (("RGB", (255, 0, 0)), ("CMYK", (0, 255, 255, 0))):
        sink = io.BytesIO()
        Image.new(mode, (32, 32), colour).save(sink, "JPEG", quality=95)
        sample = Sample(0, "s", 0, members={"jpg": sink.getvalue()})
        colours[mode] = DECODE()(sample)
    torch.testing.assert_close(
        colours["CMYK"], colours["RGB"], rtol=0, atol=0.1
    )
    assert colours["RGB"][0].min() > 1.5 > -1.5 > colours["RGB"][1].max()
