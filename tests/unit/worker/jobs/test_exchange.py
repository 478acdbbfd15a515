"""The exchange with the filter, over a real unix socket."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import threading
import time

import pytest

from hapi_protocol.feature_reader import read_features
from hapi_protocol.feature_stream import STAGES
from hapi_protocol.headers import SampleRange
from hapi_protocol.job_messages import HEADER_IDENTITY, JobGrant
from hapi_protocol.samples import IMAGE
from hapi_protocol.shards import iter_samples
from hapi_splitter.numerics import numerics_tag
from photos import jpegs, shard, tar_of, with_corrupt_member
from waiting import until
from worker_under_test import (
    TRANS_ID,
    Streaming,
    assert_features,
    identity_of,
    in_two,
    job_for,
    pieces,
    rows_of,
    running_worker,
    small_features,
    small_split,
)

NUM_SAMPLES = 40
LAST_CUT = len(small_split().frozen.cuts)


@pytest.fixture(scope="module")
def tar():
    return shard(NUM_SAMPLES, size=90)


TRAIN = "train;seed=0;epoch=0"


def computed_here(tar, cut):
    """The features of a shard's readable samples, one batch, eagerly."""
    samples = iter_samples(io.BytesIO(tar), name="here")
    images = [sample.content(IMAGE) for sample in samples]
    return small_features(images, cut)


def test_grant_names_the_model_by_the_digest_of_its_bytes(
    own_worker, package, tar
):
    job = job_for(tar, package)
    needed = own_worker.ask(job)
    assert (needed.status, needed.code) == (409, "model_needed")
    digest = hashlib.sha256(package).hexdigest()
    put = own_worker.put(package)
    assert put.status == 201
    assert put.fields["digest"] == digest
    answer = own_worker.ask(job)
    assert answer.status == 201
    grant = JobGrant.from_body(answer.body)
    assert grant.model_digest == digest
    assert grant.numerics_tag == numerics_tag("cpu")
    assert grant.grant_bytes == own_worker.config.buffer_bytes


def test_known_model_is_found_without_an_upload(own_worker, package):
    headers = {HEADER_IDENTITY: identity_of(package).to_json()}
    assert own_worker.request("GET", "/models", None, headers).status == 404
    assert own_worker.request("PUT", "/models", b"x").code == "bad_request"
    own_worker.put(package)
    answer = own_worker.request("GET", "/models", None, headers)
    assert answer.fields == {
        "digest": hashlib.sha256(package).hexdigest(),
        "num_cuts": LAST_CUT,
        "numerics_tag": numerics_tag("cpu"),
    }


