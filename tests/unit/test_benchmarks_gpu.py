"""benchmarks/gpu.sh: what it would do, and what it needs."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from benchmarks.checkout_path import see, write_metadata

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
SECONDS = 110.0


def run(*options: str, data: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "HAPI_TEST_DATA": data},
    )


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of a dry run, with a wheel of one library that is not here."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "oci-2.1-py3-none-any.whl").touch()
    (folder / "photos.tar").touch()
    done = run(
        str(folder),
        *("--data", str(folder), "--out", str(folder / "out")),
        *("--python", sys.executable, "--dry-run"),
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "out").exists()
    return done.stdout.replace(str(folder), "WHEELS").splitlines()


def test_a_dry_run_tells_every_command_in_order(dry: list[str]) -> None:
    commands = [line[2:] for line in dry if line.startswith("+ ")]
    wanted = [
        r"\S+ -m venv --system-site-packages .*VENV",
        r".* benchmarks/checkout_path\.py .*site-packages",
        r".* -m pytest .*test_client_checkpoints\.py .*",
        r".* -m benchmarks run grid .* --worker-device cuda",
        r".* -m benchmarks report WHEELS/out/worker-on-gpu\.json .*",
        r".* -m benchmarks run grid .* --worker-device cuda"
        r" --client-device cuda",
        r".* -m benchmarks report WHEELS/out/both-on-gpu\.json .*",
        r".* -m benchmarks\.worker --device cuda .*",
    ]
    commands = [each for each in commands if "--find-links" not in each]
    assert len(commands) == len(wanted)
    for command, pattern in zip(commands, wanted, strict=True):
        assert re.fullmatch(pattern, command), command


def test_a_dry_run_tells_what_is_there(dry: list[str]) -> None:
    assert "there: photographs in WHEELS" in dry
    assert "there: torch and torchvision" in dry
    assert any("a CUDA device" in line for line in dry)


def test_nothing_comes_from_a_network(dry: list[str]) -> None:
    for line in dry:
        assert "pip install" not in line or "--no-index" in line
    assert "download" not in "".join(dry)


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A Python that has nothing, and fails or sleeps as a venv is made."""
    path = tmp_path / "stub"
    path.write_text(
        '#!/bin/sh\ncase "$*" in *"-m venv"*) exec $STUB_DOES ;; esac\n'
    )
    path.chmod(0o755)
    return path


def started(stub: Path, does: str) -> subprocess.Popen[str]:
    folder = str(stub.parent)
    return subprocess.Popen(
        [
            *(str(SCRIPT), folder, "--data", folder),
            *("--out", str(stub.parent / "out"), "--python", str(stub)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "STUB_DOES": does, "TMPDIR": folder},
    )


def test_a_step_that_fails_stops_no_other_and_is_told(stub: Path) -> None:
    process = started(stub, "false")
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    summary = (stub.parent / "out" / "summary.txt").read_text()
    assert summary in told
    steps = re.findall(r"^(\S+): FAILED with status \d+", summary, re.M)
    assert steps == [
        "venv",
        "checkout",
        "tests",
        "worker-on-gpu",
        "worker-on-gpu-page",
        "both-on-gpu",
        "both-on-gpu-page",
        "worker-alone",
    ]
    assert not list(stub.parent.glob("tmp.*"))  # its virtual environment


def test_told_to_end_it_ends_what_runs(stub: Path) -> None:
    process = started(stub, "sleep 600")
    assert process.stdout is not None
    while "-m venv" not in process.stdout.readline():
        pass
    process.terminate()
    # The pipe ends with the last one that has it.
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert not list(stub.parent.glob("tmp.*"))


def test_the_list_of_wheels_has_all_that_the_extras_need() -> None:
    done = run("--list-wheels")
    assert done.returncode == 0
    assert "pip download" in done.stdout
    assert "://" not in done.stdout  # names no host
    listed = {line for line in done.stdout.splitlines() if line}
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = {
        re.split(r"[>;\[= ]", line)[0].lower()
        for extra in ("middleware", "worker", "client")
        for line in config["options.extras_require"][extra].split("\n")
        if line
    }
    assert needed - listed == {"torch", "torchvision"}
    assert {"webdataset", "s3torchconnector", "mosaicml-streaming"} <= listed


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "give the folder of the wheels"),
        (("W",), "give --data, or set HAPI_TEST_DATA"),
        (("W", "--minutes", "soon"), "--minutes is soon; 1 or more"),
        (("W", "X"), "one folder of wheels, not also X"),
        (("W", "--fast"), "there is no option --fast"),
        (("W", "--data"), "--data needs a value"),
        (
            ("W", "--data", "D", "--python", "no-python"),
            "there is no Python; give it with --python",
        ),
    ],
)
def test_a_wrong_command_line_is_told(
    options: tuple[str, ...], told: str
) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert f"gpu.sh: {told}" in done.stderr
    assert "usage: " in done.stderr


def test_the_checkout_has_the_entry_points_of_an_installation(
    tmp_path: Path,
) -> None:
    made = write_metadata(tmp_path)
    found = PathDistribution(made)
    assert found.metadata["Name"] == "swift-hapi"
    points = {
        (each.group, each.name): each.value for each in found.entry_points
    }
    assert points["paste.filter_factory", "hapi"] == (
        "hapi_middleware.filter:filter_factory"
    )
    see(tmp_path, ["/a/site-packages", "/b"])
    assert (tmp_path / "beside.pth").read_text() == "/a/site-packages\n/b\n"
    assert points["console_scripts", "hapi-worker"] == "hapi_worker.main:main"
