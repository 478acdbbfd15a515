"""The directory in memory that the ranks of a host share."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hapi_client.caching import shared_memory
from hapi_client.caching.shared_memory import local_ranks, shared_directory
from waiting import until

RANK_BYTES = 1 << 20
JOIN = """
import os, sys
from hapi_client.caching.shared_memory import shared_directory
print(*shared_directory(os.environ, 1 << 20), flush=True)
sys.stdin.read()
"""


def environment(run):
    return {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": run}


@pytest.fixture
def rank(request, tmp_path):
    """Starts ranks of a run of this test; they end with it."""
    run = f"{os.getpid()} {tmp_path}"
    started = []

    def start(name=""):
        process = subprocess.Popen(
            [sys.executable, "-c", JOIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment(run + name)},
        )
        started.append(process)
        path, limit = process.stdout.readline().split()
        assert int(limit) == 2 * RANK_BYTES
        return process, Path(path)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def watchers(folder):
    """Processes that wait for the end of the ranks."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if words[0] == b"flock" and os.fsencode(folder) in words:
            found.append(int(each.parent.name))
    return found


def test_single_ranks_share_nothing():
    assert local_ranks({"LOCAL_WORLD_SIZE": "four"}) == 1
    for ranks in ("", "1"):
        found = shared_directory({"LOCAL_WORLD_SIZE": ranks}, RANK_BYTES)
        assert found is None
    assert shared_directory(environment("none"), 0) is None


@pytest.mark.parametrize("free", [0, 2 * RANK_BYTES - 2])
def test_little_shared_memory_is_left_alone(monkeypatch, caplog, free):
    monkeypatch.setattr(
        shared_memory.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=free),
    )
    caplog.set_level("INFO")
    assert shared_directory(environment("small"), RANK_BYTES) is None
    assert "each rank caches for itself" in caplog.text


@pytest.mark.parametrize("how", ["open to others", "a link"])
def test_a_folder_of_others_is_not_used(monkeypatch, caplog, tmp_path, how):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    caplog.set_level("INFO")
    joined, _ = shared_directory(environment("mine"), RANK_BYTES)
    assert joined.parent == tmp_path
    name = "z" * 16
    other = joined.with_name(f"hapi-{os.geteuid()}-{name}-2")
    monkeypatch.setattr(
        shared_memory.hashlib,
        "sha256",
        lambda _: SimpleNamespace(hexdigest=lambda: name),
    )
    if how == "a link":
        other.symlink_to(joined)
    else:
        other.mkdir()
        (other / "thesis").touch()
        other.chmod(0o777)
    assert shared_directory(environment("other"), RANK_BYTES) is None
    assert ("is a link" if how == "a link" else "other users") in caplog.text
    os.close(shared_memory._join(joined))
    shared_memory._join.cache_clear()
    until(lambda: not watchers(joined))


def test_directory_ends_with_the_last_rank(rank):
    first, folder = rank()
    second, same = rank()
    assert same == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "features").write_bytes(b"x")
    first.send_signal(signal.SIGKILL)
    first.wait()
    third, same = rank()
    assert same == folder
    assert (folder / "features").exists()
    for each in (second, third):
        each.send_signal(signal.SIGKILL)
        each.wait()
    until(lambda: not folder.exists())
    until(lambda: not watchers(folder))


def test_a_later_run_removes_what_was_left(rank):
    process, folder = rank()
    until(lambda: watchers(folder))
    for watcher in watchers(folder):
        os.kill(watcher, signal.SIGKILL)
    until(lambda: not watchers(folder))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert folder.exists()
    _, other = rank("of another run")
    assert other != folder
    assert not folder.exists()


def test_a_run_that_begins_while_another_ends_has_its_own(rank):
    """Whichever comes first: the lock, or the removal."""
    for _ in range(5):
        process, folder = rank()
        (folder / "features").write_bytes(b"x")
        process.kill()
        _, same = rank()
        assert same == folder
        assert folder.exists()
