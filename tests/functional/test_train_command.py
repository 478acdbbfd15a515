"""``hapi train`` resumes after an interrupt and ends in the same model."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import torchvision

from children import enable_interrupts, family
from hapi_client.data.upload import upload
from hapi_client.progress import SilentReporter
from hapi_client.reports.run_report import read_reports
from hapi_client.swift.swift_url import Location
from photos import shard

PLACE = Location("commands", "train")
EPOCHS = 3
SECONDS = 120

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def data(connection, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for number in range(4):
        tar = shard(20, size=120, seed=number)
        (folder / f"{number}.tar").write_bytes(tar)
    upload(connection, PLACE, [folder], SilentReporter())
    return str(PLACE)


def start(cluster, data, folder, *more):
    folder.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "hapi_client.cli.main", "train"),
        *("--data", data, "--classes", "4", "--model", "resnet18"),
        *("--batch-size", "8", "--epochs", str(EPOCHS), "--cut", "stream"),
        *("--save", "model.pt", "--json", "run.json"),
        *("--report", "report.json", *more),
    ]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={
            **os.environ,
            **cluster.environment,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enable_interrupts,
    )


def finish(child):
    """Waits for its end and returns its errors; kills it after a timeout."""
    try:
        _, errors = child.communicate(timeout=SECONDS)
    except BaseException:
        for process in family(child.pid):
            process.send(signal.SIGKILL)
        raise
    return errors


def test_resumed_run_ends_in_the_same_model(cluster, data, tmp_path):
    whole = start(cluster, data, tmp_path / "whole")
    errors = finish(whole)
    assert whole.returncode == 0, errors

    folder = tmp_path / "parts"
    first = start(cluster, data, folder, "--resume", "run.pt")
    for line in first.stderr:
        if "epoch 0:" in line:
            break
    first.send_signal(signal.SIGINT)
    errors = finish(first)
    assert first.returncode == 130, errors
    assert "Traceback" not in errors
    assert not (folder / "model.pt").exists()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["report.json", "run.pt"]
    reports = read_reports(folder / "report.json").reports
    assert reports[0].is_finished

    again = start(cluster, data, folder, "--resume", "run.pt")
    errors = finish(again)
    assert again.returncode == 0, errors

    runs = [
        json.loads((each / "run.json").read_text())
        for each in (tmp_path / "whole", folder)
    ]
    assert len(runs[1]["losses"]) == len(runs[0]["losses"]) == EPOCHS * 10
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=1e-3)
    assert runs[1]["stats"]["samples"] < EPOCHS * 80
    reports += read_reports(folder / "report.json").reports
    assert sum(each.samples for each in reports) == EPOCHS * 80
    models = [
        torch.load(each / "model.pt", weights_only=True)
        for each in (tmp_path / "whole", folder)
    ]
    torchvision.models.resnet18(num_classes=4).load_state_dict(models[1])
    for name, weight in models[0].items():
        torch.testing.assert_close(
            models[1][name], weight, rtol=1e-3, atol=1e-5
        )


def test_file_that_is_no_checkpoint_is_refused(cluster, data, tmp_path):
    (tmp_path / "run.pt").write_bytes(b"no checkpoint")
    child = start(cluster, data, tmp_path, "--resume", "run.pt")
    errors = finish(child)
    assert child.returncode == 1
    assert "run.pt is not a checkpoint of version 1" in errors
    assert (tmp_path / "run.pt").read_bytes() == b"no checkpoint"


def test_missing_folder_is_named_at_once(cluster, data, tmp_path):
    child = start(cluster, data, tmp_path, "--resume", "nowhere/run.pt")
    errors = finish(child)
    assert child.returncode == 1
    assert "nowhere is not a folder" in errors
