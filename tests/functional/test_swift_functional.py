"""Comparing a Swift with the filter and one without: with small tests."""

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from children import family
from waiting import SECONDS, until

pytest.importorskip("swift", reason="needs swift-hapi[cluster]")

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = ("deploy", "protocol", "swift_middleware")
SIDES = ("without", "with")

BASE = """
import json, os, time, unittest
from configparser import ConfigParser
from urllib.request import urlopen

def info():
    parser = ConfigParser()
    parser.read(os.environ["SWIFT_TEST_CONFIG_FILE"])
    with urlopen(parser["func_test"]["s3_storage_url"] + "info") as answer:
        return json.load(answer)
"""
TEST_SWIFT = """
from test.functional import info, os, unittest

class TestInfo(unittest.TestCase):
    def test_same(self):
        self.assertIn("staticweb", info())

    def test_other(self):
        self.assertNotIn("hapi", info())

    def test_first_time(self):
        path = os.environ["SWIFT_TEST_CONFIG_FILE"] + ".seen"
        if "hapi" in info() and not os.path.exists(path):
            open(path, "w").close()
            self.fail("only once")

"""
TEST_HANGS = """
import os, time

def test_hangs():
    open(os.environ["SWIFT_TEST_CONFIG_FILE"] + ".hangs", "w").close()
    time.sleep(600)
"""


@pytest.fixture
def cache(tmp_path):
    """A cache with small tests in the place of Swift's."""
    folder = tmp_path / "cache" / f"swift-{version('swift')}"
    (folder / "test" / "functional").mkdir(parents=True)
    (folder / "test" / "__init__.py").touch()
    (folder / "test" / "functional" / "__init__.py").write_text(BASE)
    (folder / "test" / "functional" / "test_info.py").write_text(TEST_SWIFT)
    return folder.parent


def start(cache, *more, **variables):
    words = ("--cache", cache, "--layout", "plain", "--suite", "swift", *more)
    folders = [TESTS, *(TESTS.parent / name for name in FOLDERS)]
    path = os.pathsep.join(map(str, folders))
    return subprocess.Popen(
        [sys.executable, "-m", "swift_functional", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_difference_and_failure_is_told(cache, tmp_path):
    json_path, logs = tmp_path / "r.json", tmp_path / "logs"
    with start(cache, "--json", json_path, "--logs", logs) as running:
        out, err = running.communicate(timeout=SECONDS)
    assert running.returncode == 1, err
    body = json.loads(json_path.read_text())
    assert body["swift"] == version("swift")
    assert not body["succeeded"]
    (swift,) = body["comparisons"]
    name = "test/functional/test_info.py::TestInfo::test_{}"
    assert swift["differing"] == [name.format("other")]
    assert swift["unsteady"] == [name.format("first_time")]
    assert swift["failing"] == []
    assert swift["counts"]["without"]["passed"] == 3
    assert swift["counts"]["with"]["failed"] == 2
    assert (
        "'hapi' unexpectedly found in"
        in (swift["again"][name.format("other")]["with"]["reason"])
    )
    assert f"plain, {name.format('other')} differs" in out.splitlines()
    for side in SIDES:
        for file in ("swift/junit.xml", "swift/pytest.log", "servers"):
            assert (logs / "plain" / side / file).exists(), file


def test_nothing_is_left_of_one_that_is_terminated(cache, tmp_path):
    (path,) = cache.rglob("test_info.py")
    path.write_text(TEST_HANGS)
    logs = tmp_path / "logs"
    with start(cache, "--logs", logs) as running:
        hangs = [logs / "plain" / s / "test.conf.hangs" for s in SIDES]
        until(lambda: all(path.exists() for path in hangs), SECONDS)
        processes = family(running.pid)
        folders = cluster_folders(processes)
        running.terminate()
        assert running.wait(SECONDS) == 128 + signal.SIGTERM
    assert len(folders) == 2
    assert [p for p in processes if p.alive()] == []
    assert [f for f in folders if f.exists()] == []


def cluster_folders(processes):
    """The directories of the clusters that are among the processes."""
    found = []
    for process in processes:
        path = Path(f"/proc/{process.pid}/cmdline")
        words = path.read_text().split("\0")
        if "hapi_cluster" in words:
            found.append(Path(words[words.index("hapi_cluster") + 1]))
    return found
