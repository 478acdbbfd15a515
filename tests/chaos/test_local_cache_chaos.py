"""A cache directory whose writers are killed, and several at once."""

import os
import signal
import time

import numpy as np

from full_disk import no_file_beyond
from hapi_client.caching.directory import CacheDirectory
from hapi_client.caching.row_map import GOOD, RowFormat

ROW_BYTES = 2000
NUM_SAMPLES = 3000
SLICE = 7
SEEDS = 50
FORM = RowFormat({"model": "m"}, ROW_BYTES * np.arange(NUM_SAMPLES + 1))


def row_of(sample):
    """Bytes that show their sample and position."""
    numbers = 1000 * sample + np.arange(ROW_BYTES // 4)
    return numbers.astype("<u4").tobytes()


def opened(path):
    return CacheDirectory(path, 10**9).open(FORM)


def write_all(path, order):
    rows = opened(path)
    for first in order:
        samples = np.arange(first, min(first + SLICE, NUM_SAMPLES))
        rows.put(samples, [row_of(sample) for sample in samples])


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
    samples = np.arange(NUM_SAMPLES)
    rows.check(samples)
    good = samples[rows.states_of(samples) == GOOD].tolist()
    for sample in good:
        assert rows.read(sample, sample + 1) == row_of(sample)
    rows.close()
    return len(good)


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


def test_writers_at_once_give_all_rows(tmp_path, caplog):
    pids = [in_child(write_all, tmp_path, order) for order in orders(1, 4)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert num_right(tmp_path) == NUM_SAMPLES
    assert not caplog.text


def test_a_full_disk_leaves_what_is_there(tmp_path, caplog):
    (order,) = orders(2, 1)
    write_all(tmp_path, order[:100])
    before = num_right(tmp_path)
    # As on a disk that could not reserve the space.
    with no_file_beyond(ROW_BYTES * 1000):
        write_all(tmp_path, order)
    assert "File too large; make room" in caplog.text
    assert before <= num_right(tmp_path) < NUM_SAMPLES
