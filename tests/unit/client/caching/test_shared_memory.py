"""The memory that the ranks of a host share."""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from hapi_client.caching import pool
from hapi_client.caching.pool import MemoryPool, local_ranks, shared_name
from hapi_client.caching.row_map import RowFormat
from waiting import until

FORM = RowFormat({"model": "m"}, np.arange(11) * 100)
RANK = """
import os, sys
import numpy as np
from hapi_client.caching.pool import MemoryPool, shared_name
from hapi_client.caching.row_map import RowFormat
form = RowFormat({"model": "m"}, np.arange(11) * 100)
rows = MemoryPool().open(form, sys, 1000, shared_name(os.environ))
for line in sys.stdin:
    row = int(line)
    if row < 0:
        rows.put(np.array([-row]), [bytes([-row]) * 100])
        print("written", flush=True)
    else:
        number = np.array([row])
        is_there = rows.states_of(number).all() and rows.check(number)
        print(is_there and rows.read(row, row + 1)[0], flush=True)
"""


def environment(run):
    return {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": run}


@pytest.fixture
def rank(tmp_path):
    """Starts ranks of a run of this test; they end with it."""
    run = f"{os.getpid()} {tmp_path}"
    with contextlib.ExitStack() as stack:

        def start(name=""):
            process = subprocess.Popen(
                [sys.executable, "-c", RANK],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment(run + name)},
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start


def ask(process, row):
    process.stdin.write(f"{row}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_single_ranks_share_nothing():
    assert local_ranks({"LOCAL_WORLD_SIZE": "four"}) == 1
    for ranks in ("", "1"):
        assert shared_name({"LOCAL_WORLD_SIZE": ranks}) == ""
    names = {shared_name(environment(run)) for run in "ab"}
    assert len(names) == 2


def test_ranks_find_the_rows_of_one_another_until_the_last_ends(rank):
    first, second = rank(), rank()
    other = rank(" of another run")
    assert ask(first, -3) == "written"
    assert ask(second, 3) == "3"
    assert ask(other, 3) == "False"
    first.send_signal(signal.SIGKILL)
    first.wait()
    third = rank()
    assert ask(third, 3) == "3"
    assert ask(third, -4) == "written"
    assert ask(second, 4) == "4"
    for each in (second, third):
        each.kill()
        each.wait()
    # Nothing is left, whichever way they ended.
    assert ask(rank(), 3) == "False"


def test_ranks_that_begin_at_once_have_the_same_memory(rank):
    ranks = [rank() for _ in range(4)]
    for number, each in enumerate(ranks, 1):
        assert ask(each, -number) == "written"
    for each in ranks:
        assert [ask(each, n) for n in range(1, 5)] == ["1", "2", "3", "4"]


def test_rank_that_is_stopped_while_it_opens_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(pool, "JOIN_SECONDS", 0.05)
    name = shared_name(environment("stopped"))
    with (
        pool._only_rank(f"{name}-{FORM.key}-{pool.FORMAT_VERSION}"),
        pytest.raises(TimeoutError, match="another rank opens"),
    ):
        MemoryPool().open(FORM, pool, 1000, name)


def test_memory_is_freed_with_its_pool():
    opened = MemoryPool()
    name = shared_name(environment("freed"))
    full_name = f"{name}-{FORM.key}-{pool.FORMAT_VERSION}"
    rows = opened.open(FORM, pool, 1000, name)
    file = pool._find_shared(full_name)
    assert file is not None
    os.close(file)
    del rows
    opened.release(pool)
    opened.clear()
    until(lambda: pool._find_shared(full_name) is None)
