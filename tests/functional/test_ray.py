"""Features as a data set of a real Ray, with worker processes."""

import os
import pickle
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray import cloudpickle

from hapi_client import FeatureDataset, ReadConfig, split_model
from hapi_client.export.extract import extract
from hapi_client.integrations.ray import _FeatureDatasource, read_features
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError, HapiError
from jobs import small_job, upload_shards
from local_ray import local_ray
from networks import small_network, small_transform
from photos import shard, shards_of, with_corrupt_member

SHARDS = (70, 9, 41)
NUM_SAMPLES = sum(SHARDS)
BLOCKS = 5


@pytest.fixture(scope="module", autouse=True)
def workers(cluster):
    with local_ray(cluster):
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        yield


@pytest.fixture(scope="module")
def photos(connection):
    shards = shards_of(SHARDS, size=96)
    place = Location("rayed", "photos")
    return str(upload_shards(connection, place, shards))


@pytest.fixture(scope="module")
def frozen():
    network = small_network()
    return split_model(network, "body", transform=small_transform())[0]


@pytest.fixture(scope="module")
def extracted(connection, photos, tmp_path_factory):
    """Tables that extract writes, by cut."""
    tables = {}
    for cut in ("stream", "freeze"):
        path = tmp_path_factory.mktemp("whole") / "features.parquet"
        with small_job(photos, connection=connection, cut=cut) as job:
            extract(job, path)
        tables[cut] = pq.read_table(path)
    return tables


def features(photos, frozen, **options):
    blocks = options.pop("override_num_blocks", BLOCKS)
    # Closed before the rows are read.
    with FeatureDataset(photos, frozen, **{"cut": 0, **options}) as data:
        return read_features(data, override_num_blocks=blocks)


def table_of(rows):
    return pa.concat_tables(ray.get(rows.to_arrow_refs()))


@pytest.mark.parametrize("cut", ["stream", "freeze"])
def test_rows_are_those_of_extract(photos, frozen, extracted, cut):
    rows = features(photos, frozen, cut=cut).materialize()
    table = table_of(rows)
    assert table.equals(extracted[cut])
    assert table.schema.metadata == extracted[cut].schema.metadata
    assert rows.num_blocks() == BLOCKS


def test_several_workers_write_parquet(photos, frozen, extracted, tmp_path):
    features(photos, frozen).write_parquet(str(tmp_path))
    assert len(os.listdir(tmp_path)) > 1
    table = pq.read_table(tmp_path)
    whole = extracted["stream"]
    names = ["object", "key"]
    order = [(name, "ascending") for name in names]
    assert table.sort_by(order).equals(whole.sort_by(order))


def test_killed_workers_rows_come_once(photos, frozen, extracted, tmp_path):
    def kill_one(table):
        # In the process that has read them, before it hands them over.
        if "s1-0000" in table["key"].to_pylist():
            (tmp_path / str(os.getpid())).touch()
            if len(os.listdir(tmp_path)) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return table

    rows = features(photos, frozen).map_batches(
        kill_one, batch_format="pyarrow", batch_size=None
    )
    table = table_of(rows.materialize())
    # The killed one, and the one that did it again.
    assert len(os.listdir(tmp_path)) == 2
    assert table.equals(extracted["stream"])


def test_shuffled_batches_of_torch(photos, frozen, extracted):
    rows = features(photos, frozen).random_shuffle(seed=3)
    batches = rows.select_columns(["features", "label"]).iter_torch_batches(
        batch_size=50
    )
    found = []
    for batch in batches:
        assert batch["features"].shape[1:] == (64,)
        labels = batch["label"].tolist()
        found += zip(labels, batch["features"][:, 0].tolist(), strict=True)
    whole = extracted["stream"]
    first = whole["features"].combine_chunks().to_numpy_ndarray()[:, 0]
    expected = [*zip(whole["label"].to_pylist(), first.tolist(), strict=True)]
    assert found != expected
    assert sorted(found) == sorted(expected)


@pytest.fixture(scope="module")
def bad(connection):
    data = with_corrupt_member(shard(6, size=96), "s0-0002")
    place = Location("rayed", "bad")
    return str(upload_shards(connection, place, {"a.tar": data}))


def test_error_of_a_task_is_the_clients(bad, frozen):
    with pytest.raises(HapiError, match="repair it, or leave") as caught:
        features(bad, frozen).materialize()
    assert caught.value.code == "bad_sample"
    assert isinstance(caught.value, ray.exceptions.RayTaskError)
    read = ReadConfig(on_error="skip")
    rows = features(bad, frozen, read=read, override_num_blocks=6)
    assert [row["key"] for row in rows.take_all()] == [
        f"s0-{number:04}" for number in (0, 1, 3, 4, 5)
    ]


def test_model_and_password_are_not_in_tasks(
    cluster, connection, photos, frozen
):
    region = len(pickle.dumps(frozen.on_cpu()))
    for given, is_there in ((None, False), (connection, True)):
        options = {"cut": 0, "connection": given}
        with FeatureDataset(photos, frozen, **options) as data:
            source = _FeatureDatasource(data)
        shared = cloudpickle.dumps(ray.get(source._config))
        assert region < len(shared) < 2 * region
        assert (cluster.key.encode() in shared) == is_there
        tasks = [*map(cloudpickle.dumps, source.get_read_tasks(BLOCKS))]
        assert len(tasks) == BLOCKS
        assert all(cluster.key.encode() not in task for task in tasks)
        assert max(map(len, tasks)) < len(shared)


@pytest.mark.parametrize(("parallelism", "expected"), [(1, 1), (99, 17)])
def test_tasks_have_whole_spans(photos, frozen, parallelism, expected):
    with FeatureDataset(photos, frozen, cut=0) as data:
        tasks = _FeatureDatasource(data).get_read_tasks(parallelism)
    assert len(tasks) == expected
    numbers = [task.metadata.num_rows for task in tasks]
    assert sum(numbers) == NUM_SAMPLES


def test_plan_that_is_not_there_is_warned_of(photos, frozen, caplog):
    features(photos, frozen, cut="auto")
    assert "choose cut='freeze'" in caplog.text
    caplog.clear()
    features(photos, frozen)
    assert not caplog.text


def test_wrong_data_is_named(photos):
    with pytest.raises(ClientError, match="give FeatureDataset"):
        read_features(photos)


def test_missing_ray_is_named():
    code = (
        "import sys; sys.modules['ray'] = None; "
        "import hapi_client.integrations.ray"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert "pip install 'swift-hapi[client,ray]'" in done.stderr
