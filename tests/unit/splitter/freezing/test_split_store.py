"""The folder of cached splits: safety, damage, size and processes."""

import os
import random
import signal
import stat
import subprocess
import sys

import pytest

from full_disk import no_file_beyond
from hapi_splitter.freezing.split_store import DiskStore, disk_store
from hapi_splitter.private_folder import MARK
from waiting import until

KEY = "k" * 8
PIECES = [b"ab", b"c"]


@pytest.fixture
def store(tmp_path):
    return DiskStore(tmp_path / "hapi")


def test_entries_are_private_files_that_can_be_listed_and_purged(store):
    assert store.read(KEY) is None
    assert store.entries() == []
    store.write(KEY, PIECES)
    assert store.read(KEY) == b"abc"
    for folder in (store.path, store.path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (entry,) = store.entries()
    assert (entry.key, entry.length_bytes) == (KEY, 3)
    assert stat.S_IMODE((store.path / f"{KEY}.split").stat().st_mode) == 0o600
    assert store.purge() == (1, 0)
    assert [p.name for p in store.path.iterdir()] == [MARK]


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HAPI_CACHE_DIR": "/c"}, "/c/splits-3"),
        ({"HAPI_CACHE_DIR": ""}, None),
        ({"XDG_CACHE_HOME": "/x"}, "/x/hapi/splits-3"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/hapi/splits-3"),
        ({"HOME": "/h"}, "/h/.cache/hapi/splits-3"),
    ],
)
def test_folder_is_that_of_the_environment(monkeypatch, environ, folder):
    for name in ("HAPI_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = disk_store()
    assert (found and str(found.path)) == folder
    assert str(disk_store("/given").path) == "/given/splits-3"
    assert disk_store("") is None


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_folder_that_others_may_write_to_is_refused(store, mode):
    store.write(KEY, PIECES)
    store.path.chmod(mode)
    for use in (store.read, store.remove):
        with pytest.raises(PermissionError, match="other users may write"):
            use(KEY)
    with pytest.raises(PermissionError, match="other users may write"):
        store.write(KEY, PIECES)


def test_folder_of_another_user_is_refused(store, monkeypatch):
    store.write(KEY, PIECES)
    # The folder that the user names may belong to anyone if it is sticky.
    store.path.parent.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        store.read(KEY)


def test_link_is_not_followed(store, tmp_path):
    store.write(KEY, PIECES)
    (tmp_path / "other").write_bytes(b"other")
    path = store.path / f"{KEY}.split"
    path.unlink()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        store.read(KEY)


def test_full_disk_leaves_no_file(store):
    store.write(KEY, PIECES)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with (
            no_file_beyond(1 << 16),
            pytest.raises(OSError, match="too large"),
        ):
            store.write("other", [bytes(1 << 20)])
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert {p.name for p in store.path.iterdir()} == {f"{KEY}.split", MARK}


def test_least_recently_used_entries_go_first(store, tmp_path):
    small = DiskStore(store.path, max_bytes=30)
    for number in range(3):
        small.write(f"k{number}", [bytes(10)])
        os.utime(small.path / f"k{number}.split", (number, number))
    assert small.read("k0") is not None  # now the last used
    small.write("k3", [bytes(10)])
    assert {each.key for each in small.entries()} == {"k0", "k2", "k3"}
    small.write("large", [bytes(31)])
    assert {each.key for each in small.entries()} == {"k0", "k2", "k3"}


def test_parts_of_killed_processes_are_removed_later(store):
    store.write(KEY, PIECES)
    old, recent = (store.path / f"{n}.part" for n in ("old", "recent"))
    for part in (old, recent):
        part.write_bytes(b"a")
    os.utime(old, (0, 0))
    store.write(KEY, PIECES)
    assert not old.exists()
    assert recent.exists()


WRITER = """
import sys
from pathlib import Path
from hapi_splitter.freezing.split_store import DiskStore
store, byte = DiskStore(Path(sys.argv[1])), sys.argv[2].encode()
number = 0
while True:
    store.write("shared", [byte * 1000] * 100)
    store.write(f"{sys.argv[2]}{number % 50}", [byte * 1000] * 100)
    number += 1
"""


@pytest.mark.parametrize("seed", range(4))
def test_entries_are_whole_when_writers_are_killed(store, seed):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store.path.parent), name],
            env=environ,
        )
        for name in "ab"
    ]
    try:
        wanted = random.Random(seed).randint(2, 60)
        until(lambda: len(store.entries()) >= wanted)
        for _ in range(20):
            assert store.read("shared") in (b"a" * 100_000, b"b" * 100_000)
    finally:
        for each in writers:
            each.send_signal(signal.SIGKILL)
            each.wait()
    for entry in store.entries():
        data = store.read(entry.key)
        assert len(data) == 100_000
        assert len(set(data)) == 1
