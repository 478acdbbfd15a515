"""Feature files: contents, atomic writes, bounded memory and disk."""

import json
import os
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from full_disk import no_file_beyond
from hapi_client.atomic_file import write_atomically
from hapi_client.export import feature_writers
from hapi_client.export.feature_writers import (
    SUFFIXES,
    Contents,
    SampleSource,
    check_free_space,
    check_suffix,
    open_writer,
)
from hapi_protocol.errors import ClientError

ABOUT = {"freeze": "layer4", "cut": 3}
NAMES = ("cat", "dog")


def rows(first, count, shape=(2, 3)):
    """Sources, labels and features of some samples."""
    size = int(np.prod(shape))
    values = np.arange(first * size, (first + count) * size, dtype=np.float32)
    numbers = range(first, first + count)
    return (
        [
            SampleSource(
                f"s{number}", f"swift://c/d/{number % 2}.tar", "swift://c/d"
            )
            for number in numbers
        ],
        # Every third sample has no label.
        np.array([number % 3 - 1 for number in numbers], np.int64),
        values.reshape(count, *shape),
    )


def write(path, parts, names=NAMES, num_samples=100, shape=(2, 3)):
    contents = Contents(shape, num_samples, names, ABOUT)
    with (
        write_atomically(path) as file,
        open_writer(path, file, contents) as write_batch,
    ):
        for part in parts:
            write_batch(contents.batch(*part))


def table_of(path):
    if path.suffix == ".parquet":
        return pq.read_table(path)
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("group_bytes", [1, 100, 8 << 20])
def test_table_has_all_rows_in_order(
    tmp_path, monkeypatch, suffix, group_bytes
):
    monkeypatch.setattr(feature_writers, "ROW_GROUP_BYTES", group_bytes)
    path = tmp_path / f"features{suffix}"
    write(path, [rows(0, 4), rows(4, 1), rows(5, 2)])
    found = table_of(path)
    sources, _, features = rows(0, 7)
    for name in SampleSource._fields:
        assert found[name].to_pylist() == [
            getattr(source, name) for source in sources
        ]
    assert found["label"].to_pylist() == [None, 0, 1, None, 0, 1, None]
    assert found["class_name"].to_pylist()[:3] == [None, "cat", "dog"]
    tensors = found["features"].combine_chunks()
    np.testing.assert_array_equal(tensors.to_numpy_ndarray(), features)
    assert found.schema.field("features").type.shape == [2, 3]
    assert json.loads(found.schema.metadata[b"hapi"]) == ABOUT

    write(path, [rows(0, 4)], names=())
    assert table_of(path).column_names == [
        *SampleSource._fields,
        "label",
        "features",
    ]


@pytest.mark.parametrize("names", [NAMES, ()])
def test_archive_is_read_without_pickle(tmp_path, names):
    path = tmp_path / "features.npz"
    write(path, [rows(0, 4), rows(4, 3)], names)
    with np.load(path, allow_pickle=False) as found:
        sources, labels, features = rows(0, 7)
        np.testing.assert_array_equal(found["features"], features)
        np.testing.assert_array_equal(found["labels"], labels)
        assert found["features"].dtype == np.float32
        for name in SampleSource._fields:
            assert found[f"{name}s"].tolist() == [
                getattr(source, name) for source in sources
            ]
        assert found["class_names"].tolist() == list(names)
        assert json.loads(str(found["about"])) == ABOUT


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_interrupted_write_leaves_nothing(tmp_path, suffix):
    path = tmp_path / f"features{suffix}"

    def interrupted():
        yield rows(0, 4)
        assert os.listdir(tmp_path) == [f"{path.name}.part"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, interrupted())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_is_bounded_by_a_few_row_groups(tmp_path, suffix):
    path = tmp_path / f"features{suffix}"
    part = rows(0, 64, shape=(16_384,))  # 4 MiB
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    write(path, [part] * 30, num_samples=30 * 64, shape=(16_384,))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 0
    assert peak < 40 << 20
    assert pa.total_allocated_bytes() - before < 40 << 20


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("free_bytes", [0, 10_000, 200_000])
def test_full_disk_is_named_and_nothing_is_left(tmp_path, suffix, free_bytes):
    path = tmp_path / f"features{suffix}"
    random = np.random.default_rng(0)
    features = random.random((64, 1024), np.float32)
    part = (*rows(0, 64)[:2], features)
    full = pytest.raises(ClientError, match="make room, or choose a")
    with full as caught, no_file_beyond(free_bytes):
        write(path, [part] * 20, shape=(1024,))
    assert str(path) in caught.value.message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["features", "features.csv", ".parquet"])
def test_unknown_suffix_is_refused_with_the_allowed_ones(tmp_path, name):
    with pytest.raises(ClientError, match=r"\.parquet, \.arrow, \.npz"):
        check_suffix(tmp_path / name)


@pytest.mark.parametrize(
    ("suffix", "is_refused"),
    [(".npz", True), (".arrow", True), (".parquet", False)],
)
def test_too_little_free_space_is_found_before_any_work(
    tmp_path, suffix, is_refused
):
    contents = Contents((10**9,), 10**9, NAMES, ABOUT)
    path = tmp_path / f"features{suffix}"
    if is_refused:
        with pytest.raises(ClientError, match="free; make room"):
            check_free_space(path, contents)
    else:
        check_free_space(path, contents)
