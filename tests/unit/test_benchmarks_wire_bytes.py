"""``benchmarks.wire_bytes``: streams as a worker writes them, counted."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import wire_bytes
from benchmarks.pieces import built, pieces_of
from benchmarks.wire_bytes import Goal, Photograph, judged, spans_of
from benchmarks.workloads import BACKBONE, INNER, NETWORKS

from hapi_protocol.encodings import ENCODINGS, Encoding
from hapi_protocol.feature_reader import read_features
from hapi_splitter.freezing.split_model import split
from photos import shard

COUNT = 3
FRAMING = 4000
"""Bytes of a schema, a batch's metadata and a summary, and more."""


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wire") / "a.tar"
    path.write_bytes(shard(COUNT, size=64))
    return path


@pytest.fixture(scope="module")
def section(tar: Path) -> dict[str, Any]:
    name = "mobilenet_v3_small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_bytes, "NETWORKS", {name: NETWORKS[name]})
        patch.setattr(wire_bytes, "GOALS", (Goal(name, None, "float16", 1),))
        return wire_bytes.measure([tar], quick=False, note=print)


class Recorder(io.BytesIO):
    """A sink that keeps what is written."""

    @property
    def num_bytes(self) -> int:
        return len(self.getvalue())


def test_every_boundary_has_every_encoding(section: dict[str, Any]) -> None:
    assert json.loads(json.dumps(section)) == section
    assert section["samples"] == COUNT
    assert section["jpeg_bytes"] < section["tar_bytes"]
    network = section["networks"]["mobilenet_v3_small"]
    assert network["freezes"] == {BACKBONE: "avgpool", INNER: "features.6"}
    boundaries = network["boundaries"]
    assert [b["name"] for b in boundaries][::13] == ["features.0", "avgpool"]
    for boundary in boundaries:
        assert 0 <= boundary["zeros"] < 1
        for text in ENCODINGS:
            plain = Encoding.parse(text).sample_bytes(boundary["shape"])
            found = boundary["bytes"][text]
            assert 0 < found < plain + FRAMING
            if Encoding.parse(text).compression == "none":
                assert found > plain
    (goal,) = section["goals"]
    assert goal["boundary"] == "avgpool"
    assert goal["ratio"] == pytest.approx(
        section["jpeg_bytes"] / boundaries[-1]["bytes"]["float16"]
    )


def test_what_is_counted_is_a_whole_stream(tar: Path) -> None:
    (span,) = spans_of([tar], None)
    features = torch.rand(COUNT, 2, 8, 8)
    for text in ENCODINGS:
        stream = wire_bytes._Stream(text, (2, 8, 8), sink=Recorder())
        stream.write(span, features)
        size = stream.close(source_bytes=1234)
        assert size == len(stream.sink.getvalue())
        reader = read_features(stream.sink.getvalue())
        (batch,) = reader
        assert [row.key for row in batch.rows] == [
            each.sample.key for each in span
        ]
        assert [row.label for row in batch.rows] == [0, 1, 2]
        assert batch.timings
        assert batch.features is not None
        assert batch.features.shape == features.shape
        assert reader.summary is not None
        assert reader.summary.source_bytes == 1234
        assert reader.summary.load is not None


def test_boundaries_are_cuts_of_the_package() -> None:
    model = built("resnet18").eval()
    values = images = torch.rand(1, 3, 224, 224)
    frozen = split(model, "layer4", sample_shape=(3, 224, 224)).frozen
    with torch.inference_mode():
        for piece in pieces_of("resnet18", model)[:-1]:
            values = piece.module(values)
            shape = tuple(values.shape[1:])
            cut = max(c.index for c in frozen.cuts if c.shape == shape)
            if piece.name in ("layer3", "avgpool"):
                found = frozen.prefix(cut)(images)
                torch.testing.assert_close(found, values)


def test_spans_are_runs_of_one_tar(
    tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_bytes, "SPAN_SAMPLES", 2)
    assert [len(span) for span in spans_of([tar, tar], None)] == [2, 1, 2, 1]
    assert [len(span) for span in spans_of([tar, tar], 1)] == [1]
    first = spans_of([tar], None)[0][0]
    assert isinstance(first, Photograph)
    assert first.jpeg[:2] == b"\xff\xd8"


@pytest.mark.parametrize(("least", "met"), [(3.0, True), (3.1, False)])
def test_goal_is_met_or_tells_why(least: float, met: bool) -> None:
    boundary = {
        "name": "last",
        "shape": [10],
        "values": 10,
        "zeros": 0.25,
        "bytes": {"float16": 40.0},
    }
    networks = {
        "resnet18": {"freezes": {BACKBONE: "last"}, "boundaries": [boundary]}
    }
    found = judged(Goal("resnet18", None, "float16", least), networks, 120.0)
    assert found["met"] is met
    assert found["ratio"] == pytest.approx(3.0)
    assert found["why"] == (
        "10 values, 25% of them zero, 20 bytes in float16, 40 on the wire;"
        " a JPEG has 120"
    )


def test_results_are_written_and_shown(
    tar: Path,
    tmp_path: Path,
    section: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wire_bytes, "measure", lambda *_, **__: section)
    path = tmp_path / "wire.json"
    assert wire_bytes.main(["--data", str(tar), "--json", str(path)]) == 0
    assert json.loads(path.read_text())["wire_bytes"] == section
    shown = capsys.readouterr().out
    assert "features.6 (inner)" in shown
    assert "goal 1, missed (576 values" in shown


def test_tars_without_photographs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.tar"
    with tarfile.open(path, "w"):
        pass
    assert wire_bytes.main(["--data", str(path)]) == 1
    assert "no photograph in" in capsys.readouterr().err
