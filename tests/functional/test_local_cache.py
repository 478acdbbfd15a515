"""Features cached on this host, in memory and in a directory."""

import io
import json

import pytest
import torch
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from hapi_client import Augmentation, CacheConfig
from hapi_client.caching.pool import POOL
from hapi_client.cli.main import app
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import ClientError, HapiError
from jobs import small_job, upload_shards
from networks import small_parts
from photos import shard, shards_of, with_corrupt_member

DATA = "swift://memory/photos"
DAMAGED = "swift://memory/damaged"
COUNTS = (24, 40, 16)
NUM_SAMPLES = sum(COUNTS)
SAMPLE_BYTES = 4 * 64


@pytest.fixture(scope="module")
def photos(connection):
    shards = shards_of(COUNTS, size=40)
    upload_shards(connection, parse_location(DATA), shards)
    shards["1.tar"] = with_corrupt_member(shards["1.tar"], "s1-0003")
    upload_shards(connection, parse_location(DAMAGED), shards)


@pytest.fixture(autouse=True)
def new_process():
    """The next test finds nothing in memory."""
    yield
    POOL.clear()


def job_of(
    connection,
    data=DATA,
    **options,
):
    return small_job(
        data,
        connection=connection,
        batch_size=16,
        seed=3,
        **{"cut": "freeze", "memory_bytes": None, **options},
    )


def epoch_of(job, epoch, **options):
    """Keys, features and labels of an epoch."""
    loader = job.pipeline.loader(epoch, **options)
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
    with job_of(connection, memory_bytes=0) as job:
        expected = [epoch_of(job, epoch) for epoch in (0, 1, 2, None)]
        assert job.stats.local_hits == 0
    with job_of(connection, cut=cut) as job:
        assert_same_epoch(epoch_of(job, 0), expected[0])
        received = job.stats.bytes
        for epoch, wanted in zip((1, 2, None), expected[1:], strict=True):
            assert_same_epoch(epoch_of(job, epoch), wanted)
        assert job.stats.bytes == received
        assert job.stats.local_hits == 3 * NUM_SAMPLES
        assert job.stats.samples == 4 * NUM_SAMPLES
        reports = job.reports
    assert [each.local_hits for each in reports] == [0, *3 * [NUM_SAMPLES]]
    assert [each.requests for each in reports[1:]] == [0, 0, 0]
    assert all(each.is_finished for each in reports)


def test_batches_may_be_changed_and_saved_by_autograd(connection, photos):
    with job_of(connection) as job:
        with torch.inference_mode():
            expected = epoch_of(job, 0)
        weight = torch.ones((), requires_grad=True)
        for _ in range(2):
            for features, labels in job.pipeline.loader(0):
                (features * weight).sum().backward()
                features.zero_()
                labels.zero_()
        assert_same_epoch(epoch_of(job, 0), expected)


def test_what_does_not_fit_is_read_again(connection, photos):
    with job_of(connection, memory_bytes=0) as job:
        expected = [epoch_of(job, epoch) for epoch in (0, 1)]
    with job_of(connection, memory_bytes=50 * SAMPLE_BYTES) as job:
        assert_same_epoch(epoch_of(job, 0), expected[0])
        assert_same_epoch(epoch_of(job, 1), expected[1])
        assert 0 < job.stats.local_hits <= 50
        assert job.stats.samples == 2 * NUM_SAMPLES


def test_budget_below_one_sample_is_a_warning(connection, photos, caplog):
    with job_of(connection, memory_bytes=SAMPLE_BYTES - 1) as job:
        for epoch in (0, 1):
            epoch_of(job, epoch)
        assert job.stats.local_hits == 0
    assert "features are not cached in memory" in caplog.text


def test_contradicting_options_are_refused():
    with pytest.raises(ClientError, match="give both, or neither"):
        CacheConfig(directory_bytes=10)


def test_bad_samples_are_skipped_or_raised_in_each_epoch(connection, photos):
    with job_of(connection, DAMAGED, on_error="skip") as job:
        for epoch in (0, 1):
            keys, _, _ = epoch_of(job, epoch)
            assert len(keys) == NUM_SAMPLES - 1
        assert job.stats.local_hits == NUM_SAMPLES - 1
        assert job.stats.skipped == 2
    POOL.clear()
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
        loader = iter(job.pipeline.loader(1))
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
        assert job.stats.local_hits == job.stats.local_reads == 0
        for _ in range(2):
            epoch_of(job, None)
        assert job.stats.local_hits == NUM_SAMPLES
    with job_of(connection, augment_period_epochs=2, **options) as job:
        first = [epoch_of(job, epoch) for epoch in (0, 1)]
        assert job.stats.local_hits == 0
        third = epoch_of(job, 2)
        assert job.stats.local_hits == NUM_SAMPLES
        order = [
            sorted(range(NUM_SAMPLES), key=e[0].__getitem__)
            for e in (third, first[0])
        ]
        torch.testing.assert_close(third[1][order[0]], first[0][1][order[1]])


