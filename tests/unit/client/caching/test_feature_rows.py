"""Rows of features in memory and in a directory, damage and limits."""

import errno
import fcntl
import gc
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from full_disk import no_file_beyond
from hapi_client.caching.directory import CacheDirectory
from hapi_client.caching.disk_rows import DiskRows
from hapi_client.caching.feature_caches import CacheOptions, FeatureCaches
from hapi_client.caching.feature_rows import ABSENT, FeatureRows
from hapi_client.caching.pool import POOL, CachePool
from hapi_client.caching.segments import RECORD, DiskSegment, RowFormat
from hapi_client.caching.stored_bytes import (
    SampleCache,
    ShardCopies,
    StoredBytes,
)
from hapi_client.sampling.partition import SpanSlice
from hapi_protocol.data_index import IndexRow, Span
from hapi_splitter.private_folder import MARK

FORM = RowFormat((3,), torch.float32)
FEATURES = torch.arange(60.0).reshape(20, 3)
FACTS = {"model": "0" * 64}


def in_memory(capacity, form=FORM):
    left = capacity

    def take(least, most):
        nonlocal left
        granted = min(left, most) if left >= least else 0
        left -= granted
        return granted

    return FeatureRows(form, take, None)


def on_disk(path, *, limit_bytes=10**6, form=FORM, expected=20):
    directory = CacheDirectory(path, limit_bytes)
    rows = FeatureRows(
        form, lambda least, most: 0, DiskRows(directory, FACTS, form)
    )
    rows.expected_rows = expected
    return rows


def add(rows, first, stop, etag="a", failures=None):
    bad = failures or {}
    good = [n for n in range(first, stop) if n - first not in bad]
    rows.add(etag, range(first, stop), FEATURES[good], bad)


def found(rows, first, stop, etag="a"):
    """Features of samples, after a comparison with their checksums."""
    if not rows.check(etag, slice(first, stop)):
        return None
    return rows.gather(rows.find(etag, slice(first, stop)))


@pytest.fixture(params=["memory", "disk"])
def rows(request, tmp_path):
    if request.param == "memory":
        yield in_memory(20)
    else:
        opened = on_disk(tmp_path)
        yield opened
        opened.close()


def test_slices_of_two_epochs_may_overlap(rows):
    add(rows, 0, 6)
    add(rows, 3, 10)
    assert rows.num_rows == 10
    assert torch.equal(found(rows, 0, 10), FEATURES[:10])
    assert found(rows, 0, 11) is None
    assert found(rows, 0, 10, etag="other") is None


def test_bad_samples_take_no_room(rows):
    add(rows, 0, 3, failures={1: "damaged"})
    places = rows.find("a", slice(0, 3))
    assert rows.failure("a", 1) == "damaged"
    assert torch.equal(rows.gather(places[[0, 2]]), FEATURES[[0, 2]])
    assert rows.num_rows == 2


def test_bad_samples_are_known_to_the_next_process(tmp_path):
    first = on_disk(tmp_path)
    add(first, 0, 3, failures={1: "damagéd"})
    second = on_disk(tmp_path)
    add(first, 3, 6, failures={0: "truncated"})
    second.refresh()
    for rows in (second, on_disk(tmp_path)):
        assert (rows.find("a", slice(0, 6)) != ABSENT).all()
        assert rows.failure("a", 1) == "damagéd"
        assert rows.failure("a", 3) == "truncated"
    assert len((second._disk.folder / "failures").read_text().splitlines()) < 5


@pytest.mark.parametrize("damage", ["flipped", "cut", "other release"])
def test_damaged_record_of_a_bad_sample_is_no_record(
    tmp_path, damage, monkeypatch
):
    first = on_disk(tmp_path)
    add(first, 0, 3, failures={1: "damaged"})
    file = first._disk.folder / "failures"
    content = file.read_bytes()
    if damage == "flipped":
        changes = [
            content[:n] + bytes([content[n] ^ 1 << n % 8]) + content[n + 1 :]
            for n in range(len(content))
        ]
    elif damage == "cut":
        changes = [content[:n] for n in range(len(content))]
    else:
        monkeypatch.setattr("PIL.__version__", "0.0")
        changes = [content]
    for changed in changes:
        file.write_bytes(changed)
        rows = on_disk(tmp_path)
        places = rows.find("a", slice(0, 3))
        assert (places[[0, 2]] >= 0).all()
        if places[1] != ABSENT:  # the change was in what is no record
            assert rows.failure("a", 1) == "damaged"
            assert damage == "flipped"
        add(rows, 0, 3, failures={1: "again"})
        assert on_disk(tmp_path).failure("a", 1) in ("again", "damaged")
        rows.close()
    first.close()


