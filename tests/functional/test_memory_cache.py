"""Features that stay in the memory of a job for later epochs."""

import pytest
import torch

from hapi_client import Augmentation, ReadConfig
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError
from jobs import small_job, upload_shards
from photos import shard, with_corrupt_member

DATA = "swift://memory/photos"
DAMAGED = "swift://memory/damaged"
COUNTS = (24, 40, 16)
NUM_SAMPLES = sum(COUNTS)
SAMPLE_BYTES = 4 * 64


@pytest.fixture(scope="module")
def photos(connection, tmp_path_factory):
    shards = {
        f"{number}.tar": shard(count, size=40, seed=number)
        for number, count in enumerate(COUNTS)
    }
    folder = tmp_path_factory.mktemp("shards")
    upload_shards(connection, parse_location(DATA), folder, shards)
    bad = tmp_path_factory.mktemp("damaged")
    shards["1.tar"] = with_corrupt_member(shards["1.tar"], "s1-0003")
    upload_shards(connection, parse_location(DAMAGED), bad, shards)


def job_of(connection, data=DATA, *, cache_memory_bytes=None, **options):
    read = ReadConfig(
        cache_memory_bytes=cache_memory_bytes,
        decode_threads=1,
        on_error=options.pop("on_error", "raise"),
    )
    return small_job(
        data,
        connection=connection,
        batch_size=16,
        seed=3,
        read=read,
        **{"cut": "freeze", **options},
    )


def epoch_of(job, epoch, **options):
    """Keys, features and labels of an epoch."""
    loader = job.loader(epoch, **options)
    keys, batches = [], []
    for batch in loader:
        keys += loader.keys
        batches.append(batch)
    features, labels = (torch.cat(each) for each in zip(*batches, strict=True))
    return keys, features, labels


def assert_same_epoch(actual, expected):
    assert actual[0] == expected[0]
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-5)
    assert torch.equal(actual[2], expected[2])


@pytest.mark.parametrize("cut", ["freeze", "stream", 1])
def test_later_epochs_are_read_from_memory_alone(connection, photos, cut):
    with job_of(connection, cache_memory_bytes=0) as job:
        expected = [epoch_of(job, epoch) for epoch in (0, 1, 2, None)]
        assert job.stats.memory_hits == 0
    with job_of(connection, cut=cut) as job:
        assert_same_epoch(epoch_of(job, 0), expected[0])
        received = job.stats.bytes
        for epoch, wanted in zip((1, 2, None), expected[1:], strict=True):
            assert_same_epoch(epoch_of(job, epoch), wanted)
        assert job.stats.bytes == received
        assert job.stats.memory_hits == 3 * NUM_SAMPLES
        assert job.stats.samples == 4 * NUM_SAMPLES
        reports = job.reports
    assert [each.memory_samples for each in reports] == [0, *3 * [NUM_SAMPLES]]
    assert [each.requests for each in reports[1:]] == [0, 0, 0]
    assert all(each.is_finished for each in reports)


def test_batches_may_be_changed_and_saved_by_autograd(connection, photos):
    with job_of(connection) as job:
        with torch.inference_mode():
            expected = epoch_of(job, 0)
        weight = torch.ones((), requires_grad=True)
        for _ in range(2):
            for features, labels in job.loader(0):
                (features * weight).sum().backward()
                features.zero_()
                labels.zero_()
        assert_same_epoch(epoch_of(job, 0), expected)


def test_what_does_not_fit_is_read_again(connection, photos):
    with job_of(connection, cache_memory_bytes=0) as job:
        expected = [epoch_of(job, epoch) for epoch in (0, 1)]
    with job_of(connection, cache_memory_bytes=50 * SAMPLE_BYTES) as job:
        assert_same_epoch(epoch_of(job, 0), expected[0])
        assert_same_epoch(epoch_of(job, 1), expected[1])
        assert 0 < job.stats.memory_hits <= 50
        assert job.stats.samples == 2 * NUM_SAMPLES


def test_budget_below_one_sample_is_a_warning(connection, photos, caplog):
    with job_of(connection, cache_memory_bytes=SAMPLE_BYTES - 1) as job:
        for epoch in (0, 1):
            epoch_of(job, epoch)
        assert job.stats.memory_hits == 0
    assert "features are not cached in memory" in caplog.text


def test_negative_budget_is_refused():
    with pytest.raises(ClientError, match="bytes is -1; 0 caches nothing"):
        ReadConfig(cache_memory_bytes=-1)


def test_bad_samples_are_skipped_or_raised_in_each_epoch(connection, photos):
    with job_of(connection, DAMAGED, on_error="skip") as job:
        for epoch in (0, 1):
            keys, _, _ = epoch_of(job, epoch)
            assert len(keys) == NUM_SAMPLES - 1
        assert job.stats.memory_hits == NUM_SAMPLES - 1
        assert job.stats.skipped == 2
    with job_of(connection, DAMAGED) as job:
        for _ in range(2):
            with pytest.raises(
                ClientError, match=r"cannot be decoded|damaged"
            ):
                epoch_of(job, 0)


def test_resumed_epoch_continues_from_memory(connection, photos):
    with job_of(connection) as job:
        epoch_of(job, 0)
        expected = epoch_of(job, 1)
        loader = iter(job.loader(1))
        for _ in range(2):
            next(loader)
        loader.close()
        job.load_state_dict(job.state_dict())
        keys, _, _ = epoch_of(job, 1)
        assert keys == expected[0][32:]
        assert job.epoch == 2


def test_random_changes_are_cached_only_if_they_repeat(connection, photos):
    options = {"augment": Augmentation()}
    with job_of(connection, **options) as job:
        epochs = [epoch_of(job, epoch)[1] for epoch in (0, 1, 0)]
        assert not torch.equal(epochs[0], epochs[1])
        assert job.stats.memory_hits == 0
        for _ in range(2):
            epoch_of(job, None)
        assert job.stats.memory_hits == NUM_SAMPLES
    with job_of(connection, augment_period_epochs=2, **options) as job:
        first = [epoch_of(job, epoch) for epoch in (0, 1)]
        assert job.stats.memory_hits == 0
        third = epoch_of(job, 2)
        assert job.stats.memory_hits == NUM_SAMPLES
        order = [
            sorted(range(NUM_SAMPLES), key=e[0].__getitem__)
            for e in (third, first[0])
        ]
        torch.testing.assert_close(third[1][order[0]], first[0][1][order[1]])
