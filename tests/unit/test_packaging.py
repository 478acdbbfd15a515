"""The sdist has what operators install with."""

import subprocess
import sys

from documentation import ROOT


def test_sdist_has_all_files_of_deploy(tmp_path):
    listed = subprocess.run(
        ["git", "ls-files", "deploy"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "deploy/hapi-worker.service" in listed
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)],
        cwd=ROOT,
        check=True,
    )
    [sources] = tmp_path.glob("*/SOURCES.txt")
    assert set(listed) <= set(sources.read_text().split())
