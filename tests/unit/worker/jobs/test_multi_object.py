"""Jobs over many objects, through the worker's own socket."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from framed_objects import framed, good
from hapi_protocol.multi_object import ObjectEntry
from hapi_worker.jobs.sample_reader import BodyStart
from photos import jpegs, shard
from worker_under_test import (
    assert_features,
    in_two,
    job_for,
    pieces,
    rows_of,
    small_features,
)

MAX_SAMPLE_BYTES = 60_000
OPTIONS = {
    "max_sample_bytes": MAX_SAMPLE_BYTES,
    "max_object_bytes": 400_000,
    "max_pixels": 200_000,
    "buffer_bytes": 300_000,
}


def job_over(num_objects, package, **changes):
    job = job_for(b"", package, **changes)
    return replace(
        job,
        source_name="/AUTH_a/data",
        source_etag="",
        source_length_bytes=None,
        num_objects=num_objects,
    )


def images(count, seed=0):
    return [data for data, _ in jpegs(count, size=90, seed=seed)]


def large_image():
    sink = io.BytesIO()
    Image.new("RGB", (600, 500)).save(sink, "JPEG")
    return sink.getvalue()


def test_object_that_cannot_be_used_is_a_row_that_says_why(worker, package):
    first, second = images(2)
    array = io.BytesIO()
    np.save(array, np.zeros(4))
    contents = {
        "first": first,
        "garbage": b"garbage " * 500,
        "short": b"x",
        "empty": b"",
        "tar": shard(2, size=60),
        "npy": array.getvalue(),
        "cut": first[:300],
        "pixels": large_image(),
        "bytes": bytes(MAX_SAMPLE_BYTES + 1),
        "second": second,
    }
    objects = [
        (ObjectEntry(n, name, 200, name), data)
        for n, (name, data) in enumerate(contents.items())
    ]
    refused = ObjectEntry(len(objects), "gone", 404, None, "not_found: gone")
    reader = worker.run(
        job_over(len(objects) + 1, package),
        package,
        framed([*objects, (refused, b"")]),
    )

    rows = rows_of(reader)
    errors = {row.key: row.error for row in rows}
    assert list(errors) == [*contents, "gone"]
    assert errors["first"] is errors["second"] is None
    for name, said in {
        "garbage": "neither an image nor a NumPy array",
        "short": "neither an image nor a NumPy array",
        "empty": "it is empty",
        "tar": "a tar of samples",
        "npy": "a NumPy array (.npy), and the model takes images",
        "cut": "sample 'cut': damaged JPEG",
        "pixels": "600x500 pixels is over the limit",
    }.items():
        error = errors[name] or ""
        assert error.startswith("unsupported_object: ")
        assert said in error
    assert (errors["bytes"] or "").startswith("object_too_large: 60001 bytes")
    assert errors["gone"] == "not_found: gone"
    statuses = {r.key: json.loads(r.meta or "")["status"] for r in rows}
    assert (statuses["tar"], statuses["bytes"], statuses["gone"]) == (
        200,
        413,
        404,
    )
    assert_features(reader, small_features([first, second]))


def test_objects_that_all_failed_are_rows(worker, package):
    """More than a micro-batch of them, and no pass is run."""
    objects = [
        (ObjectEntry(n, f"{n}", 404, None, "not_found: x"), b"")
        for n in range(300)
    ]
    reader = worker.run(job_over(300, package), package, framed(objects))

    rows = rows_of(reader)
    assert [row.index for row in rows] == list(range(300))
    assert {row.error for row in rows} == {"not_found: x"}
    assert reader.summary.errors == 300


def test_failed_objects_between_images_keep_their_places(worker, package):
    contents = images(60, seed=1)
    objects = [
        (ObjectEntry(n, f"{n}", 503, None, "service_unavailable: x"), b"")
        if n % 3
        else (ObjectEntry(n, f"{n}", 200, "e"), contents[n])
        for n in range(60)
    ]
    reader = worker.run(job_over(60, package), package, framed(objects))

    errors = [row.error is not None for row in rows_of(reader)]
    assert errors == [bool(n % 3) for n in range(60)]
    assert_features(reader, small_features(contents[::3]))


def test_first_rows_come_while_objects_are_still_missing(worker, package):
    source = framed(good(images(40, seed=3)))
    has_begun = threading.Event()
    body = in_two(source, has_begun)
    with worker.streaming(job_over(40, package), package, body) as stream:
        answer = stream.answer()
        assert answer.read1(1)
        has_begun.set()
        assert answer.read()
    assert stream.sent_all


@pytest.mark.parametrize("num_objects", [1, 3])
def test_body_of_another_number_of_objects_gives_no_whole_stream(
    worker, package, num_objects
):
    source = framed(good(images(2)))

    assert is_refused(worker, job_over(num_objects, package), package, source)


def test_body_over_the_workers_bound_gives_no_whole_stream(worker, package):
    source = framed(good([bytes(50_000)] * 9))

    assert is_refused(worker, job_over(9, package), package, source)
    assert worker.idle()


def test_body_that_is_cut_off_behind_its_objects_gives_no_whole_stream(
    worker, package
):
    source = framed(good(images(2)))
    has_sent = threading.Event()

    def body():
        yield source
        has_sent.set()
        raise OSError("no last chunk")

    with worker.streaming(job_over(2, package), package, body()) as stream:
        assert has_sent.wait(300)
        stream.socket.shutdown(socket.SHUT_WR)
        assert has_no_answer(stream)


def test_micro_batches_suit_the_number_of_objects(package):
    assert BodyStart(b"", "tar").num_samples(job_over(5, package)) == 5


def is_refused(worker, job, package, source):
    with worker.streaming(job, package, pieces(source)) as stream:
        return has_no_answer(stream)


def has_no_answer(stream):
    """Refused before the answer began, or broken off."""
    try:
        answer = stream.answer()
        answer.read()
    except (OSError, http.client.HTTPException):
        return True
    return answer.status in (400, 413)


def test_many_objects_have_no_index(worker, package):
    fields = json.loads(job_over(3, package).to_body())
    fields |= {"kind": "index", "model": None, "cut": 0}
    answer = worker.request("POST", "/jobs", json.dumps(fields).encode())

    assert (answer.status, answer.code) == (400, "bad_request")