@pytest.fixture(scope="module")
def expected(connection, photos):
    """Epochs 0, 1 and 2, and the order of the index, without a cache."""
    with job_of(connection, memory_bytes=0) as job:
        return [epoch_of(job, epoch) for epoch in (0, 1, 2, None)]


def test_next_job_of_a_process_finds_features_in_memory(connection, expected):
    with job_of(connection) as job:
        assert_same_epoch(epoch_of(job, 0), expected[0])
    with job_of(connection, cut="stream") as job:
        for epoch in (0, 1):
            assert_same_epoch(epoch_of(job, epoch), expected[epoch])
        assert job.stats.local_hits == 2 * NUM_SAMPLES
    with job_of(connection, models_container="new-models") as job:
        assert_same_epoch(epoch_of(job, 0), expected[0])
        # No package is stored before something has to be computed.
        assert "new-models" not in [e.name for e in connection.containers()]
        assert job.reports[0].plan.startswith("cut ")
        # Workers do not share this process's memory, and have no package.
        batches = DataLoader(job.dataset(), batch_size=None, num_workers=2)
        assert sum(len(labels) for _, labels in batches) == NUM_SAMPLES
        POOL.clear()
    with pytest.raises(ClientError, match="was closed; make a new one"):
        next(iter(job.train_loader))
    with job_of(connection, cut="freeze", encoding="float16") as job:
        # Features that were rounded are others.
        epoch_of(job, 0)
        assert job.stats.local_hits == 0


@pytest.mark.parametrize("memory", [0, None])
def test_next_run_finds_features_in_the_directory(
    connection, expected, tmp_path, memory
):
    options = {"directory": tmp_path, "memory_bytes": memory}
    with job_of(connection, **options) as job:
        assert_same_epoch(epoch_of(job, 0), expected[0])
        assert job.stats.local_hits == 0
        assert_same_epoch(epoch_of(job, 1), expected[1])
        assert job.stats.local_hits == NUM_SAMPLES
    POOL.clear()
    with job_of(connection, cut="stream", **options) as job:
        for epoch in (2, None):
            wanted = expected[-1 if epoch is None else epoch]
            assert_same_epoch(epoch_of(job, epoch), wanted)
        assert job.stats.local_hits == 2 * NUM_SAMPLES
        assert [each.requests for each in job.reports] == [0, 0]


def test_bad_samples_are_not_read_again_in_the_next_run(
    connection, photos, tmp_path
):
    runs = []
    for _ in range(2):
        POOL.clear()
        with job_of(
            connection, DAMAGED, directory=tmp_path, on_error="skip"
        ) as job:
            keys, features, labels = epoch_of(job, 0)
            assert "s1-0003" not in keys
            assert job.stats.skipped == 1
            runs.append((keys, features, labels, job.reports[0].requests))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][3] > 0
    assert runs[1][3] == 0


@pytest.mark.parametrize("is_augmented", [False, True])
def test_a_changed_shard_is_not_served(
    connection, photos, tmp_path, is_augmented
):
    place = f"swift://memory/changing-{is_augmented}"
    shards = {"a.tar": shard(8, size=40, seed=1)}
    upload_shards(connection, parse_location(place), shards)
    options = {"directory": tmp_path}
    if is_augmented:
        # The samples are cached, as they are stored.
        options |= {"augment": Augmentation(), "cut": "stream"}
    with job_of(connection, place, **options) as job:
        first = epoch_of(job, 0)
    new = shard(8, size=40, seed=2)
    name = f"changing-{is_augmented}/a.tar"
    connection.put("memory", name, io.BytesIO(new), len(new))
    with job_of(connection, place, **options) as job:
        with pytest.raises(HapiError, match=r"changed.*hapi index"):
            epoch_of(job, 0)
        assert job.stats.local_hits == job.stats.local_reads == 0
    upload_shards(connection, parse_location(place), {"a.tar": new})
    with job_of(connection, place, **options) as job:
        second = epoch_of(job, 0)
        assert job.stats.local_hits == job.stats.local_reads == 0
    assert not torch.allclose(first[1], second[1])


def test_damaged_features_are_read_again(connection, expected, tmp_path):
    with job_of(connection, directory=tmp_path) as job:
        epoch_of(job, 0)
    (path,) = tmp_path.rglob("*.rows")
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 4
    path.write_bytes(data)
    for is_whole in (False, True):
        POOL.clear()
        with job_of(connection, directory=tmp_path) as job:
            for epoch in (1, 2):
                assert_same_epoch(epoch_of(job, epoch), expected[epoch])
            hits = job.stats.local_hits
            assert (hits == 2 * NUM_SAMPLES) == is_whole
            assert hits > NUM_SAMPLES


def test_directory_that_cannot_be_used_is_a_warning(
    connection, expected, tmp_path, caplog
):
    path = tmp_path / "file"
    path.write_text("no directory")
    options = {"directory": path, "memory_bytes": 0}
    with job_of(connection, **options) as job:
        for epoch in (0, 1):
            assert_same_epoch(epoch_of(job, epoch), expected[epoch])
        assert job.stats.local_hits == 0
    assert f"no features are cached in {path}: Not a directory" in caplog.text


