"""Cut 0 over a real Swift: uploads, order, changes, closing."""

import re
import threading
from pathlib import Path

import pytest
import torch

from hapi_client import ReadConfig
from hapi_client.data.index import list_shards, load_index
from hapi_client.data.upload import PackOptions, upload
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import (
    ClientError,
    DataIndexError,
    LabelError,
    SourceChangedError,
    UnsupportedError,
)
from hapi_splitter.inputs.image_decode import decode_image
from jobs import small_job, upload_shards
from networks import small_network, small_transform
from photos import PHOTOS, jpegs, shard, with_corrupt_member

SMALL_SPANS = ReadConfig(decode_threads=1, num_threads=2)


@pytest.fixture
def place(request):
    """A location of the test's own."""
    name = request.node.name.partition("[")[0].replace("_", "-")
    return Location("streaming", name[-60:])


@pytest.fixture
def store(connection, place, tmp_path):
    """Uploads shards, given by the stems of their names."""
    return lambda **shards: upload_shards(
        connection,
        place,
        tmp_path,
        {f"{stem}.tar": data for stem, data in shards.items()},
    )


@pytest.fixture
def job_of(connection, place):
    base = {
        "connection": connection,
        "cut": "stream",
        "read": SMALL_SPANS,
        "batch_size": 4,
    }
    return lambda **options: small_job(
        options.pop("data", place), **{**base, **options}
    )


def test_features_are_those_of_the_users_own_module(store, job_of):
    store(a=shard(6))
    network = small_network().eval()
    transform = small_transform()
    images = torch.stack(
        [transform(decode_image(data)) for data, _ in jpegs(6)]
    )
    with torch.no_grad():
        expected = torch.flatten(network.pool(network.body(images)), 1)
    with job_of() as job:
        batches = list(job.loader())
    features = torch.cat([f for f, _ in batches])
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    labels = torch.cat([each for _, each in batches])
    assert labels.tolist() == [label for _, label in jpegs(6)]


def test_an_epoch_delivers_all_and_depends_on_its_number_only(store, job_of):
    store(a=shard(7), b=shard(6, seed=1))

    def labels_of(epoch):
        with job_of() as job:
            return torch.cat([each for _, each in job.loader(epoch)]).tolist()

    first = labels_of(0)
    assert len(first) == 13
    assert labels_of(0) == first
    assert sorted(labels_of(1)) == sorted(first)


def test_bytes_are_those_of_the_samples(connection, place, store, job_of):
    store(a=shard(8))
    index = load_index(connection, place)
    needed = sum(row.length for row in index.shards[0].rows)
    with job_of() as job:
        before = job.stats.bytes
        assert sum(len(labels) for _, labels in job.loader()) == 8
        assert job.stats.bytes - before == needed
        assert job.stats.package_bytes == 0


def test_a_second_upload_sends_what_has_changed(connection, place, store):
    shards = {"a": shard(2), "b": shard(2, seed=1)}
    first, again = store(**shards), store(**shards)
    assert (first.uploaded, first.skipped) == (2, 0)
    assert (again.uploaded, again.skipped) == (0, 2)
    assert again.samples == 4
    changed = store(a=shard(3, seed=1))
    assert (changed.uploaded, changed.skipped) == (1, 1)
    assert len(load_index(connection, place)) == 5


def test_class_folders_become_labelled_shards(
    connection, place, tmp_path, job_of
):
    for number, (data, label) in enumerate(jpegs(12)):
        folder = tmp_path / Path(PHOTOS[label]).stem
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(data)
    where = (connection, place, [tmp_path], SilentReporter())
    report = upload(*where, PackOptions(shard_samples=5))
    assert report.uploaded == 3
    assert report.classes == ("astronaut", "chelsea", "coffee", "rocket")
    with job_of() as job:
        found = torch.cat([each for _, each in job.loader()])
    assert torch.bincount(found).tolist() == [3, 3, 3, 3]
    upload(*where, PackOptions(shard_samples=12))
    assert len(load_index(connection, place)) == 12


def test_a_damaged_shard_is_refused_before_it_is_sent(
    connection, place, store
):
    with pytest.raises(UnsupportedError, match=r"cut\.tar"):
        store(cut=shard(2)[:-12_000])
    assert list_shards(connection, place) == []


def test_a_replaced_shard_is_refused_by_name(
    connection, place, tmp_path, store, job_of
):
    store(a=shard(2))
    path = tmp_path / "a.tar"
    path.write_bytes(shard(2, seed=5))
    with job_of() as job, path.open("rb") as file:
        connection.put(
            place.container,
            place.object_name("a.tar"),
            file,
            path.stat().st_size,
        )
        with pytest.raises(SourceChangedError, match=r"a\.tar"):
            list(job.loader())


def test_an_undecodable_image_is_named_or_skipped(store, job_of):
    data = with_corrupt_member(shard(4), "s0-0002")
    store(a=data)
    with job_of() as job, pytest.raises(ClientError, match=r"s0-0002.*a\.tar"):
        list(job.loader())
    with job_of(on_error="skip") as job:
        assert sum(len(labels) for _, labels in job.loader()) == 3
        assert job.stats.skipped == 1


def test_epoch_whose_samples_are_all_skipped_is_an_error(store, job_of):
    data = shard(3)
    for number in range(3):
        data = with_corrupt_member(data, f"s0-{number:04d}")
    store(a=data)
    with job_of(on_error="skip", batch_size=2) as job:
        for epoch in (0, None):
            with pytest.raises(ClientError, match="none of the 3 samples"):
                list(job.loader(epoch))
        assert (job.epoch, job.step) == (1, 0)
        assert job.stats.skipped == 6


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_undecodable_image_of_a_sampler_tells_its_number(
    store, job_of, on_error
):
    store(a=shard(3), b=with_corrupt_member(shard(4, seed=1), "s1-0002"))
    with job_of(on_error=on_error) as job:
        samples = job.samples()
        with pytest.raises(ClientError) as caught:
            samples.__getitems__([6, 5, 0])
        assert len(samples.__getitems__([6, 0])) == 2
        samples.close()
    assert caught.value.code == "bad_sample"
    message = caught.value.message
    assert re.search(r"s1-0002.*b\.tar.* its number, 5, from", message)
    assert "--skip-bad-samples" not in message


def test_shards_without_labels_need_labels_from_the_user(store, job_of):
    store(a=shard(3, labels=False))
    with pytest.raises(LabelError, match=r"s0-0000.*a\.tar"):
        job_of()
    with job_of(labels=lambda key: int(key[-1])) as job:
        (labels,) = [each for _, each in job.loader()]
    assert labels.tolist() == [0, 1, 2]


def test_no_index_names_the_command_that_writes_it(
    connection, place, store, job_of
):
    store(a=shard(2))
    connection.delete(place.container, place.index_name)
    with pytest.raises(DataIndexError, match=f"hapi index {place}"):
        job_of()
    with pytest.raises(DataIndexError, match=r"no object ending in \.tar"):
        job_of(data="streaming/nothing-here")


def test_leaving_the_loop_and_the_job_leaves_no_thread(store, job_of):
    store(a=shard(8))
    before = set(threading.enumerate())
    with job_of() as job:
        for _batch in job.loader(0):
            break
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("cut", [99, -1, "half"])
def test_a_cut_that_is_none_is_refused_by_its_value(store, job_of, cut):
    store(a=shard(2))
    with pytest.raises(ClientError, match=f"cut is {cut!r}"):
        job_of(cut=cut)
