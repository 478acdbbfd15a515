"""Streams of several jobs become one, as if one worker had written it."""

import io

import numpy as np
import pytest

from hapi_protocol.errors import InternalError
from hapi_protocol.feature_reader import FeatureStreamReader
from hapi_protocol.feature_stream import Row, feature_schema
from hapi_protocol.feature_writer import FeatureStreamWriter
from hapi_protocol.merged_stream import merge_summaries
from hapi_protocol.summary import WorkerLoad
from hapi_protocol.tee_stream import (
    BOTH,
    CACHE,
    CLIENT,
    end_frame,
    frame,
    whole_frames,
)

SCHEMA = feature_schema((2,), "float32")
LOAD = WorkerLoad(
    share=1 / 3, streams=12, device_busy=0.123456789, cpu_busy=0.5
)


class Sink:
    """Frames of what is written between two marks."""

    def __init__(self):
        self.frames = []
        self.kind = BOTH
        self.waiting = b""

    def mark(self, kind):
        self.flush()
        self.kind = kind

    def write(self, data):
        self.waiting += data

    def flush(self):
        if self.waiting:
            self.frames.append(frame(self.kind, self.waiting))
        self.waiting = b""


def stream_of(indices, **facts):
    """The answer of a worker with rows of these indices."""
    sink = Sink()
    writer = FeatureStreamWriter(sink, SCHEMA, sink.mark, is_merged=True)
    sink.flush()
    for index in indices:
        features = np.full((1, 2), index, np.float32)
        writer.write([Row(index, f"k{index}")], features, {"decode": 0.5})
        sink.flush()
    writer.close(source_etag="", source_bytes=7, load=LOAD, **facts)
    sink.flush()
    return b"".join(sink.frames) + end_frame(0)


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_merged_messages_are_one_stream(size):
    parts = []
    for indices, facts in (
        ([0, 3], {"cpu_seconds": 0.1}),
        ([1, 2], {"cpu_seconds": 123.456, "saturated": 10**12}),
    ):
        data = stream_of(indices, **facts)
        pieces = [data[n : n + size] for n in range(0, len(data), size)]
        frames = list(whole_frames(pieces))
        rows = [each for kind, each in frames if kind == BOTH]
        behind = [kind for kind, _ in frames].index(CACHE)
        assert frames[behind + 1][0] == CLIENT
        parts.append((rows[:1], rows[1:-1], rows[-1:], frames[behind + 1][1]))
    (head, first, last, _), (_, second, _, _) = parts
    merged = b"".join([*head, first[0], *second, first[1]])
    merged += merge_summaries([each[3] for each in parts]) + last[0]
    reader = FeatureStreamReader(io.BytesIO(merged))
    batches = [each for each in reader if each.rows]
    assert [each.rows[0].index for each in batches] == [0, 1, 2, 3]
    assert [each.features[0, 0] for each in batches] == [0, 1, 2, 3]
    summary = reader.summary
    assert (summary.rows, summary.source_bytes) == (4, 14)
    assert summary.saturated == 10**12
    assert summary.cpu_seconds == pytest.approx(123.556)
    assert summary.load == LOAD


def test_broken_streams_are_not_merged():
    data = stream_of([0])
    with pytest.raises(InternalError, match="within a frame"):
        list(whole_frames([data[:-1]]))
    with pytest.raises(InternalError, match="kind"):
        list(whole_frames([b"x" + data]))
    with pytest.raises(InternalError, match="summary"):
        merge_summaries([b"no summary"])
