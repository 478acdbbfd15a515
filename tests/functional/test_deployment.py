"""systemd takes the units, and a container's health check finds its worker."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from documentation import ROOT

DEPLOY = ROOT / "deploy"
UNITS = sorted(path.name for path in DEPLOY.glob("hapi-*.s*[et]"))


def verify(folder, *changes):
    """Returns what systemd objects to, after changes to the units' text."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no systemd-analyze here")
    for name in UNITS:
        text = (DEPLOY / name).read_text()
        # The program is that of some other host.
        for old, new in (("/opt/hapi/bin/hapi-worker", "/bin/true"), *changes):
            text = text.replace(old, new)
        (folder / name).write_text(text)
    done = subprocess.run(
        [tool, "verify", *(str(folder / name) for name in UNITS)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"},
    )
    return done.stderr


def test_systemd_takes_the_units(tmp_path):
    assert len(UNITS) == 4
    assert verify(tmp_path) == ""


def test_systemd_would_name_a_mistake(tmp_path):
    assert "RemoveIPCs" in verify(tmp_path, ("RemoveIPC=", "RemoveIPCs="))


def test_health_check_of_the_container_asks_the_worker(cluster):
    path = DEPLOY / "containers" / "worker.Containerfile"
    text = path.read_text().replace("\\\n", "")
    words = json.loads(
        re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.M)[1]
    )
    assert words[:2] == ["/opt/hapi/bin/python", "-c"]
    for socket, healthy in (
        (f"{cluster.worker_socket}.admin", True),
        (cluster.worker_socket.with_name("none"), False),
    ):
        code = words[2].replace("/run/hapi/worker.sock.admin", str(socket))
        done = subprocess.run([sys.executable, "-c", code])
        assert (done.returncode == 0) == healthy