def test_loader_workers_share_the_directory(connection, expected, tmp_path):
    with job_of(connection, directory=tmp_path) as job:
        data = job.dataset()
        loader = DataLoader(data, batch_size=None, num_workers=2)
        for epoch in (0, 1):
            data.set_epoch(epoch)
            batches = list(loader)
            assert sum(len(labels) for _, labels in batches) == NUM_SAMPLES
    POOL.clear()
    with job_of(connection, directory=tmp_path) as job:
        assert_same_epoch(epoch_of(job, 2), expected[2])
        assert job.stats.local_hits == NUM_SAMPLES


@pytest.mark.parametrize("place", ["memory", "directory"])
def test_images_are_cached_if_random_changes_never_repeat(
    connection, photos, tmp_path, place
):
    options = {"augment": Augmentation(), "cut": "stream"}
    with job_of(connection, memory_bytes=0, **options) as job:
        wanted = [epoch_of(job, epoch) for epoch in range(3)]
    if place == "directory":
        options |= {"directory": tmp_path, "memory_bytes": 0}
    with job_of(connection, **options) as job:
        for epoch in (0, 1):
            assert_same_epoch(epoch_of(job, epoch), wanted[epoch])
        assert job.stats.local_reads == NUM_SAMPLES
        assert [each.requests for each in job.reports][1] == 0
    if place == "directory":
        POOL.clear()
    with job_of(connection, **options) as job:
        assert_same_epoch(epoch_of(job, 2), wanted[2])
        assert job.stats.local_reads == NUM_SAMPLES
        assert job.stats.local_hits == 0


def test_images_are_cached_where_they_are_smaller(connection, expected):
    options = {"cut": "stream", "freeze": "body.0"}
    with job_of(connection, **options, memory_bytes=0) as job:
        wanted = [epoch_of(job, epoch) for epoch in (0, 1)]
        spans = job.pipeline.data.split("train").spans
        stored = sum(span.byte_range.length_bytes for span in spans)
        each = torch.Size(job.feature_shape).numel() * 4
    assert stored < each * NUM_SAMPLES, "the features are larger"
    with job_of(connection, **options, memory_bytes=stored) as job:
        for epoch in (0, 1):
            assert_same_epoch(epoch_of(job, epoch), wanted[epoch])
        assert job.stats.local_reads == NUM_SAMPLES
        assert job.stats.local_hits == 0


def test_commands_show_and_empty_a_directory(connection, expected, tmp_path):
    runner = CliRunner()

    def run(*words, status=0):
        out = tmp_path / "out.json"
        words = ["cache", *words, "--in", str(tmp_path / "cache")]
        result = runner.invoke(app, [*words, "--json", str(out)])
        assert result.exit_code == status, result.output
        if not status:
            return json.loads(out.read_text())
        return " ".join(result.output.replace("│", " ").split())

    assert "or a directory that exists" in run("ls", status=2)
    with job_of(connection, directory=tmp_path / "cache") as job:
        epoch_of(job, 0)
        (entry,) = run("ls")["entries"]
        assert entry["container"] == "memory"
        assert entry["model"] == job.frozen.digest
        assert entry["length_bytes"] > NUM_SAMPLES * SAMPLE_BYTES
        assert run("stats")["containers"][0]["entries"] == 1
        assert run("purge", "--yes") == {"deleted": 0, "in_use": 1}
        assert_same_epoch(epoch_of(job, 1), expected[1])
    assert "give no object" in run("ls", "memory/photos", status=2)
    POOL.clear()
    assert run("purge", "--yes") == {"deleted": 1, "in_use": 0}
    assert run("ls") == {"entries": []}


def test_commands_show_and_empty_the_cache_of_splits(tmp_path, monkeypatch):
    runner, folder = CliRunner(), tmp_path / "cache"

    def run(*words, status=0):
        out = tmp_path / "out.json"
        words = ["cache", *words, "--in", "splits", "--json", str(out)]
        result = runner.invoke(app, words)
        assert result.exit_code == status, result.output
        if not status:
            return json.loads(out.read_text())
        return " ".join(result.output.replace("│", " ").split())

    assert "HAPI_CACHE_DIR is empty" in run("ls", status=2)
    monkeypatch.setenv("HAPI_CACHE_DIR", str(folder))
    assert run("ls") == {"entries": []}
    small_parts()
    (entry,) = run("ls")["entries"]
    (file,) = (folder / "splits-3").glob("*.split")
    assert file.name == f"{entry['key']}.split"
    assert entry["length_bytes"] == file.stat().st_size
    found = run("stats")
    assert found["entries"] == 1
    assert found["length_bytes"] == entry["length_bytes"]
    assert "give no object" in run("ls", "photos", status=2)
    assert run("purge", "--yes") == {"deleted": 1, "in_use": 0}
    assert run("ls") == {"entries": []}
    (folder / "splits-3").chmod(0o777)
    assert "other users may write" in run("stats", status=2)