def test_slice_without_room_is_left_out():
    rows = in_memory(3)
    add(rows, 0, 4)
    assert (rows.find("a", slice(0, 4)) == ABSENT).all()
    add(rows, 4, 6)
    assert torch.equal(found(rows, 4, 6), FEATURES[4:6])


def test_rows_of_several_files_are_gathered_in_order(tmp_path):
    rows = on_disk(tmp_path, expected=4)
    for first in (0, 4, 8):
        add(rows, first, first + 4)
    assert len(list(tmp_path.rglob("*.npy"))) == 3
    order = np.array([9, 0, 5, 11, 2])
    places = rows.find("a", slice(0, 12))[order]
    assert torch.equal(rows.gather(places), FEATURES[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_another_process_finds_the_same_rows(tmp_path, dtype):
    form = RowFormat((3,), dtype)
    writer, reader = (on_disk(tmp_path, form=form) for _ in range(2))
    writer.add("a", range(5), FEATURES[:5].to(dtype), {})
    assert found(reader, 0, 5) is None
    reader.refresh()
    assert torch.equal(found(reader, 0, 5), FEATURES[:5].to(dtype))
    reader.add("a", range(8), FEATURES[:8].to(dtype), {})
    writer.add("a", range(4, 10), FEATURES[4:10].to(dtype), {})
    reader.refresh()
    for each in (reader, writer, on_disk(tmp_path, form=form)):
        assert torch.equal(found(each, 0, 10), FEATURES[:10].to(dtype))
        assert each.num_rows == 10


def test_files_are_plain_numpy(tmp_path):
    add(on_disk(tmp_path), 0, 20)
    (path,) = tmp_path.rglob("*.npy")
    assert np.array_equal(np.load(path), FEATURES.numpy())


def test_a_flipped_bit_is_never_delivered(tmp_path, caplog):
    add(on_disk(tmp_path), 0, 20)
    generator = np.random.default_rng(5)
    files = [
        path
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file() and path.stat().st_size and path.name != MARK
    ]
    assert {path.suffix for path in files} == {".npy", ".rows", ".json"}
    num_noticed = 0
    for path in files:
        original = path.read_bytes()
        for bit in generator.integers(8 * len(original), size=25).tolist():
            data = bytearray(original)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            rows = on_disk(tmp_path)
            for sample in range(20):
                one = found(rows, sample, sample + 1)
                if one is None:
                    num_noticed += 1
                else:
                    assert torch.equal(one, FEATURES[sample : sample + 1])
            add(rows, 0, 20)
            assert torch.equal(found(rows, 0, 20), FEATURES)
            rows.close()
            for leftover in tmp_path.rglob("*.*"):
                if leftover.name != MARK:
                    leftover.unlink()
            add(on_disk(tmp_path), 0, 20)
            assert path.read_bytes() == original
    assert num_noticed >= 50
    assert "damaged" in caplog.text


def test_a_record_without_its_row_is_absent(tmp_path):
    rows = on_disk(tmp_path)
    add(rows, 0, 4)
    (path,) = tmp_path.rglob("*.rows")
    record = np.zeros(1, RECORD)
    record["sample"] = 7
    with path.open("ab") as file:
        # As after a loss of power, and a record that is cut off.
        file.write(record.tobytes() + b"\0" * 9)
    again = on_disk(tmp_path)
    assert torch.equal(found(again, 0, 4), FEATURES[:4])
    assert found(again, 7, 8) is None


def test_a_full_cache_keeps_what_it_has(tmp_path, caplog):
    on_disk(tmp_path).close()
    directory = CacheDirectory(tmp_path)
    used = sum(each.num_bytes for each in directory.entries())
    rows = on_disk(tmp_path, limit_bytes=used + 5 * FORM.num_bytes)
    add(rows, 0, 5)
    add(rows, 5, 8)
    add(rows, 8, 10)
    assert torch.equal(found(rows, 0, 5), FEATURES[:5])
    assert found(rows, 5, 8) is None
    assert caplog.text.count("is full") == 1


def test_least_recently_used_entries_leave_first(tmp_path):
    directory = CacheDirectory(tmp_path, 10**6)
    entries = {}
    for number in range(3):
        disk = DiskRows(directory, {"model": str(number)}, FORM)
        rows = FeatureRows(FORM, lambda least, most: 0, disk)
        add(rows, 0, 20)
        os.utime(disk.folder / "facts.json", (number, number))
        entries[number] = disk.folder
        if number != 1:
            rows.close()  # entry 1 is in use
    directory.limit_bytes = sum(e.num_bytes for e in directory.entries())
    new = on_disk(tmp_path, limit_bytes=directory.limit_bytes)
    add(new, 0, 20)
    assert torch.equal(found(new, 0, 20), FEATURES)
    assert [path.exists() for path in entries.values()] == [
        False,
        True,
        True,
    ]


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    rows = on_disk(tmp_path)
    for _ in range(2):
        add(rows, 0, 5)
    assert found(rows, 0, 5) is None
    assert caplog.text.count("No space left on device; make room") == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_full_disk_is_told_after_damage(tmp_path, caplog):
    written = on_disk(tmp_path, expected=5)
    add(written, 0, 5)
    written.close()
    (path,) = tmp_path.rglob("*.npy")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    rows = on_disk(tmp_path, expected=5)
    assert found(rows, 0, 5) is None
    with no_file_beyond(0):
        add(rows, 0, 5)
    assert "cached features are damaged" in caplog.text
    assert "File too large; make room" in caplog.text
    # What is there stays in use, and the files are closed in the end.
    assert torch.equal(found(rows, 0, 4), FEATURES[:4])
    rows.close()
    assert CacheDirectory(tmp_path).purge() == (1, 0)


def test_directory_that_others_may_write_to_is_refused(tmp_path):
    path = CacheDirectory(tmp_path).path
    path.chmod(0o770)
    with pytest.raises(OSError, match=r"may write to .*/samples-2"):
        CacheDirectory(tmp_path)


def test_samples_of_another_process_are_found(tmp_path):
    rows = tuple(IndexRow(n, f"k{n}", 10 * n, 10, 0) for n in range(6))
    span, data = Span("s", "a", rows), bytes(range(60))
    first, second = (
        StoredBytes(
            lambda num_bytes: False,
            ShardCopies(CacheDirectory(tmp_path), {"model": "none"}),
        )
        for _ in range(2)
    )
    assert not second.holds(span)
    first.put(span.part(0, 4), data[:40])
    second.refresh()
    assert second.get(span.part(1, 4)) == data[10:40]
    second.put(span, data)
    first.refresh()
    assert first.get(span) == data
    assert SampleCache(first, {"a"}).get(span) is None
    assert not SampleCache(first, {"a"}).holds(span)
    for each in (first, second):
        each.close()
    assert CacheDirectory(tmp_path).purge() == (1, 0)


def test_a_stopped_writer_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr("hapi_client.caching.directory.LOCK_SECONDS", 0.05)
    rows = on_disk(tmp_path)
    add(rows, 0, 5)
    folder = next(tmp_path.rglob("*.npy")).parent
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        add(rows, 5, 8)
        assert found(rows, 5, 8) is None
        assert torch.equal(found(rows, 0, 5), FEATURES[:5])
    add(rows, 5, 8)
    assert torch.equal(found(rows, 5, 8), FEATURES[5:8])


def test_damaged_facts_are_replaced(tmp_path, caplog):
    rows = on_disk(tmp_path)
    add(rows, 0, 5)
    rows.close()
    (path,) = tmp_path.rglob("facts.json")
    path.write_text(json.dumps({"model": "another"}))
    again = on_disk(tmp_path)
    assert found(again, 0, 5) is None
    assert "is damaged; its features" in caplog.text


def test_segment_of_another_shape_is_damaged(tmp_path):
    DiskSegment(tmp_path, 0, (3,), torch.float32, capacity=4).close()
    for shape, dtype in [((4,), torch.float32), ((3,), torch.int32)]:
        with pytest.raises(ValueError, match="is damaged"):
            DiskSegment(tmp_path, 0, shape, dtype)


def test_open_files_of_a_network_file_system_are_no_error(
    tmp_path, monkeypatch
):
    rows = on_disk(tmp_path)
    add(rows, 0, 5)
    rows.close()

    def keep_open_files(folder):
        # NFS renames a file that is open, until it is closed.
        for path in folder.iterdir():
            if path.suffix == ".npy":
                path.rename(folder / ".nfs0001")
            else:
                path.unlink()
        folder.rmdir()

    monkeypatch.setattr(shutil, "rmtree", keep_open_files)
    assert CacheDirectory(tmp_path).purge() == (0, 1)
    again = on_disk(tmp_path)
    add(again, 0, 5)
    assert torch.equal(found(again, 0, 5), FEATURES[:5])


def test_file_system_that_reserves_no_room_is_used(tmp_path, monkeypatch):
    def write_blocks(file, offset, length):
        # As glibc does where fallocate(2) is not supported.
        for block in range(offset, offset + length, 512):
            if not os.pread(file, 1, block).strip(b"\0"):
                os.pwrite(file, b"\0", block)
        os.pwrite(file, b"\0", offset + length - 1)

    monkeypatch.setattr(os, "posix_fallocate", write_blocks)
    rows = on_disk(tmp_path)
    add(rows, 0, 5)
    assert torch.equal(found(rows, 0, 5), FEATURES[:5])
    rows.close()


def test_file_system_that_maps_no_files_is_left_empty(
    tmp_path, monkeypatch, caplog
):
    def refuse(*_):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    kept = on_disk(tmp_path / "kept")
    add(kept, 0, 5)
    kept.close()
    monkeypatch.setattr(np, "memmap", refuse)
    rows = on_disk(tmp_path)
    add(rows, 0, 5)
    assert found(rows, 0, 5) is None
    assert "No such device; make room" in caplog.text
    rows.close()
    (folder,) = (tmp_path / "samples-2").glob("?" * 32)
    assert {each.name for each in folder.iterdir()} == {
        "facts.json",
        "lock",
        "use",
    }
    # An entry that cannot be read can be removed at once.
    with pytest.raises(OSError, match="No such device"):
        on_disk(tmp_path / "kept")
    assert CacheDirectory(tmp_path / "kept").purge() == (1, 0)


def test_memory_that_the_host_refuses_is_a_warning(monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("can't allocate memory")

    rows = in_memory(20)
    monkeypatch.setattr(
        "hapi_client.caching.feature_rows.MemorySegment", refuse
    )
    for _ in range(2):
        add(rows, 0, 5)
    assert found(rows, 0, 5) is None
    assert caplog.text.count("not cached in memory: can't allocate") == 1


def test_rows_of_a_forgotten_job_can_be_freed():
    data = SimpleNamespace(
        num_samples=1, spans=[Span("s", "a", (IndexRow(0, "k", 0, 9, 0),))]
    )
    facts = {"storage": "s", "container": "c", "model": "forgotten"}
    (piece,) = pieces = [SpanSlice(0, 0, 1)]

    def caches():
        return FeatureCaches(lambda: facts, FORM, [data], CacheOptions(1000))

    forgotten = caches()
    forgotten.of(data, None).put(piece, FEATURES[:1], {})
    POOL.clear()
    assert forgotten.of(data, None).selector(pieces) is not None
    del forgotten
    gc.collect()
    POOL.clear()
    assert caches().of(data, None).selector(pieces) is None
    gc.collect()
    POOL.clear()


def test_pool_keeps_rows_of_closed_jobs_until_room_is_needed():
    pool = CachePool()

    def opened(key, limit=40 * FORM.num_bytes):
        rows = pool.open(
            key,
            limit,
            FORM.num_bytes,
            lambda take: FeatureRows(FORM, take, None),
        )
        rows.expected_rows = 20
        return rows

    for key in ("first", "second"):
        add(opened(key), 0, 20)
        pool.release(key)
    assert torch.equal(found(opened("first"), 0, 20), FEATURES)
    add(opened("third"), 0, 20)
    assert torch.equal(found(opened("third"), 0, 20), FEATURES)
    assert found(opened("second"), 0, 20) is None
    # The first is in use, and the pool is full.
    add(opened("fourth"), 0, 20)
    assert found(opened("fourth"), 0, 20) is None
    assert torch.equal(found(opened("first"), 0, 20), FEATURES)
    for key in ("first", "first", "third", "third"):
        pool.release(key)
    pool.clear()
    assert found(opened("first"), 0, 20) is None
