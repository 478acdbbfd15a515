"""``hapi extract`` writes the features that the model computes."""

import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hapi_client.atomic_file import file_lock
from hapi_client.data.indexing import update_index
from hapi_client.data.upload import upload
from hapi_client.export.extract import extract
from hapi_client.model.split_arguments import IMAGENET_TRANSFORM
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError
from hapi_splitter.inputs.image_decode import decode_image
from jobs import small_job
from networks import small_network, small_transform
from photos import jpegs, shard, tar_of, with_corrupt_member

ROOT = Path(__file__).resolve().parents[2]
NUM_SAMPLES = 20
CLASSES = ("cat", "dog", "eel", "fox")


def uploaded(connection, name, path):
    place = Location("extracted", name)
    upload(connection, place, [path], SilentReporter())
    return place


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of class folders."""
    folder = tmp_path_factory.mktemp("images")
    for number, (data, label) in enumerate(jpegs(NUM_SAMPLES, size=96)):
        place = folder / CLASSES[label] / f"{number:02d}.jpg"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def photos(connection, images):
    return uploaded(connection, "photos", images)


@pytest.fixture(scope="module")
def bad(connection, tmp_path_factory):
    """A data set without labels and with an undecodable sample."""
    data = with_corrupt_member(shard(6, labels=False), "s0-0002")
    path = tmp_path_factory.mktemp("bad") / "a.tar"
    path.write_bytes(data)
    return uploaded(connection, "bad", path)


def job_of(connection, place, **options):
    return small_job(
        place, connection=connection, **{"batch_size": 7, **options}
    )


def features_of(table):
    return table["features"].combine_chunks().to_numpy_ndarray()


def assert_features_of_the_model(table, images, transform):
    """Those in front of the model's head."""
    network = small_network().eval()
    network.head = torch.nn.Identity()
    keys = table["key"].to_pylist()
    assert len(keys) == NUM_SAMPLES
    for key, found in zip(keys, features_of(table), strict=True):
        data = (images / f"{key}.jpg").read_bytes()
        image = transform.sample(decode_image(data), "", None)
        with torch.inference_mode():
            expected = network(image[None])[0].numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", ["stream", "freeze", "auto"])
def test_features_are_those_of_the_model_in_the_order_of_the_index(
    connection, photos, images, tmp_path, cut
):
    path = tmp_path / "features.parquet"
    progress = []
    with job_of(connection, photos, cut=cut) as job:
        done = extract(
            job,
            path,
            about={"model": "small"},
            on_samples=lambda *numbers: progress.append(numbers),
        )
        index = [
            row.key
            for span in job.pipeline.data.split("train").spans
            for row in span.rows
        ]
        assert job.stats.fallbacks == 0
    table = pq.read_table(path)
    assert table["key"].to_pylist() == index
    names = [key.split("/")[0] for key in index]
    assert table["class_name"].to_pylist() == names
    assert table["label"].to_pylist() == [CLASSES.index(n) for n in names]
    assert_features_of_the_model(table, images, small_transform())
    assert (done.samples, done.skipped) == (NUM_SAMPLES, 0)
    assert done.length_bytes == path.stat().st_size
    assert progress[-1] == (NUM_SAMPLES, NUM_SAMPLES)
    about = json.loads(table.schema.metadata[b"hapi"])
    assert about == done.about
    assert (about["model"], about["freeze"]) == ("small", "body")
    assert about["transform"]["crop_size"] == 64
    assert {"hapi", "weights", "data_digest", "cut"} < set(about)


