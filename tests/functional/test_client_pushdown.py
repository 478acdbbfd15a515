"""The whole chain: the same training run with and without push-down."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hapi_client import ReadConfig
from hapi_client.cli.demo.run import BATCH_NORM_FACTOR, largest_difference
from hapi_client.data.index import find_index, load_index
from hapi_client.data.indexing import update_index
from hapi_client.loading import read_config
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError, DataIndexError, HapiError
from hapi_splitter.freezing.split_model import split
from hapi_training.loop import train_tail
from hapi_training.recipe import Recipe
from jobs import small_job, upload_shards
from local_rows import local_rows
from networks import small_network, small_transform
from photos import shard, with_corrupt_member

TOLERANCE = 1e-4
NUM_SAMPLES = 40
QUICK = ReadConfig(num_threads=2)


@pytest.fixture(autouse=True)
def _two_attempts(monkeypatch):
    backoff = Backoff(attempts=2, first_seconds=0.05)
    monkeypatch.setattr(read_config, "SPAN_BACKOFF", backoff)


@pytest.fixture(scope="module")
def photos(connection):
    shards = {"a.tar": shard(25), "b.tar": shard(15, seed=1)}
    return upload_shards(connection, Location("pushdown", "photos"), shards)


def job_of(connection, place, **options):
    base = {"cut": "freeze", "batch_size": 8, "read": QUICK}
    return small_job(place, connection=connection, **{**base, **options})


def losses_of(connection, place, **options):
    with job_of(connection, place, **options) as job:
        history = train_tail(job, epochs=2, recipe=Recipe(0.01))
        assert job.stats.fallbacks == 0
        assert job.stats.samples == 2 * NUM_SAMPLES
        assert sum(job.stats.samples_by_cut.values()) == 2 * NUM_SAMPLES
        return history.losses


@pytest.fixture(scope="module")
def streamed(connection, photos):
    return losses_of(connection, photos, cut="stream")


def test_tail_with_batch_norm_differs_no_more_than_streaming_does(
    connection, photos
):
    """BatchNorm amplifies rounding, so the yardstick is streaming itself."""
    inner = {"freeze": "body.0"}
    other_split = replace(QUICK, forward_samples=3)
    streamed = losses_of(connection, photos, cut="stream", **inner)
    again = losses_of(
        connection, photos, cut="stream", read=other_split, **inner
    )
    pushed = losses_of(connection, photos, **inner)
    own = largest_difference(streamed, again)
    found = largest_difference(streamed, pushed)
    assert found <= max(TOLERANCE, BATCH_NORM_FACTOR * own), (found, own)


def test_half_precision_halves_the_bytes(connection, photos, streamed):
    received = {}
    for encoding in ("float32", "float16"):
        with job_of(connection, photos, encoding=encoding, cut=1) as job:
            before = job.stats.bytes
            history = train_tail(job, epochs=1, recipe=Recipe(0.01))
            received[encoding] = job.stats.bytes - before
            assert largest_difference(streamed[:5], history.losses) < 0.01
    assert received["float16"] < 0.55 * received["float32"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_of_16_bits_arrive_as_the_region_computes_them(
    connection, photos, dtype
):
    network = small_network().to(dtype)
    region = split(network, "body", transform=small_transform()).frozen
    options = {"network": network, "batch_size": NUM_SAMPLES}
    found = {}
    for cut in (1, "freeze", "stream"):
        with job_of(connection, photos, cut=cut, **options) as job:
            ((found[cut], _),) = job.pipeline.loader()
            assert found[cut].dtype == dtype
            assert job.stats.fallbacks == job.stats.saturated == 0
            if cut != "stream":
                assert f"torch.{job.pipeline.plan.encodings[0]}" == str(dtype)
            history = train_tail(job, epochs=1, recipe=Recipe(0.01))
            assert all(map(math.isfinite, history.losses))
    shards = {"a.tar": shard(25), "b.tar": shard(15, seed=1)}
    rows = [
        local_rows(region, region.num_cuts, data, name).features
        for name, data in shards.items()
    ]
    expected = torch.from_numpy(np.concatenate(rows))
    assert torch.equal(found["freeze"].float(), expected)
    limit = 2**-5 if dtype == torch.bfloat16 else 2**-8
    for features in found.values():
        largest = (features.float() - expected).abs().max()
        assert largest <= limit * expected.abs().max()


def test_the_package_travels_once(connection, photos):
    with job_of(connection, photos, models_container="once") as job:
        assert job.stats.package_bytes > 0
    with job_of(connection, photos, models_container="once") as job:
        assert job.stats.package_bytes == 0


def test_the_index_stream_gives_the_index_of_the_upload(connection, photos):
    uploaded = load_index(connection, photos)
    connection.delete(photos.container, photos.index_name)
    report = update_index(connection, photos)
    assert (report.indexed, report.samples) == (2, NUM_SAMPLES)
    assert load_index(connection, photos) == uploaded
    assert update_index(connection, photos).skipped == 2


def test_a_place_without_data_is_named_with_those_that_have(
    connection, photos
):
    empty = Location(photos.container, "empty")
    with pytest.raises(DataIndexError, match=r"no object ending in \.tar"):
        update_index(connection, empty)
    assert find_index(connection, empty) is None
    with pytest.raises(
        DataIndexError, match=f"among the data sets .* are .*{photos}"
    ):
        load_index(connection, Location(photos.container, "phtoos"))
    with pytest.raises(HapiError, match="there is no container 'nowhere'"):
        load_index(connection, Location("nowhere", ""))


def test_bad_samples_are_the_same_ones_on_both_tiers(connection):
    place = Location("pushdown", "bad")
    shards = {"a.tar": with_corrupt_member(shard(6), "s0-0003")}
    upload_shards(connection, place, shards)
    messages = []
    labels = []
    for cut in ("stream", "freeze"):
        with job_of(connection, place, cut=cut) as job:
            with pytest.raises(ClientError, match="s0-0003") as caught:
                list(job.pipeline.loader())
            messages.append(caught.value.message)
        with job_of(connection, place, cut=cut, on_error="skip") as job:
            labels.append(
                torch.cat([each for _, each in job.pipeline.loader(0)])
            )
            assert job.stats.skipped == 1
    assert messages[0] == messages[1]
    assert labels[0].tolist() == labels[1].tolist()
