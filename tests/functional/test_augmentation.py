"""Random changes of training images: the same run, wherever they are made."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hapi_client import Augmentation, ReadConfig
from hapi_client.loading import read_config
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import Location
from hapi_protocol.feature_reader import read_features
from hapi_protocol.transforms import Training
from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.image_decode import decode_image
from hapi_splitter.planner.problem import RAW_ROUTE, Route
from jobs import small_job, store_package, upload_shards
from local_rows import local_rows, received_rows
from networks import small_network, small_transform
from photos import jpegs, shard

CHANGED = "/AUTH_test/changed"
NUM_SAMPLES = 24
ALL = range(NUM_SAMPLES)
SEED = 5
CHANGES = Augmentation(
    scale=(0.3, 1.0),
    vertical_flip=0.5,
    brightness=(0.7, 1.3),
    contrast=(0.7, 1.3),
    saturation=(0.7, 1.3),
    hue=(-0.1, 0.1),
)
QUICK = ReadConfig(num_threads=2)


@pytest.fixture(autouse=True)
def _two_attempts(monkeypatch):
    backoff = Backoff(attempts=2, first_seconds=0.05)
    monkeypatch.setattr(read_config, "SPAN_BACKOFF", backoff)


@pytest.fixture(scope="module")
def photos(connection):
    shards = {"a.tar": shard(16), "b.tar": shard(8, seed=1)}
    return upload_shards(connection, Location("augmented", "photos"), shards)


def job_of(connection, place, **options):
    return small_job(
        place,
        connection=connection,
        **{
            "augment": CHANGES,
            "seed": SEED,
            "batch_size": 8,
            "read": QUICK,
            "cut": "freeze",
            **options,
        },
    )


def features_of(job, epoch):
    """Features of all samples, in the order of the epoch."""
    computed = torch.cat(
        [features for features, _ in job.pipeline.loader(epoch)]
    )
    assert len(computed) == NUM_SAMPLES
    assert job.stats.fallbacks == 0
    return computed


def assert_close(actual, wanted):
    most = float(wanted.abs().max())
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5 * most)


def assert_same_set(actual, wanted):
    """In whatever order."""
    sums = (
        features.flatten(1).sum(1).sort().values
        for features in (actual, wanted)
    )
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-4)


def test_every_cut_gives_the_same_training_rows(connection, photos):
    rows = {}
    with job_of(connection, photos, cut="stream") as job:
        for epoch in (0, 1, None):
            rows[epoch] = features_of(job, epoch)
        assert torch.equal(features_of(job, 0), rows[0])
    for cut in (1, "freeze"):
        with job_of(connection, photos, cut=cut) as job:
            for epoch, wanted in rows.items():
                assert_close(features_of(job, epoch), wanted)
    # A plan that mixes them changes each image alike.
    with job_of(connection, photos, cut="freeze") as job:
        job.pipeline._factory.scheduler.change(
            {
                RAW_ROUTE: 0.4,
                Route(1, "float32"): 0.3,
                Route(3, "float32;zstd"): 0.3,
            }
        )
        assert_close(features_of(job, 1), rows[1])
        assert len(job.stats.samples_by_cut) > 1


def test_changes_that_repeat_are_found_again_in_the_store(connection, photos):
    repeated = {"augment_period_epochs": 2}
    with job_of(connection, photos, store="readwrite", **repeated) as job:
        first = [features_of(job, epoch) for epoch in (0, 1)]
        assert job.stats.cached == 0
    with job_of(connection, photos, store="read", **repeated) as job:
        for epoch in (2, 3):
            assert_same_set(features_of(job, epoch), first[epoch - 2])
        assert job.stats.cached == 2 * NUM_SAMPLES


def test_torchs_data_loader_has_the_epochs_changes(connection, photos):
    with job_of(connection, photos, cut="stream") as job:
        evaluated = features_of(job, None)
        for epoch in (0, 1):
            wanted = features_of(job, epoch)
            dataset = job.dataset()
            dataset.set_epoch(epoch)
            loader = DataLoader(
                dataset, batch_size=None, num_workers=2, timeout=100
            )
            loaded = torch.cat([features for features, _ in loader])
            assert_same_set(loaded, wanted)
            dataset.set_epoch(epoch)
            samples = dataset.samples()
            features = [sample for sample, _ in samples.__getitems__([*ALL])]
            assert_same_set(torch.stack(features), wanted)
            samples.close()
        samples = job.dataset(shuffle=False).samples()
        assert_close(samples[3][0], evaluated[3])
        samples.close()


@pytest.fixture(scope="module")
def frozen():
    transform = replace(small_transform(), augmentation=CHANGES)
    return split(small_network(), "body", transform=transform).frozen


@pytest.fixture(scope="module")
def model(connection, owner, frozen, tmp_path_factory):
    owner.put(CHANGED)
    owner.put(f"{CHANGED}/a.tar", shard(NUM_SAMPLES))
    return store_package(connection, tmp_path_factory.mktemp("p"), frozen)


def asked(model, transform):
    headers = {"X-Hapi-Model": model.quoted(), "X-Hapi-Cut": "1"}
    return headers | ({"X-Hapi-Transform": transform} if transform else {})


def test_rows_are_those_computed_here_to_the_bit(owner, model, frozen):
    source = shard(NUM_SAMPLES)
    etags = set()
    for transform, training in (
        (None, None),
        ("train;seed=5;epoch=0", Training(5, 0)),
        ("train;seed=5;epoch=1", Training(5, 1)),
        ("train;seed=6;epoch=0", Training(6, 0)),
    ):
        answer = owner.get(f"{CHANGED}/a.tar", asked(model, transform))
        assert answer.status_code == 200, answer.text
        etags.add(answer.headers["ETag"])
        received_rows(answer.content).assert_equal(
            local_rows(frozen, 1, source, "a.tar", training=training)
        )
    assert len(etags) == 4


def test_keys_of_single_objects_and_of_many(owner, model, frozen):
    ((image, _),) = jpegs(1)
    owner.put(f"{CHANGED}/one.b.jpg", image)
    headers = asked(model, "train;seed=1;epoch=2")
    single = owner.get(f"{CHANGED}/one.b.jpg", headers)
    many = owner.request("POST", f"{CHANGED}?hapi", headers, b"one.b.jpg\n")
    for answer, key in ((single, "one"), (many, "one.b.jpg")):
        assert answer.status_code == 200, answer.text
        batches = list(read_features(answer.content))
        assert [row.key for batch in batches for row in batch.rows] == [key]
        pixels = frozen.transform.sample(
            decode_image(image), key, Training(1, 2)
        )
        with torch.inference_mode():
            wanted = frozen.prefix(1)(pixels[None])
        (features,) = (b.features for b in batches if b.rows)
        assert_close(torch.from_numpy(np.array(features)), wanted)
