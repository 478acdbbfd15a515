"""Images that are dear to decode: processes of their own, and their limits."""

from __future__ import annotations

import http.client
import io
import json
import threading
from contextlib import ExitStack

import pytest
import torch

from hapi_protocol.errors import (
    TooSlowError,
    UnavailableError,
)
from hapi_protocol.samples import SampleError
from hapi_protocol.transforms import Training
from hapi_splitter.fork_server import ForkServer
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.inputs.image_header import LARGE_BYTES, read_header
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.subprocess_decode import LargeImage
from hapi_worker.scheduling.fair_pool import FairPool
from hapi_worker.scheduling.fair_queue import Ledger
from hostile_decode import PAUSED
from photos import photo, shard, tar_of
from pillow_formats import needs_format
from waiting import SECONDS, until
from worker_under_test import (
    assert_features,
    features_of,
    job_for,
    jobs_ended,
    pieces,
    rows_of,
    running_worker,
    small_features,
)

PLAIN = ImageTransform(resize_size=72, crop_size=64)
TRANSFORMS = [
    (PLAIN, None),
    (ImageTransform(72, 64, integer_resize=False), None),
    (ImageTransform(72, 64, augmentation=Augmentation()), Training(1, 2)),
]


def image_file(kind, size=(300, 200), mode="RGB", **options):
    image = photo("coffee.png").resize(size).convert(mode)
    image.save(sink := io.BytesIO(), kind, **options)
    return sink.getvalue()


def large(data, transform=PLAIN, training=None, **changes):
    values = {
        "data": data,
        "header": read_header(data),
        "key": "k",
        "transform": transform,
        "training": training,
        "max_pixels": 1 << 26,
        "formats": ("jpeg", "png", "webp", "gif", "bmp", "tiff", "avif"),
        **changes,
    }
    return LargeImage(**values)


@pytest.fixture(scope="module")
def fork_server():
    with ForkServer() as server:
        yield server


@pytest.mark.parametrize(("transform", "training"), TRANSFORMS)
@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]
)
def test_process_gives_the_same_bits(fork_server, kind, transform, training):
    needs_format(kind)
    data = image_file(kind)
    image, cpu = large(data, transform, training).decode(fork_server, SECONDS)
    wanted = transform.sample(decode_image(data), "k", training)
    assert torch.equal(image, wanted)
    assert cpu > 0


def test_damaged_image_is_refused_with_the_usual_words(fork_server):
    data = image_file("PNG")[:-200]
    with pytest.raises(SampleError, match="damaged PNG: it cannot be decoded"):
        large(data, header=read_header(image_file("PNG"))).decode(
            fork_server, SECONDS
        )


def test_decoding_beyond_its_deadline_ends(fork_server):
    # Forking it and reading it alone take milliseconds.
    data = image_file("PNG", (8000, 8000))
    with pytest.raises(TooSlowError, match=r"a PNG of \d+ bytes took over 0"):
        large(data).decode(fork_server, 0.02)


def test_decoder_that_crashes_costs_its_image_alone():
    with (
        ForkServer("hostile_decode") as server,
        pytest.raises(SampleError, match="damaged JPEG: it crashes its decod"),
    ):
        large(image_file("JPEG")).decode(server, SECONDS)


def test_process_has_a_limit_of_memory(fork_server, monkeypatch):
    monkeypatch.setattr(
        "hapi_splitter.inputs.subprocess_decode.LargeImage.num_bytes",
        property(lambda self: -(1 << 30) + (64 << 20)),
    )
    with pytest.raises(UnavailableError, match="too little memory"):
        large(image_file("PNG", (8000, 8000), "L")).decode(
            fork_server, SECONDS
        )


def test_resize_counts_like_decoding():
    """A file of some hundred bytes whose resize takes 65 million pixels."""
    thin = image_file("PNG", (1, 1000))
    assert read_header(thin).decoding_bytes < 1 << 20
    assert large(thin, ImageTransform(256, 224)).num_bytes > LARGE_BYTES


@pytest.fixture
def paused(monkeypatch, tmp_path):
    (tmp_path / "paused").touch()
    monkeypatch.setenv(PAUSED, str(tmp_path / "paused"))
    return tmp_path / "paused"


def test_neighbour_is_served_while_large_images_are_decoded(
    tmp_path, package, paused
):
    data = image_file("PNG", (2500, 2000))
    dear = tar_of((f"{n}.png", data) for n in range(6))
    photos = shard(20)
    with (
        ForkServer("hostile_decode") as server,
        running_worker(tmp_path, fork_server=server, forwards=1) as worker,
        ExitStack() as streams,
    ):
        worker.put(package)
        answers = []
        for _ in range(3):
            stream = streams.enter_context(
                worker.streaming(job_for(dear, package), None, pieces(dear))
            )
            answers.append(threading.Thread(target=stream.answer))
            answers[-1].start()
        large_pool = worker.worker.pools["large"]
        until(lambda: len(large_pool) > 0, SECONDS)
        neighbour = job_for(photos, package, charged_account="AUTH_b")
        assert worker.run(neighbour, package, photos).summary.rows == 20
        assert paused.exists()
        # Its own large images find a free thread as well.
        one = tar_of([("one.png", data)])
        stream = streams.enter_context(
            worker.streaming(
                job_for(one, package, charged_account="AUTH_b"),
                None,
                pieces(one),
            )
        )
        until(lambda: large_pool._busy["AUTH_b"] == 1, SECONDS)
        assert len(large_pool) > 0
        paused.unlink()
        for answer in answers:
            answer.join()


def test_job_with_large_and_small_images(tmp_path, package):
    small, dear = image_file("PNG"), image_file("PNG", (2500, 2000))
    broken = dear[:-5000]
    source = tar_of(
        (f"{n}.png", data) for n, data in enumerate([small, dear, broken] * 2)
    )
    with running_worker(tmp_path) as worker:
        reader = worker.run(job_for(source, package), package, source)
    errors = [row.error for row in rows_of(reader)]
    assert errors[0] is errors[1] is errors[3] is errors[4] is None
    assert errors[2] == "sample '2': damaged PNG: it cannot be decoded"
    assert len(features_of(reader)) == 4
    assert_features(reader, small_features([small, dear] * 2))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decode_seconds": 0.02}, "too_slow"),
        ({"memory_limit": 100 << 20}, "does_not_fit"),
    ],
)
def test_image_beyond_a_limit_ends_its_job(tmp_path, package, options, reason):
    """The client reads the samples themselves then."""
    source = tar_of([("a.png", image_file("PNG", (2500, 2000)))])
    with running_worker(tmp_path, **options) as worker:
        with worker.streaming(
            job_for(source, package), package, pieces(source)
        ) as stream:
            answer = stream.answer()
            if answer.status == 200:  # it began before the image failed
                with pytest.raises(http.client.IncompleteRead):
                    answer.read()
            else:
                assert json.loads(answer.read())["code"] == reason
        until(lambda: jobs_ended(worker, "failed", reason) == 1, SECONDS)


def test_pool_leaves_threads_to_other_accounts():
    pool = FairPool("shared", 2, Ledger(), share=1)
    release, other = threading.Event(), threading.Event()
    try:
        for _ in range(3):
            pool.submit("a", lambda: release.wait(SECONDS))
        pool.submit("b", other.set)
        assert other.wait(SECONDS)
        assert len(pool) == 2
    finally:
        release.set()
        assert pool.close()
