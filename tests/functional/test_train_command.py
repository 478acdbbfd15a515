"""``hapi train`` resumes after an interrupt and ends in the same model."""

import json
import signal
import subprocess

import pytest
import torch
import torchvision

from as_user import environment_of
from children import enable_interrupts, run_family
from device_queues import start_queue
from hapi_client.reports.run_report import read_reports
from hapi_client.swift.swift_url import Location
from hapi_training.device_queue import status_of
from jobs import upload_shards
from photos import shards_of
from preloaded import python
from waiting import SECONDS

PLACE = Location("commands", "train")
EPOCHS = 2


@pytest.fixture(scope="module")
def data(connection):
    return str(upload_shards(connection, PLACE, shards_of([8] * 4, size=120)))


def command(data, *more):
    return [
        *(python(), "-m", "hapi_client.cli.main", "train"),
        *("--data", data, "--classes", "4", "--model", "resnet18"),
        *("--batch-size", "4", "--epochs", str(EPOCHS), "--cut", "stream"),
        *("--save", "model.pt", "--json", "run.json"),
        *("--report", "report.json", *more),
    ]


def test_resumed_run_ends_in_the_same_model(cluster, data, tmp_path):
    folder, whole = tmp_path / "parts", tmp_path / "whole"
    environment = environment_of(cluster)

    def run(place, *more):
        done = run_family(
            command(data, *more),
            SECONDS,
            environment=environment,
            folder=place,
        )
        assert done.returncode == 0, done.stderr

    for place in (folder, whole):
        place.mkdir()
    run(whole)
    with subprocess.Popen(
        command(data, "--resume", "run.pt"),
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enable_interrupts,
    ) as first:
        try:
            for line in first.stderr:
                if "epoch 0:" in line:
                    break
            first.send_signal(signal.SIGINT)
            _, errors = first.communicate(timeout=SECONDS)
        finally:
            first.kill()
    assert first.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted; the same command goes on from run.pt" in errors
    assert not (folder / "model.pt").exists()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["report.json", "run.pt"]
    reports = read_reports(folder / "report.json").reports
    assert reports[0].is_finished
    run(folder, "--resume", "run.pt")

    runs = [
        json.loads((each / "run.json").read_text()) for each in (whole, folder)
    ]
    assert len(runs[1]["losses"]) == len(runs[0]["losses"]) == EPOCHS * 8
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=1e-3)
    assert runs[1]["stats"]["samples"] < EPOCHS * 32
    reports += read_reports(folder / "report.json").reports
    assert sum(each.samples for each in reports) == EPOCHS * 32
    models = [
        torch.load(each / "model.pt", weights_only=True)
        for each in (whole, folder)
    ]
    torchvision.models.resnet18(num_classes=4).load_state_dict(models[1])
    for name, weight in models[0].items():
        torch.testing.assert_close(
            models[1][name], weight, rtol=1e-3, atol=1e-5
        )


def test_ranks_of_torchrun_train_one_model(cluster, data, tmp_path):
    """Each trained a model of its own before, without a word."""
    environment = {**environment_of(cluster), "OMP_NUM_THREADS": "1"}

    def run(name, num_ranks, *more):
        folder = tmp_path / name
        folder.mkdir()
        partial = ("--freeze", "layer3", "--partial-backward", "2")
        python, module, *rest = command(
            data, "--batch-size", "8", *partial, *more
        )
        torchrun = (
            *("-m", "torch.distributed.run", "--standalone"),
            f"--nproc-per-node={num_ranks}",
        )
        launched = (
            [python, module, *rest]
            if num_ranks == 1
            else [python, *torchrun, module, *rest]
        )
        done = run_family(
            launched, SECONDS, environment=environment, folder=folder
        )
        assert done.returncode == 0, done.stderr
        # One rank prints.
        assert done.stdout.count("accuracy") == 1
        assert done.stderr.count("epoch 0: ") <= 1
        model = torch.load(folder / "model.pt")
        facts = json.loads((folder / "run.json").read_text())
        assert [e["samples"] for e in facts["epochs"]] == [32] * len(
            facts["epochs"]
        )
        return model, facts

    alone, facts = run("one", 1)
    assert facts["checkpoints"] is None
    place = ("--remote", "swift://commands-runs/ranks", "--save-steps", "1")
    _, begun = run("two", 2, *place, "--resume", "run", "--epochs", "1")
    costs = begun["checkpoints"]
    assert costs["saved"] == costs["uploaded"] + costs["dropped"] == 4
    names = sorted(path.name for path in (tmp_path / "two/run").iterdir())
    assert names == ["run.json", *(f"step-{n:012}.pt" for n in (3, 4))]
    # Elsewhere, from Swift, with another number of workers.
    path = tmp_path / "device"
    with start_queue(environment, path) as queue:
        model, more = run("three", 1, *place, "--device-queue", str(path))
        (ended,) = status_of(path)["ended"]
        queue.terminate()
    assert (ended["turns"], ended["reason"]) == (4 * 8, "ended")
    assert more["losses"] == facts["losses"]
    assert more["losses"][:4] == begun["losses"]
    assert more["stats"]["samples"] == 32
    for name, weight in alone.items():
        assert torch.equal(weight, model[name])
