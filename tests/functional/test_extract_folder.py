"""Features in a folder: resumed, shared, and complete, each row once."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import extracting
from as_user import run
from full_disk import no_file_beyond
from hapi_client.atomic_file import file_lock
from hapi_client.export import feature_folder
from hapi_client.export.extract import extract
from hapi_client.export.feature_folder import MANIFEST, parts_of
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError, TooSlowError
from jobs import small_job, upload_shards
from photos import shard, shards_of, with_corrupt_member

SHARDS = (70, 9, 41)
NUM_SAMPLES = sum(SHARDS)
PART = 40


@pytest.fixture(scope="module")
def photos(connection):
    shards = shards_of(SHARDS, size=96)
    return upload_shards(connection, Location("folders", "photos"), shards)


@pytest.fixture(scope="module")
def job(connection, photos):
    with job_of(connection, photos) as made:
        yield made


def job_of(connection, place, **options):
    options = {"batch_size": 16, "cut": "stream", **options}
    return small_job(place, connection=connection, **options)


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """Table of one file, of a run without interruption."""
    path = tmp_path_factory.mktemp("whole") / "features.parquet"
    extract(job, path)
    return pq.read_table(path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "features"


def fill(job, folder, **options):
    return extract(job, f"{folder}/", **{"part_samples": PART, **options})


def assert_complete(folder, whole):
    """Bit by bit, in order, and nothing else is there."""
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["complete"]
    assert sorted(os.listdir(folder)) == [MANIFEST, *manifest["files"]]
    samples = [facts["samples"] for facts in manifest["files"].values()]
    assert max(samples) <= PART
    assert sum(samples) == NUM_SAMPLES
    assert pq.read_table(folder).equals(whole)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [0]),
        ([1], [1]),
        ([50, 1, 9, 1, 20], [50, 10, 1, 20]),
        ([4, 4, 4], [8, 4]),
    ],
)
def test_files_have_whole_spans_up_to_a_bound(sizes, expected):
    parts = parts_of(sizes, 10)
    assert [part.num_samples for part in parts] == expected
    spans = [n for part in parts for n in range(part.first, part.stop)]
    assert spans == [*range(len(sizes))]
    assert parts[-1].name.endswith(f"-of-{len(expected):05d}.parquet")


def test_folder_has_the_rows_of_one_file(job, folder, whole):
    done = fill(job, folder)
    assert (done.samples, done.skipped) == (NUM_SAMPLES, 0)
    assert done.computed == NUM_SAMPLES
    assert_complete(folder, whole)
    files = [*folder.glob("part-*")]
    assert done.length_bytes == sum(path.stat().st_size for path in files)
    table = pq.read_table(files[0])
    assert json.loads(table.schema.metadata[b"hapi"]) == done.about


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "link"])
def test_repeated_run_computes_what_is_damaged_only(
    job, folder, whole, damage, tmp_path
):
    fill(job, folder)
    before = job.stats
    assert fill(job, folder).computed == 0
    assert job.stats == before
    path = sorted(folder.glob("part-*"))[1]
    other = tmp_path / "other"
    other.write_text("not of this folder")
    if damage in ("gone", "link"):
        path.unlink()
        if damage == "link":
            path.symlink_to(other)
    else:
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data[:-1] if damage == "cut" else data)
    assert 0 < fill(job, folder).computed <= PART
    assert_complete(folder, whole)
    assert other.read_text() == "not of this folder"


def test_interrupted_run_goes_on(job, folder, whole):
    for stop_at in (0, PART, 0):

        def interrupt(done, total, stop_at=stop_at):
            if done > stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fill(job, folder, on_samples=interrupt)
    done = fill(job, folder)
    assert 0 < done.computed < done.samples == NUM_SAMPLES
    assert_complete(folder, whole)


def test_killed_ranks_leave_what_one_process_goes_on_with(
    cluster, photos, folder, whole
):
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node=2"]

    def child(launcher, kill_at):
        words = [extracting.__file__, photos, f"{folder}/", PART, kill_at]
        words = ["python", *launcher, *map(str, words)]
        return run(cluster, folder.parent, words)

    # One rank gets there, and both together do not get to the end.
    assert child(launcher, kill_at=PART + 10).returncode != 0
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["files"]
    assert not manifest["complete"]
    done = child([], kill_at=0)
    assert done.returncode == 0, done.stderr
    there = sum(facts["samples"] for facts in manifest["files"].values())
    assert f"computed {NUM_SAMPLES - there}\n" in done.stdout
    assert_complete(folder, whole)


def test_ranks_share_a_folder(cluster, photos, folder, whole):
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node=2", "-m", "hapi_client.cli.main"]
    words = ["extract", "--data", str(photos), f"{folder}/", "--json", "-"]
    words += ["--model", "networks:small_network", "--part-samples", str(PART)]
    done = run(cluster, folder.parent, ["python", *launcher, *words])
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["samples"] == NUM_SAMPLES
    keys = pq.read_table(folder)["key"].to_pylist()
    assert keys == whole["key"].to_pylist()


def test_runs_at_the_same_time_share_a_folder(
    connection, photos, folder, whole
):
    with ExitStack() as stack:
        # One after another: torch.export is not for threads.
        jobs = [
            stack.enter_context(job_of(connection, photos)) for _ in range(4)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(len(jobs)))
        runs = [*pool.map(lambda job: fill(job, folder, part_samples=1), jobs)]
    assert [run.samples for run in runs] == [NUM_SAMPLES] * len(jobs)
    assert sum(run.computed for run in runs) == NUM_SAMPLES
    assert pq.read_table(folder).equals(whole)


@pytest.mark.parametrize("rank", [0, 9])
def test_more_ranks_than_files(job, folder, whole, rank, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "10")
    assert fill(job, folder).computed == NUM_SAMPLES
    assert fill(job, folder).computed == 0
    assert_complete(folder, whole)


def test_other_run_that_does_not_end_is_named(
    job, folder, monkeypatch, caplog
):
    monkeypatch.setattr(feature_folder, "PART_SECONDS", 1)
    monkeypatch.setattr(feature_folder, "NOTE_SECONDS", 0)
    fill(job, folder)
    path = sorted(folder.glob("part-*"))[0]
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"][path.name]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    message = f"other runs have written {path.name}"
    with (
        file_lock(path),
        pytest.raises(TooSlowError, match=message),
    ):
        fill(job, folder)
    assert [x for x in caplog.messages if "waiting for another run" in x]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"network": "other"}, {}, r'weights was "\w+" and is now "\w+"'),
        ({"cut": "freeze"}, {}, r"cut was 0 and is now \d+"),
        ({"labels": {}}, {}, "labels was"),
        ({}, {"about": {"model": "x"}}, r'model was null and is now "x"'),
        ({}, {"part_samples": 7}, "part_samples was 40 and is now 7"),
    ],
)
def test_folder_of_another_run_is_refused(
    job, connection, photos, folder, changes, options, message
):
    from networks import small_network

    fill(job, folder)
    before = sorted(os.listdir(folder))
    if "network" in changes:
        changes = {"network": small_network(seed=1)}
    if "labels" in changes:
        changes = {"labels": lambda key: 7}
    with (
        job_of(connection, photos, **changes) as other,
        pytest.raises(ClientError, match=message) as caught,
    ):
        fill(other, folder, **options)
    assert "delete this one" in str(caught.value)
    assert sorted(os.listdir(folder)) == before


def test_folder_of_changed_data_is_refused(connection, folder):
    place = Location("folders", "changed")
    for seed in (0, 1):
        shards = {"a.tar": shard(9, size=96, seed=seed)}
        upload_shards(connection, place, shards)
        with job_of(connection, place) as job:
            if seed == 0:
                assert fill(job, folder).samples == 9
                continue
            with pytest.raises(ClientError, match="data_digest was"):
                fill(job, folder)


def test_unreadable_manifest_is_named(job, folder):
    fill(job, folder)
    path = folder / MANIFEST
    text = path.read_text()
    manifest = json.loads(text)
    name = next(iter(manifest["files"]))
    changed = {**manifest, "files": {**manifest["files"], name: 7}}
    for wrong in (text[:100], json.dumps(changed)):
        path.write_text(wrong)
        with pytest.raises(ClientError, match="json cannot be read"):
            fill(job, folder)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_unreadable_file_is_named(job, folder, whole, make):
    fill(job, folder)
    path = sorted(folder.glob("part-*"))[1]
    path.unlink()
    make(path)
    with pytest.raises(ClientError, match=f"{path} cannot be read: .*delete"):
        fill(job, folder)
    path.rename(folder.with_name("aside"))
    assert 0 < fill(job, folder).computed <= PART
    assert_complete(folder, whole)


def test_other_entries_of_a_manifest_do_not_count(job, folder, whole):
    fill(job, folder)
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    files = manifest["files"]
    files["../other"] = files.pop(next(iter(files)))
    path.write_text(json.dumps(manifest))
    assert fill(job, folder).samples == NUM_SAMPLES
    assert_complete(folder, whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["foreign/"], "has other files, such as notes.txt"),
        (["foreign/notes.txt/"], "is not a folder but a file"),
        (["new/", "--force"], "is not overwritten"),
        (["new/", "--part-samples", "0"], "part_samples is 0"),
        (["new.npz", "--part-samples", "9"], "end the name of a folder in /"),
        (["nowhere/new/"], "nowhere is not a folder"),
        (["new"], "or a folder's in /"),
    ],
)
def test_wrong_folders_are_refused_before_any_work(
    hapi, photos, monkeypatch, capsys, words, message
):
    Path("foreign").mkdir()
    Path("foreign/notes.txt").touch()
    # Any call of it is an error.
    monkeypatch.setattr("hapi_client.model.registry.build_model", None)
    assert hapi("extract", "--data", str(photos), *words) == 1
    assert message in capsys.readouterr().err
    assert not Path("new").exists()


def test_full_disk_leaves_what_goes_on(job, folder, whole):
    fill(job, folder)
    for path in sorted(folder.glob("part-*"))[1:]:
        path.unlink()
    with no_file_beyond(9000), pytest.raises(ClientError, match="make room"):
        fill(job, folder)
    assert 0 < fill(job, folder).computed < NUM_SAMPLES
    assert_complete(folder, whole)


def test_bad_samples_of_a_file_are_counted(connection, tmp_path):
    """All of one file, and none of the others."""
    data = with_corrupt_member(shard(1, size=96), "s0-0000")
    good = shard(3, size=96, seed=1)
    place = Location("folders", "bad")
    upload_shards(connection, place, {"a.tar": good, "b.tar": data})
    named = pytest.raises(ClientError, match="s0-0000")
    with job_of(connection, place) as job, named:
        extract(job, f"{tmp_path}/f/", part_samples=1)
    with job_of(connection, place, on_error="skip") as job:
        done = extract(job, f"{tmp_path}/f/", part_samples=1)
    assert (done.samples, done.skipped) == (3, 1)
    assert done.computed <= 3
    assert len(pq.read_table(tmp_path / "f")) == 3