@pytest.mark.parametrize("cut", sorted({1, LAST_CUT // 2, LAST_CUT}))
def test_features_equal_those_computed_here(worker, package, tar, cut):
    reader = worker.run(job_for(tar, package, cut=cut), package, tar)
    assert_features(reader, computed_here(tar, cut))
    rows = rows_of(reader)
    assert [row.index for row in rows] == list(range(NUM_SAMPLES))
    assert [row.key for row in rows][:2] == ["s0-0000", "s0-0001"]
    assert [row.label for row in rows] == [n % 4 for n in range(NUM_SAMPLES)]
    summary = dataclasses.asdict(reader.summary)
    assert summary.pop("load") is not None
    assert summary.pop("cpu_seconds") > 0
    assert summary == {
        "rows": NUM_SAMPLES,
        "errors": 0,
        "source_etag": "source-etag",
        "source_bytes": len(tar),
        "saturated": 0,
    }


def test_stages_have_their_seconds(worker, package, tar):
    reader = worker.run(job_for(tar, package), package, tar)
    for batch in reader.batches:
        assert set(batch.timings) == set(STAGES)
        assert all(0 <= value < 20 for value in batch.timings.values())
        assert batch.timings["decode"] > 0
        assert batch.timings["decode_cpu"] > 0
        assert batch.timings["forward_cpu"] > 0
    spent = [
        sum(value for name, value in b.timings.items() if name[-4:] == "_cpu")
        for b in reader.batches
    ]
    # The reader's and the writer's own come on top.
    assert reader.summary.cpu_seconds > sum(spent) > 0


def test_summary_has_the_load_seen_by_the_account(own_worker, package, tar):
    alone = own_worker.run(job_for(tar, package), package, tar).summary
    assert (alone.load.share, alone.load.streams) == (1.0, 1)
    assert 0 < alone.load.device_busy <= 1
    assert 0 < alone.load.cpu_busy <= 1
    other = job_for(tar, package, charged_account="AUTH_b")
    shared = own_worker.run(other, package, tar).summary
    assert (shared.load.share, shared.load.streams) == (0.5, 1)


def test_damaged_image_is_one_error_row_in_its_place(worker, package, tar):
    damaged = with_corrupt_member(tar, "s0-0007")
    readers = [
        worker.run(job_for(damaged, package), package, damaged)
        for _ in range(2)
    ]
    for reader in readers:
        rows = rows_of(reader)
        assert [row.index for row in rows] == list(range(NUM_SAMPLES))
        [bad] = [row for row in rows if row.error]
        assert (bad.index, bad.key, bad.label) == (7, "s0-0007", 3)
        assert "'s0-0007'" in (bad.error or "")
        wanted = computed_here(tar, 1)
        keep = [n for n in range(NUM_SAMPLES) if n != 7]
        assert_features(reader, wanted[keep])
        assert reader.summary.errors == 1
    assert rows_of(readers[0]) == rows_of(readers[1])


def test_sample_without_an_image_and_only_errors(worker, package):
    tar = tar_of([("a.cls", b"1"), ("b.txt", b"x"), ("b.json", b'{"n": 1}')])
    reader = worker.run(job_for(tar, package), package, tar)
    rows = rows_of(reader)
    assert [row.key for row in rows] == ["a", "b"]
    assert all("no image member" in (row.error or "") for row in rows)
    assert (rows[0].label, rows[1].meta) == (1, '{"n": 1}')


def test_only_requested_samples_are_computed(worker, package, tar):
    before = worker.worker.metrics.value("hapi_worker_samples_total")
    job = job_for(tar, package, samples=SampleRange(5, 9))
    reader = worker.run(job, package, tar)
    assert [row.index for row in rows_of(reader)] == [5, 6, 7, 8, 9]
    assert_features(reader, computed_here(tar, 1)[5:10])
    after = worker.worker.metrics.value("hapi_worker_samples_total")
    assert after - before == 5
    job = job_for(tar, package, samples=SampleRange(38))
    reader = worker.run(job, package, tar)
    assert [row.index for row in rows_of(reader)] == [38, 39]


def test_single_image_is_a_shard_of_one(worker, package):
    [(image, _)] = jpegs(1, size=100)
    name = "/AUTH_a/data/photos/cat.v2.jpg"
    job = job_for(image, package, source_name=name)
    [row] = rows_of(worker.run(job, package, image))
    assert (row.index, row.key, row.label, row.error) == (0, "cat", None, None)
    broken = image[:40]
    job = job_for(broken, package, source_name=name)
    [row] = rows_of(worker.run(job, package, broken))
    assert "'cat'" in (row.error or "")


@pytest.mark.parametrize(
    ("source", "changes", "code"),
    [
        (b"no image" + bytes(600), {}, "unsupported_object"),
        (b"", {}, "unsupported_object"),
        (b"{}", {}, "unsupported_object"),
        (tar_of([]), {}, "empty_shard"),
        (
            shard(3, size=80),
            {"samples": SampleRange(3)},
            "samples_out_of_range",
        ),
        (shard(3, size=80)[:700], {}, "damaged_shard"),
    ],
)
def test_object_that_cannot_be_read_is_refused_by_name(
    worker, package, source, changes, code
):
    job = job_for(source, package, **changes)
    answer = worker.refusal(job, package, source)
    assert (answer.status, answer.code) == (422, code)
    assert "shard-000.tar" in answer.fields["message"]
    assert answer.fields["trans_id"] == TRANS_ID
    assert worker.idle()


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"cut": LAST_CUT + 1}, 422, "cut_out_of_range"),
        ({"encoding": "uint8;zip"}, 400, "unknown_encoding"),
        ({"transform": "train"}, 400, "unknown_transform"),
        ({"transform": TRAIN}, 422, "unsupported_transform"),
        ({"numerics": "fast"}, 422, "unsupported_numerics"),
        ({"source_length_bytes": 1 << 50}, 413, "object_too_large"),
        ({"cut": 0}, 400, "bad_request"),
        ({"charged_account": ""}, 400, "bad_request"),
    ],
)
def test_request_that_cannot_be_met_is_refused_at_once(
    worker, package, tar, changes, status, code
):
    worker.put(package)
    answer = worker.ask(job_for(tar, package, **changes))
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers["X-Trans-Id"] == TRANS_ID
    if code == "cut_out_of_range":
        assert answer.fields["allowed"] == [1, LAST_CUT]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "not_found"),
        ("DELETE", "/jobs", None, 405, "method_not_allowed"),
        ("GET", "/profiles", None, 405, "method_not_allowed"),
        ("POST", "/jobs/unknown", None, 400, "bad_request"),
        ("POST", "/jobs", b"{", 400, "bad_request"),
        ("POST", "/jobs", b" " * 70000, 400, "bad_request"),
        ("POST", "/profiles", b"{", 400, "bad_request"),
        ("GET", "/models", None, 400, "bad_request"),
    ],
)
def test_malformed_request_is_refused_and_counted(
    worker, method, path, body, status, code
):
    def counted():
        return worker.worker.metrics.value(
            "hapi_worker_refusals_total", reason=code
        )

    before = counted()
    answer = worker.request(method, path, body)
    assert (answer.status, answer.code) == (status, code)
    assert counted() == before + 1


