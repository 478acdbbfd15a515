"""Quarantine of slow models, and memory of an idle worker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hapi_protocol.errors import TooSlowError
from hapi_worker.execution.quarantine import (
    BAN_SECONDS,
    MAX_MODELS,
    MAX_SLOW_PASSES,
    WINDOW_SECONDS,
    ModelQuarantine,
)
from hapi_worker.monitoring.malloc_tuning import (
    RESTARTED,
    TRIM_SECONDS,
    TUNABLES,
    HeapTrimmer,
)


@pytest.fixture
def quarantine(clock):
    return ModelQuarantine(1.0, clock)


def test_model_is_refused_for_a_while_after_slow_passes(quarantine, clock):
    for _ in range(MAX_SLOW_PASSES):
        quarantine.check("slow")
        quarantine.note("slow", 1.5)
    with pytest.raises(TooSlowError, match="slow") as banned:
        quarantine.check("slow")
    assert banned.value.retry_after == BAN_SECONDS
    quarantine.check("other")
    clock.now += BAN_SECONDS
    quarantine.check("slow")
    quarantine.note("slow", 1.5)
    quarantine.check("slow")
    assert quarantine.total == MAX_SLOW_PASSES + 1


def test_quick_or_rarely_slow_models_are_not_refused(quarantine, clock):
    for _ in range(10):
        quarantine.note("quick", 1.0)
        quarantine.note("rarely", 2.0)
        clock.now += WINDOW_SECONDS
        quarantine.check("quick")
        quarantine.check("rarely")


def test_number_of_remembered_models_is_bounded(quarantine):
    for number in range(MAX_MODELS + 10):
        quarantine.note(str(number), 2.0)
    assert len(quarantine._late) == MAX_MODELS


def test_heap_is_trimmed_once_when_work_has_ended():
    busy, trimmed = [False], []
    heap = HeapTrimmer(lambda: busy[0], lambda: trimmed.append(1))
    heap.check()
    busy[0] = True
    heap.check()
    heap.check()
    assert trimmed == []
    busy[0] = False
    heap.check()
    heap.check()
    assert trimmed == [1]


def test_heap_is_trimmed_once_a_minute_while_there_is_work(clock):
    trimmed: list[float] = []
    heap = HeapTrimmer(lambda: True, lambda: trimmed.append(clock.now), clock)
    for _ in range(26):
        heap.check()
        clock.now += TRIM_SECONDS / 12
    assert trimmed == [100 + TRIM_SECONDS, 100 + 2 * TRIM_SECONDS]


FAULTS_AGAIN = """
import resource, threading
from hapi_worker.monitoring.malloc_tuning import keep_heap

def take():
    global before
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [bytearray(48 << 20) for _ in range(2)]
        del blocks

{keep}
thread = threading.Thread(target=take)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Prints the page faults of a thread that allocates large blocks again."""


@pytest.mark.parametrize(
    ("keep", "is_kept"), [("assert keep_heap()", True), ("", False)]
)
def test_large_blocks_are_reused_without_page_faults(keep, is_kept):
    code = FAULTS_AGAIN.format(keep=keep)
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    )
    blocks_pages = 2 * (48 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert (int(found.stdout) < blocks_pages / 100) == is_kept


STARTS = """
import os, sys
from hapi_worker.monitoring.malloc_tuning import restart_without_thread_caches

os.write(1, b"%d " % os.getpid())
restart_without_thread_caches()
print(os.environ["GLIBC_TUNABLES"], *sys.argv[1:])
"""
"""Prints its process at each start."""


@pytest.mark.parametrize(
    ("tunables", "restarted", "wanted"),
    [
        ("glibc.malloc.perturb=0", {}, "glibc.malloc.tcache_count=0:{}"),
        ("glibc.malloc.tcache_max=512", {}, "{}"),
        ("", {RESTARTED: "1"}, "{}"),
    ],
    ids=["again", "set by the operator", "removed by glibc"],
)
def test_program_starts_again_once_without_caches_in_its_process(
    tunables, restarted, wanted
):
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS, "--config", "a b"],
        env={
            **os.environ,
            **restarted,
            "PYTHONPATH": path,
            TUNABLES: tunables,
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    starts = 1 + (wanted != "{}")
    found, _ = process.communicate()
    line = f"{wanted.format(tunables)} --config a b\n"
    assert found == f"{process.pid} " * starts + line
