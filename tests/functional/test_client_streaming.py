"""Cut 0 over a real Swift: uploads, order, changes, closing."""

import logging
import re
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from hapi_client import ReadConfig
from hapi_client.data.index import load_index
from hapi_client.data.listing import list_data
from hapi_client.data.upload import PackOptions, upload
from hapi_client.job import opened_data
from hapi_client.loading.early_reads import EarlyReads
from hapi_client.model import frozen_region
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import (
    ClientError,
    FreezeError,
    UnsupportedError,
)
from hapi_splitter.freezing.split_model import split
from hapi_splitter.inputs.image_decode import decode_image
from jobs import small_job
from networks import small_network, small_transform
from photos import PHOTOS, jpegs, shard, with_corrupt_member
from waiting import until

SMALL_SPANS = ReadConfig(num_threads=2)


@pytest.fixture
def place(request):
    """A location of the test's own."""
    name = request.node.name.partition("[")[0].replace("_", "-")
    return Location("streaming", name[-60:])


@pytest.fixture
def store(connection, place, tmp_path):
    """Uploads shards, given by the stems of their names."""

    def store(**shards):
        for stem, data in shards.items():
            (tmp_path / f"{stem}.tar").write_bytes(data)
        return upload(connection, place, [tmp_path], SilentReporter())

    return store


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
        batches = list(job.pipeline.loader())
    features = torch.cat([f for f, _ in batches])
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    labels = torch.cat([each for _, each in batches])
    assert labels.tolist() == [label for _, label in jpegs(6)]


@pytest.fixture
def early(monkeypatch, new_split):
    """Early reads of the test's jobs, complete when the model is split."""
    started = []

    class Recorded(EarlyReads):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self)

    def slow_split(*arguments, exporting, **options):
        found = split(*arguments, exporting=exporting, **options)
        until(lambda: not started or not started[-1]._todo)
        return found

    monkeypatch.setattr(opened_data, "EarlyReads", Recorded)
    monkeypatch.setattr(frozen_region, "split", slow_split)
    return started


def test_data_are_read_while_the_model_is_split(store, job_of, early):
    store(a=shard(6), b=shard(6, seed=1))
    with job_of(seed=3) as job:
        assert early[0].num_samples == 12
        first = list(job.pipeline.loader(0))
        second = list(job.pipeline.loader(1))
        assert early[0].num_samples == 0
        again = list(job.pipeline.loader(0))
        reports, stats = job.reports, job.stats
    assert [len(each) for each in (first, second, again)] == [3, 3, 3]
    for (features, labels), (others, same) in zip(first, again, strict=True):
        torch.testing.assert_close(features, others, rtol=0, atol=0)
        assert labels.tolist() == same.tolist()
    # No byte is read twice, and each is in the report of its epoch.
    sizes = {each.received_bytes for each in reports}
    assert len(sizes) == 1
    assert reports[0].requests == reports[1].requests
    index = stats.bytes - 3 * sizes.pop()
    assert 0 < index < reports[0].received_bytes


def test_an_epoch_in_another_order_finds_what_was_read(store, job_of, early):
    store(a=shard(6), b=shard(6, seed=1))
    with job_of(seed=3) as job:
        assert sum(len(labels) for _, labels in job.pipeline.loader(7)) == 12
        received = [each.received_bytes for each in job.reports]
        assert sum(len(labels) for _, labels in job.pipeline.loader()) == 12
    assert received == [job.reports[1].received_bytes]


def test_a_cached_split_reads_nothing_early(store, job_of, early, tmp_path):
    store(a=shard(6))
    for _ in range(2):
        with job_of(split_directory=tmp_path / "splits") as job:
            assert len(list(job.pipeline.loader())) == 2
    assert len(early) == 1


