"""Tee streams: data for the client and for the cache."""

import io
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi_protocol.errors import InternalError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import Row, feature_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.summary import WorkerLoad
from hapi_protocol.tee_stream import (
    BOTH,
    CACHE,
    CLIENT,
    END,
    MAX_END_BYTES,
    TeeReader,
    end_frame,
    frame,
)

FRAMES = [(BOTH, b"schema"), (CLIENT, b"t" * 300), (CACHE, b"k"), (BOTH, b"e")]
STREAM = b"".join(frame(*each) for each in FRAMES) + end_frame(3)
VALUES = np.arange(8, dtype=np.float32).reshape(4, 2)


def read(reader, pieces):
    found = dict.fromkeys((BOTH, CLIENT, CACHE), b"")
    for piece in pieces:
        for kind, data in reader.feed(piece):
            assert data
            found[kind] += data
    return found


@given(st.lists(st.integers(0, len(STREAM) - 1), max_size=8))
def test_frames_may_arrive_in_any_pieces(positions):
    edges = [0, *sorted(positions), len(STREAM) - 1]
    reader = TeeReader()
    assert read(reader, [STREAM[a:b] for a, b in pairwise(edges)]) == {
        BOTH: b"schemae",
        CLIENT: b"t" * 300,
        CACHE: b"k",
    }
    assert reader.errors is None
    assert not any(read(reader, [STREAM[-1:]]).values())
    assert reader.errors == 3


@pytest.mark.parametrize(
    "broken",
    [
        b"X\x00\x00\x00\x01a",
        frame(BOTH, b""),
        STREAM + frame(BOTH, b"more"),
        frame(END, b"{}"),
        frame(END, b"[]"),
        frame(END, b"nonsense"),
        frame(END, b'{"errors": -1}'),
        frame(END, b'{"errors": true}'),
        frame(END, b" " * (MAX_END_BYTES + 1)),
    ],
)
def test_other_streams_are_refused(broken):
    with pytest.raises(InternalError, match="tee stream"):
        read(TeeReader(), [broken])


class Marked:
    """A sink that separates data for the client and for the cache."""

    def __init__(self):
        self.client, self.kept = io.BytesIO(), io.BytesIO()
        self.kind = BOTH

    def mark(self, kind):
        self.kind = kind

    def write(self, data):
        if self.kind in (BOTH, CLIENT):
            self.client.write(data)
        if self.kind in (BOTH, CACHE):
            self.kept.write(data)


def test_rows_are_cached_and_timings_are_not():
    sink = Marked()
    schema = feature_schema((2,), "float32;zstd")
    writer = FeatureStreamWriter(sink, schema, sink.mark)
    rows = [Row(number, str(number)) for number in range(4)]
    writer.write(rows[:3], VALUES[:3], {"forward": 1.5})
    writer.write(rows[3:], VALUES[3:], {"forward": 0.5})
    load = WorkerLoad(share=0.5, streams=1, device_busy=0.1, cpu_busy=0.2)
    writer.close(
        source_etag="x", source_bytes=9, saturated=2, cpu_seconds=3, load=load
    )

    told = read_features(sink.client.getvalue())
    batches = list(told)
    seconds = [each.timings for each in batches if each.timings]
    assert seconds == [{"forward": 1.5}, {"forward": 0.5}]
    assert told.summary is not None
    assert (told.summary.cpu_seconds, told.summary.load) == (3, load)

    kept = read_features(sink.kept.getvalue())
    kept_batches = list(kept)
    assert not any(each.timings for each in kept_batches)
    assert kept.summary is not None
    assert (kept.summary.cpu_seconds, kept.summary.load) == (0, None)
    assert kept.summary.saturated == 2
    for found in (batches, kept_batches):
        assert [row for each in found for row in each.rows] == rows
        features = [each.features for each in found if each.rows]
        np.testing.assert_array_equal(np.concatenate(features), VALUES)
