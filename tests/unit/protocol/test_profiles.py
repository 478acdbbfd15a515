"""Profiles, their annotation, and the summary of a stream."""

import dataclasses
import io
import json

import pyarrow as pa
import pytest

from hapi_protocol.errors import AnnotationError, TruncatedStreamError
from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import METADATA_SUMMARY, index_schema
from hapi_protocol.headers import Annotation, parse_annotation
from hapi_protocol.profiles import BatchProfile, ModelProfile
from hapi_protocol.summary import Summary, WorkerLoad

PROFILE = ModelProfile(
    digest="d",
    numerics_tag="exact",
    device="cuda",
    device_name="some",
    num_devices=1,
    cores=2.5,
    forward_threads=0,
    batches=(
        BatchProfile(1, (0.0, 0.5, 1.0)),
        BatchProfile(8, (0.0, 1.0, 3.0)),
    ),
    reference_seconds=0.01,
    load_seconds=1.5,
    parameter_bytes=10,
    memory_limit_bytes=100,
    peak_bytes=(10, 20, 30),
)
LOAD = WorkerLoad(share=0.5, streams=3, device_busy=0.9, cpu_busy=0.25)


def test_profile_survives_its_body():
    assert ModelProfile.from_body(PROFILE.to_body()) == PROFILE
    assert PROFILE.num_cuts == 2
    assert PROFILE.best().batch == 8
    assert PROFILE.seconds_per_sample(1) == pytest.approx(0.125)


@pytest.mark.parametrize(
    "changed",
    [
        {"peak_bytes": [1, 2]},
        {"batches": []},
        {"batches": [{"batch": 0, "cut_seconds": [0, 1, 2]}]},
        {"batches": [{"batch": 1, "cut_seconds": [0, 2, 1]}]},
        {"batches": [{"batch": 1, "cut_seconds": [0, 1, float("nan")]}]},
        {"batches": [{"batch": float("inf"), "cut_seconds": [0, 1, 2]}]},
        {"cores": 0},
        {"num_devices": -1},
        {"reference_seconds": float("nan")},
        {"load_seconds": -1},
        {"batches": [{"batch": 1}]},
        {"cores": "many"},
        {"digest": None, "peak_bytes": None},
    ],
)
def test_malformed_profile_is_refused(changed):
    fields = {**json.loads(PROFILE.to_body()), **changed}
    with pytest.raises(AnnotationError, match="bad_request"):
        ModelProfile.from_body(json.dumps(fields).encode())


def test_profile_header_survives():
    annotation = Annotation(model=None, cut=0, profile=True)
    assert annotation.to_headers() == {"X-Hapi-Profile": "true"}
    assert parse_annotation(annotation.to_headers(), "AUTH_a") == annotation
    upper = {"x-hapi-profile": "TRUE", "Accept": "*/*"}
    assert parse_annotation(upper, "AUTH_a") == annotation
    plain = {"X-Hapi-Model": "c/o", "X-Hapi-Cut": "3"}
    assert parse_annotation(
        {**plain, "X-Hapi-Profile": "false"}, "AUTH_a"
    ) == parse_annotation(plain, "AUTH_a")


def test_summary_ignores_unknown_fields():
    summary = Summary(1, 0, "e", 5, cpu_seconds=2.0, load=LOAD)
    fields = dataclasses.asdict(summary)
    fields["load"]["queue"] = [1]
    fields["mood"] = "good"
    assert Summary.from_json(json.dumps(fields)) == summary
    # Older workers do not have these.
    for name in ("load", "cpu_seconds", "saturated"):
        del fields[name]
    assert Summary.from_json(json.dumps(fields)) == Summary(1, 0, "e", 5)


@pytest.mark.parametrize(
    "text", ["[]", "1", "{}", '{"rows": 1, "errors": 0, "load": 3}', "{"]
)
def test_damaged_summary_is_truncation(text):
    sink = io.BytesIO()
    schema = index_schema()
    empty = pa.record_batch(
        [pa.array([], each.type) for each in schema], schema=schema
    )
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(
            empty, custom_metadata={METADATA_SUMMARY: text.encode()}
        )
    with pytest.raises(TruncatedStreamError):
        list(read_features(sink.getvalue()))
