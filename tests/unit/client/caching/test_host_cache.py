"""Cached features and samples: damage, limits, and what others do."""

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import random

import numpy as np
import pytest
import torch

from full_disk import no_file_beyond
from hapi_client.caching.cache_config import CacheConfig
from hapi_client.caching.directory import CacheDirectory
from hapi_client.caching.host_cache import HostCache
from hapi_client.caching.pool import POOL
from hapi_client.caching.row_map import PAGE_BYTES, read_facts
from hapi_client.data.splits import DataSet
from hapi_client.sampling.partition import SpanSlice
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.transforms import Training

COUNT = 20
ROW_BYTES = 128
SAMPLE_BYTES = 200
FEATURES = torch.arange(COUNT * 32.0).reshape(COUNT, 32)
FACTS = {"storage": "s", "model": "0" * 64}


def data_of(etag="a", container="c"):
    rows = tuple(
        IndexRow(n, f"k{n}", SAMPLE_BYTES * n, SAMPLE_BYTES, 0)
        for n in range(COUNT)
    )
    spans = [
        Span("s", etag, rows[:15], container),
        Span("s", etag, rows[15:], container),
    ]
    return DataSet(spans, [np.zeros(len(s.rows), np.int64) for s in spans])


DATA = data_of()


@pytest.fixture(autouse=True)
def new_process():
    """The next test finds nothing in memory."""
    yield
    gc.collect()
    POOL.clear()


