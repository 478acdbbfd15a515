"""A cache directory whose writers are killed, and several at once."""

import os
import signal
import time

import numpy as np
import torch

from full_disk import no_file_beyond
from hapi_client.caching.directory import CacheDirectory
from hapi_client.caching.disk_rows import DiskRows
from hapi_client.caching.feature_rows import FeatureRows
from hapi_client.caching.segments import RowFormat

FORM = RowFormat((500,), torch.float32)
NUM_SAMPLES = 3000
SLICE = 7
SEEDS = 50


def features_of(samples):
    """Features that show their sample and position."""
    columns = torch.arange(FORM.shape[0])
    return torch.as_tensor(samples)[:, None] * 1000.0 + columns


def opened(path):
    directory = CacheDirectory(path, 10**9)
    rows = FeatureRows(
        FORM,
        lambda least, most: 0,
        DiskRows(directory, {"model": "m"}, FORM),
    )
    # More segments than one.
    rows.expected_rows = 1500
    return rows


def write_all(path, order):
    rows = opened(path)
    for first in order:
        samples = range(first, min(first + SLICE, NUM_SAMPLES))
        rows.add("shard", samples, features_of(samples), {})


def in_child(function, *arguments):
    """Runs a function in a forked process; returns its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function(*arguments)
            status = 0
        finally:
            os._exit(status)
    return pid


def num_right(path):
    """Compares all rows; returns how many there are."""
    rows = opened(path)
    count = 0
    for first in range(0, NUM_SAMPLES, 50):
        samples = slice(first, first + 50)
        rows.check("shard", samples)
        places = rows.find("shard", samples)
        there = np.flatnonzero(places >= 0)
        if len(there):
            actual = rows.gather(places[there])
            assert torch.equal(actual, features_of(first + there))
        count += len(there)
    rows.close()
    return count


def orders(seed, number):
    starts = np.arange(0, NUM_SAMPLES, SLICE - 2)  # slices overlap
    return [
        np.random.default_rng((seed, each)).permutation(starts).tolist()
        for each in range(number)
    ]


def test_a_killed_writer_leaves_right_rows(tmp_path):
    counts = []
    for seed in range(SEEDS):
        path = tmp_path / str(seed)
        delay = np.random.default_rng(seed).uniform(0.0, 0.15)
        (order,) = orders(seed, 1)
        pid = in_child(write_all, path, order)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        counts.append(num_right(path))
        if seed % 10 == 0:
            # Nothing that it left is in the way of the next run.
            write_all(path, order)
            assert num_right(path) == NUM_SAMPLES
    assert 0 < sum(counts) < SEEDS * NUM_SAMPLES


def test_writers_at_once_give_all_rows_once(tmp_path):
    pids = [in_child(write_all, tmp_path, order) for order in orders(1, 4)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert num_right(tmp_path) == NUM_SAMPLES
    (size,) = {sum(path.stat().st_size for path in tmp_path.rglob("*.rows"))}
    assert size == 24 * NUM_SAMPLES


def test_a_full_disk_leaves_what_is_there(tmp_path, caplog):
    (order,) = orders(2, 1)
    write_all(tmp_path, order[:100])
    before = num_right(tmp_path)
    # The next segment does not fit.
    with no_file_beyond(FORM.num_bytes * 1000):
        write_all(tmp_path, order)
    assert "File too large; make room" in caplog.text
    assert before <= num_right(tmp_path) < NUM_SAMPLES
    assert not list(tmp_path.rglob("*.tmp"))