def test_unknown_job_is_refused_and_counted(worker):
    stream = Streaming(worker.socket, "unknown", [b"x"])
    assert stream.answer().status == 404
    stream.close()
    assert 'refusals_total{reason="not_found"}' in (
        worker.request("GET", "/metrics").body.decode()
    )


def test_response_starts_while_the_body_still_arrives(worker, package, tar):
    go_on = threading.Event()
    job = job_for(tar, package)
    with worker.streaming(job, package, in_two(tar, go_on)) as stream:
        answer = stream.answer()
        assert answer.status == 200
        batches = iter(read_features(answer))
        first = next(batches)
        assert not stream.sent_all
        assert first.rows[0].index == 0
        go_on.set()
        rows = len(first.rows) + sum(len(batch.rows) for batch in batches)
    assert rows == NUM_SAMPLES


def test_slow_client_stops_the_sender(tmp_path, package):
    tar = shard(600, size=64)
    sent = 0

    def counted():
        nonlocal sent
        for piece in pieces(tar, 4096):
            sent += len(piece)
            yield piece

    def is_stopped():
        before = sent
        time.sleep(0.3)
        return 0 < before == sent

    with (
        running_worker(tmp_path, buffer_bytes=200_000) as worker,
        worker.streaming(
            job_for(tar, package, cut=1), package, counted()
        ) as stream,
    ):
        answer = stream.answer()
        until(is_stopped)
        assert sent < len(tar) / 2
        reader = read_features(answer)
        assert sum(len(batch.rows) for batch in reader) == 600


def test_health_and_metrics_answer_on_both_sockets(own_worker, package, tar):
    own_worker.run(job_for(tar, package), package, tar)
    assert own_worker.idle()
    for admin in (False, True):
        health = own_worker.request("GET", "/healthz", admin=admin)
        assert health.status == 200
        assert health.fields["status"] == "ok"
        assert health.fields["resident_models"] == 1
        text = own_worker.request("GET", "/metrics", admin=admin).body.decode()
        assert (
            'hapi_worker_jobs_total{kind="features",outcome="done",reason=""}'
            " 1.0" in text
        )
        assert f"hapi_worker_samples_total {NUM_SAMPLES}.0" in text
        assert "hapi_worker_resident_models 1.0" in text
        assert f"hapi_worker_received_bytes_total {float(len(tar))}" in text
    for method, path in (
        ("POST", "/jobs"),
        ("GET", "/jobs/unknown"),
        ("POST", "/profiles"),
    ):
        refused = own_worker.request(method, path, b"{}", admin=True)
        assert refused.status == 404
        assert b"there is no path" in refused.body


def test_metrics_table_names_each_metric(own_worker):
    from hapi_worker.monitoring import metrics

    table = {
        line.split()[0]
        for line in metrics.__doc__.splitlines()
        if line.startswith("hapi_worker_")
    }
    text = own_worker.request("GET", "/metrics").body.decode()
    exposed = {
        line.split()[2] for line in text.splitlines() if "# TYPE" in line
    }
    assert {name for name in exposed if not name.endswith("_created")} == table
