"""Arrays through a worker's sockets: features, and errors by name."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from array_networks import (
    MELS,
    TOKENS,
    array_shard,
    audio_network,
    bad_tokens,
    mel_arrays,
    npy,
    shard_with_bad_tokens,
    text_network,
    token_arrays,
)
from framed_objects import framed, good
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.writer import package_bytes
from photos import jpegs, shard, tar_of
from worker_under_test import (
    assert_features,
    identity_of,
    job_for,
    rows_of,
    running_worker,
    small_package,
)

OPTIONS = {"max_sample_bytes": 1 << 20}


@lru_cache(maxsize=2)
def frozen_of(kind):
    if kind == "text":
        return split(text_network(), "body", transform=TOKENS).frozen
    return split(audio_network(), "body", transform=MELS).frozen


@lru_cache(maxsize=2)
def package_of(kind):
    return package_bytes(frozen_of(kind))


def arrays_of(kind, count):
    return token_arrays(count) if kind == "text" else mel_arrays(count)


def run(worker, kind, source, **changes):
    package = package_of(kind)
    cut = frozen_of(kind).num_cuts
    identity = identity_of(package, f"{kind}.hapi", kind)
    job = replace(job_for(source, package), model=identity, cut=cut, **changes)
    return worker.run(job, package, source)


def assert_arrays(reader, kind, arrays):
    frozen = frozen_of(kind)
    dtype = str(frozen.form.dtype).removeprefix("torch.")
    batch = torch.from_numpy(np.stack(arrays).astype(dtype))
    with torch.inference_mode():
        wanted = frozen.prefix(frozen.num_cuts)(batch)
    assert_features(reader, wanted)


@pytest.mark.parametrize("kind", ["text", "audio"])
def test_arrays_of_a_shard_become_features(worker, kind):
    samples = arrays_of(kind, 21)
    reader = run(worker, kind, array_shard(samples))
    rows = rows_of(reader)
    assert [row.label for row in rows] == [label for _, label in samples]
    assert {row.error for row in rows} == {None}
    assert_arrays(reader, kind, [array for array, _ in samples])


@pytest.mark.parametrize("kind", ["text", "audio"])
def test_array_of_its_own_is_one_sample(worker, kind):
    (array, _), *_ = arrays_of(kind, 1)
    name = "/AUTH_a/data/dir/one.two.npy"
    reader = run(worker, kind, npy(array), source_name=name)
    assert [(row.index, row.key) for row in rows_of(reader)] == [(0, "one")]
    assert_arrays(reader, kind, [array])


def test_objects_asked_for_together_may_be_arrays(worker):
    samples = [array for array, _ in token_arrays(3)]
    (image, _) = next(jpegs(1, size=60))
    contents = [*map(npy, samples), image, npy(samples[0])[:-1], b"x" * 600]
    reader = run(
        worker,
        "text",
        framed(good(contents)),
        source_name="/AUTH_a/data",
        source_etag="",
        source_length_bytes=None,
        num_objects=len(contents),
    )
    errors = [row.error for row in rows_of(reader)]
    assert errors[:3] == [None] * 3
    assert errors[3] == (
        "unsupported_object: it is a JPEG image, and the model takes arrays"
    )
    assert "truncated .npy" in errors[4]
    assert "unsupported_object: it is neither" in errors[5]
    assert_arrays(reader, "text", samples)


def test_bad_arrays_are_rows_that_say_why_and_harm_no_other(worker):
    reader = run(worker, "text", shard_with_bad_tokens())
    rows = rows_of(reader)
    failed = [row for row in rows if row.error is not None]
    bad = bad_tokens()
    assert len(rows) == 20 + len(bad)
    for row, (name, (_, said)) in zip(failed, bad.items(), strict=True):
        assert row.error.startswith(f"sample {row.key!r}: "), name
        assert said in row.error, name
    assert_arrays(reader, "text", [array for array, _ in token_arrays(20)])


def test_other_media_than_the_models_are_named(worker):
    rows = rows_of(run(worker, "text", shard(2, size=60)))
    assert {row.error for row in rows} == {
        f"sample '{row.key}' has no array member (npy) but only: jpg, cls"
        for row in rows
    }
    package = package_of("text")
    (image, _) = next(jpegs(1, size=60))
    job = replace(
        job_for(image, package),
        model=identity_of(package, "text.hapi", "text"),
    )
    refused = worker.refusal(job, package, image)
    assert (refused.status, refused.code) == (422, "unsupported_object")
    assert (
        "a JPEG image, and the model takes arrays"
        in (refused.fields["message"])
    )
    images = small_package()
    array = npy(token_arrays(1)[0][0])
    refused = worker.refusal(job_for(array, images), images, array)
    assert (refused.status, refused.code) == (422, "unsupported_object")
    assert "(.npy), and the model takes images" in refused.fields["message"]


def test_sample_with_an_array_and_an_image_has_what_the_model_takes(worker):
    array = token_arrays(1)[0][0]
    (image, _) = next(jpegs(1, size=60))
    source = tar_of([("a.jpg", image), ("a.npy", npy(array))])
    assert_arrays(run(worker, "text", source), "text", [array])


def test_nothing_is_random_about_arrays(worker):
    package = package_of("text")
    source = array_shard(token_arrays(1))
    job = replace(
        job_for(source, package, transform="train;seed=0;epoch=0"),
        model=identity_of(package, "text.hapi", "text"),
    )
    worker.put(package, job.model)
    refused = worker.ask(job)
    assert (refused.status, refused.code) == (422, "unsupported_transform")


def test_index_of_an_array_is_one_row(worker):
    source = npy(token_arrays(1)[0][0])
    (row,) = rows_of(worker.run(job_for(source), None, source))
    assert (row.index, row.length) == (0, len(source))


def test_model_whose_arrays_are_over_the_limit_is_refused(tmp_path):
    package = package_of("audio")
    source = array_shard(mel_arrays(1))
    with running_worker(tmp_path, max_sample_bytes=20_000) as worker:
        worker.put(package)
        refused = worker.ask(job_for(source, package))
    assert (refused.status, refused.code) == (422, "limit_exceeded")
    assert (
        "takes arrays of 25600 bytes; at most 20000"
        in (refused.fields["message"])
    )
