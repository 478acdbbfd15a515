"""Frames of object servers' answers: order, limits, damage."""

import io

import pytest

from hapi_protocol.errors import UnavailableError, make_error
from hapi_protocol.frames import (
    MAX_FRAME_BYTES,
    FrameError,
    FrameReader,
    Kind,
    error_payload,
    frame,
    read_error,
)

WHOLE = (Kind.READY, Kind.ANSWER, Kind.DATA, Kind.DATA, Kind.USAGE, Kind.END)


def reader(*frames):
    return FrameReader(io.BytesIO(b"".join(frames)).read)


def test_frames_are_read_as_they_were_made():
    made = [(kind, kind.name.encode()) for kind in WHOLE]
    beats = [frame(Kind.BEAT) + frame(*each) for each in made]
    found = reader(*beats)
    for each in made:
        assert found.next() == (Kind.BEAT, b"")
        assert found.next() == each


@pytest.mark.parametrize(
    "kinds",
    [
        (Kind.DATA,),
        (Kind.READY, Kind.DATA),
        (Kind.ANSWER, Kind.READY),
        (Kind.READY, Kind.READY),
        (Kind.ANSWER, Kind.USAGE, Kind.DATA),
        (Kind.END, Kind.END),
        (Kind.ERROR, Kind.END),
        (Kind.END, Kind.DATA),
    ],
)
def test_frames_out_of_order_are_refused(kinds):
    *good, _ = kinds
    found = reader(*map(frame, kinds))
    for _ in good:
        found.next()
    with pytest.raises(FrameError, match=r"before|after"):
        found.next()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "5 bytes are missing"),
        (frame(Kind.READY, b"1234")[:-1], "1 bytes are missing"),
        (b"\x09\0\0\0\0", "9 is no kind"),
        (b"\x03" + (MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "16777217 bytes"),
    ],
)
def test_damaged_frames_are_named(data, words):
    with pytest.raises(FrameError, match=words):
        reader(data).next()


def test_errors_keep_what_they_say():
    error = make_error(
        "queue_full", "later", retry_after=3.0, details={"place": 4}
    )
    found = read_error(error_payload(error))
    assert isinstance(found, UnavailableError)
    assert (found.code, found.message) == ("queue_full", "later")
    assert (found.retry_after, found.details) == (3.0, {"place": 4})


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"[]\n", b'{"status": "x", "retry_after": null}\n']
)
def test_damaged_errors_are_named(payload):
    with pytest.raises(FrameError, match="damaged"):
        read_error(payload)