def test_a_model_that_cannot_be_split_leaves_no_reads(store, job_of, early):
    store(a=shard(6))
    with pytest.raises(FreezeError, match="no_such_layer"):
        job_of(freeze="no_such_layer")

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Conv2d(3, 4, 3)
            self.head = torch.nn.Linear(4, 2)

        def forward(self, images):
            found = self.body(images)
            if found.sum() > 0:  # cannot be exported
                found = found + 1
            return self.head(found.mean((2, 3)))

    with pytest.raises(FreezeError):
        job_of(network=Odd(), freeze="head")
    until(
        lambda: (
            not [
                each.name
                for each in threading.enumerate()
                if each.name.startswith(("hapi-early", "hapi-open"))
            ]
        )
    )
    assert not any(each.num_samples for each in early)


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
        found = torch.cat([each for _, each in job.pipeline.loader()])
    assert torch.bincount(found).tolist() == [3, 3, 3, 3]
    upload(*where, PackOptions(shard_samples=12))
    assert len(load_index(connection, place)) == 12


def test_a_damaged_shard_is_refused_before_it_is_sent(
    connection, place, store
):
    with pytest.raises(UnsupportedError, match=r"cut\.tar"):
        store(cut=shard(2)[:-12_000])
    assert list_data(connection, place).shards == []


def test_undecodable_image_of_a_sampler_tells_its_number(store, job_of):
    store(a=shard(3), b=with_corrupt_member(shard(4, seed=1), "s1-0002"))
    with job_of() as job:
        samples = job.dataset(shuffle=False).samples()
        with pytest.raises(ClientError) as caught:
            samples.__getitems__([6, 5, 0])
        assert len(samples.__getitems__([6, 0])) == 2
        samples.close()
    assert caught.value.code == "bad_sample"
    message = caught.value.message
    assert re.search(r"s1-0002.*b\.tar.* its number, 5, from", message)
    assert "--skip-bad-samples" not in message


def test_samples_by_number_leave_out_what_cannot_be_decoded(store, job_of):
    store(
        a=with_corrupt_member(shard(3), "s0-0001"),
        b=with_corrupt_member(shard(4, seed=1), "s1-0002"),
    )
    with job_of(on_error="skip") as job:
        everything, _ = zip(*job.pipeline.loader(), strict=True)
        reports = len(job.reports)
        samples = job.dataset(shuffle=False).samples()
        again = job.dataset().samples()
        assert len(job.reports) == reports + 1  # the data are read once
        loader = DataLoader(samples, batch_size=2, num_workers=1)
        found = torch.cat([features for features, _ in loader])
        with pytest.raises(IndexError, match="sample 5 of 5"):
            samples[5]
        assert len(again) == 5
        samples.close()
    torch.testing.assert_close(
        found, torch.cat(everything), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_left_out_samples_are_told_once_with_their_count(
    store, job_of, tmp_path, num_workers
):
    tar = with_corrupt_member(shard(4), "s0-0001")
    store(a=tar, b=with_corrupt_member(shard(4, seed=1), "s1-0002"))
    # Loader workers log to it, too.
    log = logging.FileHandler(tmp_path / "log")
    logging.getLogger("hapi_client").addHandler(log)
    try:
        with job_of(on_error="skip", batch_size=4) as job:
            data = job.dataset()
            loader = DataLoader(data, batch_size=None, num_workers=num_workers)
            for epoch in range(3):
                data.set_epoch(epoch)
                assert sum(len(labels) for _, labels in loader) == 6
    finally:
        logging.getLogger("hapi_client").removeHandler(log)
        log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    told = [line for line in lines if "s0-0001" in line or "s1-0002" in line]
    assert len(told) == 1
    assert "left out 2 of 8 samples" in told[0]


def test_leaving_the_loop_and_the_job_leaves_no_thread(store, job_of):
    store(a=shard(8))
    before = set(threading.enumerate())
    with job_of() as job:
        for _batch in job.pipeline.loader(0):
            break
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("cut", [99, -1, "half"])
def test_a_cut_that_is_none_is_refused_by_its_value(store, job_of, cut):
    store(a=shard(2))
    with pytest.raises(ClientError, match=f"cut is {cut!r}"):
        job_of(cut=cut)