def job_of(
    path=None,
    *,
    memory=0,
    limit=10**6,
    dtype=torch.float32,
    variants=1,
    changed=(),
    **facts,
):
    return HostCache(
        lambda: {**FACTS, **facts},
        (ROW_BYTES // dtype.itemsize,),
        dtype,
        [DATA],
        CacheConfig(memory, path, None if path is None else limit),
        variants,
        changed_shards=lambda data: changed,
    )


def opened(path=None, **options):
    """The features of a job that a test keeps open."""
    return job_of(path, **options).of(DATA, None)


def slices(first, stop):
    """The slices of both spans for a range of samples."""
    bounds = [(0, 0, 15), (1, 15, COUNT)]
    return [
        SpanSlice(span, max(first, start) - start, min(stop, end) - start)
        for span, start, end in bounds
        if max(first, start) < min(stop, end)
    ]


def add(cache, first, stop, failures=None, features=FEATURES):
    for piece in slices(first, stop):
        start = 15 * piece.span + piece.first
        numbers = range(start, start + len(piece))
        bad = failures or {}
        messages = {n - start: bad[n] for n in numbers if n in bad}
        good = [n for n in numbers if n not in bad]
        cache.put(piece, features[good], messages)


def cached(cache, first, stop):
    """Features of samples, after a comparison with their checksums."""
    select = cache.selector(slices(first, stop))
    return None if select is None else select(torch.arange(stop - first))


def path_of(folder):
    (path,) = folder.rglob("*.rows")
    return path


@pytest.mark.parametrize("place", ["memory", "directory"])
def test_slices_of_two_epochs_may_overlap(tmp_path, place):
    cache = opened(memory=10**6) if place == "memory" else opened(tmp_path)
    add(cache, 0, 6)
    add(cache, 3, 17)
    assert cache.num_cached() == 17
    assert torch.equal(cached(cache, 0, 17), FEATURES[:17])
    assert cached(cache, 0, 18) is None
    assert cache.holds(SpanSlice(1, 0, 2))
    assert not cache.holds(SpanSlice(1, 0, 3))


@pytest.mark.parametrize("place", ["memory", "directory"])
def test_first_samples_stay_if_not_all_have_space(tmp_path, place, caplog):
    """Whichever comes first, so that no space is left unused."""
    size = 5 * ROW_BYTES
    cache = (
        opened(memory=size)
        if place == "memory"
        else opened(tmp_path, limit=2 * PAGE_BYTES + size)
    )
    add(cache, 4, COUNT, failures={4: "bad", 9: "bad"})
    assert cache.num_cached() == 1
    add(cache, 0, 4)
    assert torch.equal(cached(cache, 0, 4), FEATURES[:4])
    assert cache.capacity == 5
    assert ("is full: its limit is" in caplog.text) == (place == "directory")


def test_directory_with_less_space_than_memory_is_left_alone(tmp_path):
    job = job_of(tmp_path, limit=2 * PAGE_BYTES + 500, memory=10**6)
    cache = job.of(DATA, None)
    assert cache.capacity == COUNT
    assert not list(tmp_path.rglob("*.rows"))
    assert job.coverage(DATA) == (0.0, 1.0)


def test_larger_limit_makes_a_file_grow(tmp_path):
    small = job_of(tmp_path, limit=2 * PAGE_BYTES + 500)
    add(small.of(DATA, None), 0, COUNT)
    small.close()
    cache = opened(tmp_path)
    assert cache.num_cached() == 3
    add(cache, 0, COUNT)
    assert torch.equal(cached(cache, 0, COUNT), FEATURES)


def test_bad_samples_are_known_to_the_next_process(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    messages = {1: "damagéd", 3: "x" * 500}
    add(first, 0, 6, failures=messages)
    for cache in (second, opened(tmp_path)):
        (piece,) = slices(0, 6)
        found = cache.get(piece)
        assert found.failures == {
            1: "damagéd",
            3: "x" * (ROW_BYTES - 3) + "...",
        }
        assert [*found.features] == [0, 2, 4, 5]
        assert torch.equal(found.features[5], FEATURES[5])
        assert cached(cache, 0, 6) is None


def test_bad_samples_of_another_release_are_tried_again(
    tmp_path, monkeypatch, caplog
):
    add(opened(tmp_path), 0, 3, failures={1: "bad"})
    monkeypatch.setattr("hapi_client.caching.row_map._RELEASE", 0)
    cache = opened(tmp_path)
    assert cache.get(*slices(0, 3)) is None
    add(cache, 0, 3)
    assert torch.equal(cached(cache, 0, 3), FEATURES[:3])
    assert not caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_another_process_finds_the_same_rows(tmp_path, dtype):
    features = FEATURES[:, : ROW_BYTES // dtype.itemsize].to(dtype)
    if dtype.itemsize == 2:
        features = torch.cat([features, features], 1)
    writer, reader = (opened(tmp_path, dtype=dtype) for _ in range(2))
    add(writer, 0, 5, features=features)
    assert torch.equal(cached(reader, 0, 5), features[:5])
    add(reader, 0, 8, features=features)
    add(writer, 4, 10, features=features)
    for cache in (reader, writer, opened(tmp_path, dtype=dtype)):
        assert torch.equal(cached(cache, 0, 10), features[:10])
        assert cache.num_cached() == 10


def test_a_flipped_bit_is_never_delivered(tmp_path, caplog):
    add(opened(tmp_path), 0, COUNT, failures={7: "bad"})
    path = path_of(tmp_path)
    original = path.read_bytes()
    good = [n for n in range(COUNT) if n != 7]
    parts = {
        "header": (0, 300),
        "records": (PAGE_BYTES, PAGE_BYTES + 5 * COUNT),
        "rows": (2 * PAGE_BYTES, len(original)),
    }
    generator = np.random.default_rng(5)
    noticed = dict.fromkeys(parts, 0)
    for part, (start, stop) in parts.items():
        for bit in generator.integers(8 * start, 8 * stop, 60).tolist():
            path.unlink()
            data = bytearray(original)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            job = job_of(tmp_path)
            cache = job.of(DATA, None)
            for sample in good:
                one = cached(cache, sample, sample + 1)
                if one is None:
                    noticed[part] += 1
                else:
                    assert torch.equal(one[0], FEATURES[sample])
            bad = cache.get(*slices(7, 8))
            assert bad is None or bad.failures == {0: "bad"}
            add(cache, 0, COUNT, failures={7: "bad"})
            for piece in slices(0, COUNT):
                assert cache.get(piece) is not None
            del cache
            job.close()
            assert path.read_bytes()[: stop - 1] == original[: stop - 1]
    assert noticed["header"] == 60 * len(good)
    assert noticed["records"] >= 50
    assert noticed["rows"] >= 50
    assert "its features are computed again" in caplog.text
    assert "are damaged; they are read again" in caplog.text


def test_a_record_without_its_row_is_absent(tmp_path):
    add(opened(tmp_path), 0, 4)
    with path_of(tmp_path).open("r+b") as file:
        file.seek(PAGE_BYTES + 4)  # as after a loss of power
        file.write(b"\x01\x02\x03")
    cache = opened(tmp_path)
    assert torch.equal(cached(cache, 0, 4), FEATURES[:4])
    assert cached(cache, 4, 5) is None
    assert not cache.holds(*slices(6, 7))


def test_truncated_file_is_filled_again(tmp_path):
    add(opened(tmp_path), 0, COUNT)
    path = path_of(tmp_path)
    for length in (len(path.read_bytes()) - 200, PAGE_BYTES + 3, 10):
        os.truncate(path, length)
        cache = opened(tmp_path)
        for piece in slices(0, COUNT):
            cache.get(piece)
        add(cache, 0, COUNT)
        assert torch.equal(cached(cache, 0, COUNT), FEATURES)


def test_least_recently_used_entries_leave_first(tmp_path):
    jobs = []
    for number in range(3):
        job = job_of(tmp_path, model=str(number))
        add(job.of(DATA, None), 0, COUNT)
        jobs.append(job)
        if number != 1:
            job.close()  # entry 1 is in use
    directory = CacheDirectory(tmp_path)
    for entry in directory.entries():
        model = int(read_facts(entry.path)["model"])
        os.utime(entry.path, (model, model))
    limit = sum(entry.length_bytes for entry in directory.entries())
    new = opened(tmp_path, limit=limit, model="3")
    add(new, 0, COUNT)
    assert torch.equal(cached(new, 0, COUNT), FEATURES)
    left = {read_facts(e.path)["model"] for e in directory.entries()}
    assert left == {"1", "2", "3"}
    assert directory.purge() == (1, 2)


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("os.posix_fallocate", errno.ENOSPC),
        ("mmap.mmap", errno.ENODEV),
        ("fcntl.flock", errno.ENOLCK),
    ],
)
def test_unusable_file_system_is_a_warning(
    tmp_path, monkeypatch, caplog, function, code
):
    """Full, without memory maps, without locks: memory is used."""
    original = mmap.mmap

    def fail(*arguments, **options):
        if arguments[0] == -1:  # anonymous memory
            return original(*arguments, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(function, fail)
    cache = opened(tmp_path, memory=10**6)
    add(cache, 0, 5)
    assert torch.equal(cached(cache, 0, 5), FEATURES[:5])
    assert caplog.text.count(f"{os.strerror(code)}; make room") == 1
    assert not list(tmp_path.rglob("*.rows"))


def test_full_disk_leaves_the_rows_of_a_file_that_should_grow(
    tmp_path, monkeypatch
):
    small = job_of(tmp_path, limit=2 * PAGE_BYTES + 500)
    add(small.of(DATA, None), 0, COUNT)
    small.close()

    def is_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    assert opened(tmp_path).num_cached() == 3


def test_full_disk_after_damage_is_a_warning(tmp_path, caplog):
    add(opened(tmp_path), 0, 5)
    path = path_of(tmp_path)
    with path.open("r+b") as file:
        file.seek(2 * PAGE_BYTES + 4 * ROW_BYTES)
        file.write(b"x")
    job = job_of(tmp_path)
    cache = job.of(DATA, None)
    assert cached(cache, 0, 5) is None
    with no_file_beyond(0):
        add(cache, 0, COUNT)
    assert "are damaged; they are read again" in caplog.text
    assert "File too large; make room" in caplog.text
    # What is there stays in use, and the file is closed in the end.
    assert torch.equal(cached(cache, 0, 4), FEATURES[:4])
    gc.collect()
    job.close()
    assert CacheDirectory(tmp_path).purge() == (1, 0)


def test_file_system_that_reserves_no_room_is_used(tmp_path, monkeypatch):
    def write_blocks(file, offset, length):
        # As glibc does where fallocate(2) is not supported.
        for block in range(offset, offset + length, 512):
            if not os.pread(file, 1, block).strip(b"\0"):
                os.pwrite(file, b"\0", block)
        os.pwrite(file, b"\0", offset + length - 1)

    monkeypatch.setattr(os, "posix_fallocate", write_blocks)
    cache = opened(tmp_path)
    add(cache, 0, 5)
    assert torch.equal(cached(cache, 0, 5), FEATURES[:5])


def test_a_stopped_process_stops_no_other(tmp_path, monkeypatch, caplog):
    """Whatever it holds: writers take no lock, others wait for a while."""
    monkeypatch.setattr("hapi_splitter.private_folder.LOCK_SECONDS", 0.05)
    writer = opened(tmp_path)
    with (tmp_path / "samples-3" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        add(writer, 0, 5)
        assert torch.equal(cached(writer, 0, 5), FEATURES[:5])
        other = opened(tmp_path, memory=10**6)
        assert "another process holds" in caplog.text
        add(other, 0, 5)
        assert torch.equal(cached(other, 0, 5), FEATURES[:5])
    assert torch.equal(cached(opened(tmp_path), 0, 5), FEATURES[:5])


def test_changed_shards_are_neither_served_nor_added(tmp_path):
    add(opened(tmp_path), 0, 5)
    job = job_of(tmp_path, changed={"a"})
    cache = job.of(DATA, None)
    add(cache, 0, COUNT)
    assert cache.num_cached() == 0
    assert not cache.holds(*slices(0, 5))
    other = job_of(tmp_path).of(data_of(etag="b"), None)
    assert other.num_cached() == 0


TRAINING = Training(0, 0)
CONTENT = random.Random(0).randbytes(COUNT * SAMPLE_BYTES)


def samples_of(path, changed=()):
    """Samples as they are stored: their random changes never repeat."""
    job = job_of(path, variants=None, changed=changed)
    assert job.of(DATA, TRAINING) is None
    return job.samples(TRAINING)


def test_samples_of_another_process_are_found(tmp_path, caplog):
    span = DATA.spans[0]
    data = CONTENT[: 15 * SAMPLE_BYTES]
    first, second = samples_of(tmp_path), samples_of(tmp_path)
    assert not second.holds(span)
    first.put(span.part(0, 4), data[: 4 * SAMPLE_BYTES])
    part = data[SAMPLE_BYTES : 4 * SAMPLE_BYTES]
    assert second.get(span.part(1, 4)) == part
    assert second.get(span) is None
    second.put(span, data)
    assert first.holds(span)
    assert first.get(span) == data
    third = samples_of(tmp_path, changed={"a"})
    assert third.get(span) is None
    assert not third.holds(span)
    third.put(span, data)
    with path_of(tmp_path).open("r+b") as file:
        file.seek(2 * PAGE_BYTES + 2 * SAMPLE_BYTES)
        file.write(b"damage")
    fourth = samples_of(tmp_path)
    assert fourth.get(span) is None
    assert fourth.get(span.part(3, 15)) == data[3 * SAMPLE_BYTES :]
    assert "are damaged; they are read again" in caplog.text
    fourth.put(span, data)
    assert fourth.get(span) == data


def test_memory_that_the_host_refuses_is_a_warning(monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    job = job_of(memory=10**6)
    assert job.of(DATA, None) is job.of(DATA, None) is None
    assert caplog.text.count("not cached in memory: [Errno 12] Cannot") == 1


def test_rows_of_a_forgotten_job_can_be_freed():
    forgotten = job_of(memory=10**4)
    add(forgotten.of(DATA, None), 0, 1)
    POOL.clear()
    assert cached(forgotten.of(DATA, None), 0, 1) is not None
    del forgotten
    gc.collect()
    POOL.clear()
    assert opened(memory=10**4).num_cached() == 0


def test_memory_keeps_rows_of_closed_jobs_until_others_need_it():
    def job(model):
        job = job_of(memory=2 * COUNT * ROW_BYTES, model=model)
        return job, job.of(DATA, None)

    for model in ("first", "second"):
        first, cache = job(model)
        add(cache, 0, COUNT)
        first.close()
    first, cache = job("first")
    assert torch.equal(cached(cache, 0, COUNT), FEATURES)
    third, cache = job("third")
    add(cache, 0, COUNT)
    # Both are in use, and the memory is full.
    with contextlib.closing(job("second")[0]) as second:
        assert second.of(DATA, None) is None
        third.close()
        assert second.of(DATA, None).num_cached() == 0
    first.close()
    POOL.clear()
    assert job("first")[1].num_cached() == 0