def test_samples_of_equal_keys_are_told_apart(connection, tmp_path):
    """In two shards, in two data sets, and loose in two folders."""
    images = [data for data, _ in jpegs(6, size=64)]
    shards, more, loose = (
        Location("extracted", name) for name in ("one", "two", "loose")
    )
    for place, names in ((shards, ("a", "b")), (more, ("a",))):
        folder = tmp_path / place.prefix
        folder.mkdir()
        for name in names:
            data = with_corrupt_member(
                tar_of([(f"{n}.jpg", images[n]) for n in range(2)]), "0"
            )
            (folder / f"{name}.tar").write_bytes(data)
        upload(connection, place, [folder], SilentReporter())
    for name in ("x/1.jpg", "y/1.jpg", "y/1.png"):
        connection.put(
            "extracted", f"loose/{name}", io.BytesIO(images[0]), len(images[0])
        )
    update_index(connection, loose)
    with job_of(
        connection,
        [str(each) for each in (shards, more, loose)],
        labels="optional",
        on_error="skip",
    ) as job:
        extract(job, tmp_path / "f.parquet")
        extract(job, tmp_path / "f.npz")
    table = pq.read_table(tmp_path / "f.parquet")
    wanted = [
        ("1", "swift://extracted/one/a.tar", "swift://extracted/one"),
        ("1", "swift://extracted/one/b.tar", "swift://extracted/one"),
        ("1", "swift://extracted/two/a.tar", "swift://extracted/two"),
        *(
            (f"loose/{n}", f"swift://extracted/loose/{n}", str(loose))
            for n in ("x/1.jpg", "y/1.jpg", "y/1.png")
        ),
    ]
    columns = ("key", "object", "data_set")
    rows = zip(*(table[each].to_pylist() for each in columns), strict=True)
    rows = [*rows]
    # Loose objects are in an order of their own.
    assert rows[:3] == wanted[:3]
    assert sorted(rows) == sorted(wanted)
    with np.load(tmp_path / "f.npz") as found:
        assert rows == [
            *zip(
                *(found[f"{each}s"].tolist() for each in columns), strict=True
            )
        ]


def test_undecodable_sample_is_named_or_left_out(connection, bad, tmp_path):
    path = tmp_path / "features.npz"
    labels = {"labels": "optional"}
    with job_of(connection, bad, **labels, cut="stream") as job:
        with pytest.raises(ClientError, match="s0-0002") as caught:
            extract(job, path)
        assert caught.value.code == "bad_sample"
    assert os.listdir(tmp_path) == []
    skip = {**labels, "on_error": "skip"}
    for cut in ("stream", "freeze"):
        with job_of(connection, bad, cut=cut, **skip) as job:
            done = extract(job, path, overwrite=True)
        assert (done.samples, done.skipped) == (5, 1)
        with np.load(path) as found:
            assert found["labels"].tolist() == [-1] * 5
            assert "s0-0002" not in found["keys"].tolist()


def test_interrupted_run_leaves_no_file(connection, photos, tmp_path):
    path = tmp_path / "features.parquet"
    seen = []

    def interrupted(done, total):
        seen.extend(sorted(os.listdir(tmp_path)))
        raise KeyboardInterrupt

    with job_of(connection, photos, cut="stream") as job:
        with pytest.raises(KeyboardInterrupt):
            extract(job, path, on_samples=interrupted)
        # The lock of its run among them.
        assert seen == [f"{path.name}.lock", f"{path.name}.part"]
        assert os.listdir(tmp_path) == []
        another = pytest.raises(ClientError, match="another run uses")
        with file_lock(path), another:
            extract(job, path)
        assert extract(job, path).samples == NUM_SAMPLES
    assert os.listdir(tmp_path) == [path.name]


def test_command_writes_features_and_their_description(
    hapi, photos, images, capsys
):
    words = ("extract", "--data", photos, "--model", "networks:small_network")
    assert hapi(*words, "features.arrow", "--json", "done.json") == 0
    facts = json.loads(Path("done.json").read_text())
    assert facts["samples"] == NUM_SAMPLES
    about = facts["about"]
    assert about["model"] == "networks:small_network"
    assert about["data"] == str(photos)
    table = pa.ipc.open_file("features.arrow").read_all()
    assert json.loads(table.schema.metadata[b"hapi"]) == about
    assert facts["shape"] == about["shape"] == [64]
    assert_features_of_the_model(table, images, IMAGENET_TRANSFORM)
    out = capsys.readouterr().out
    assert re.search(rf"features.arrow +│ +{NUM_SAMPLES} ", out)

    assert hapi(*words, "features.arrow") == 1
    assert "already exists" in capsys.readouterr().err
    assert hapi(*words, "features.arrow", "--force") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("features.csv",), ".parquet, .arrow, .npz"),
        (("nowhere/f.npz",), "nowhere is not a folder"),
        (("/proc/f.npz",), "/proc/f.npz cannot be written"),
        (("f.npz", "--cut", "banana"), "cut is 'banana'"),
        (("f.npz", "--device", "abacus"), "device is 'abacus'"),
        (("f.npz", "--min-precision", "low"), "min_precision is 'low'"),
    ],
)
def test_wrong_options_are_refused_before_any_work(
    hapi, photos, monkeypatch, capsys, words, message
):
    # Any call of it is an error.
    monkeypatch.setattr("hapi_client.model.registry.build_model", None)
    assert hapi("extract", "--data", str(photos), *words) == 1
    assert message in capsys.readouterr().err
