"""Training that is interrupted equals training that is not."""

from __future__ import annotations

import json
import signal
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from children import interruptible
from hapi_client import ReadConfig
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError
from hapi_splitter.inputs.augmentation import Augmentation
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_training import loop
from hapi_training.checkpoints.manager import CheckpointManager
from hapi_training.loop import CheckpointPlaces, train_tail
from hapi_training.recipe import Recipe
from jobs import small_job, upload_shards
from networks import small_network, small_transform
from photos import shard, tar_of

NUM_SAMPLES = 40
BATCH_SIZE = 8
EPOCHS = 3
QUICK = ReadConfig(num_threads=2)


@pytest.fixture(scope="module")
def data(connection):
    place = Location("resumed", "train")
    shards = {"0.tar": shard(25, size=80), "1.tar": shard(15, size=80, seed=1)}
    return str(upload_shards(connection, place, shards))


def network(seed=0):
    """A network with dropout in the tail, or frozen if cut at ``drop``."""
    made = nn.Sequential()
    small = small_network(seed=seed)
    made.add_module("body", small.body)
    made.add_module("pool", small.pool)
    made.add_module("flat", nn.Flatten())
    made.add_module("drop", nn.Dropout(0.5))
    made.add_module("head", small.head)
    return made


def job_of(connection, data, seed=0, **options):
    base = {"cut": "stream", "batch_size": BATCH_SIZE, "read": QUICK}
    return small_job(
        data,
        network=network(seed),
        connection=connection,
        **{**base, **options},
    )


class Run:
    """One training run, possibly in several parts."""

    def __init__(self, connection, data, checkpoint):
        self._connection = connection
        self._data = data
        self._checkpoint = checkpoint
        self.finished: list[int] = []
        self.weights: dict[str, torch.Tensor] = {}

    def go(self, stop=None):
        """Trains from the checkpoint on; interrupted after ``stop``."""

        def on_samples(epoch, samples):
            if (epoch, samples) == stop:
                signal.raise_signal(signal.SIGINT)

        with interruptible(), job_of(self._connection, self._data) as job:
            # A resumed run must not depend on the new process's seed.
            torch.manual_seed(len(self.finished) if self._checkpoint else 0)
            history = train_tail(
                job,
                epochs=EPOCHS,
                recipe=Recipe(0.05),
                on_epoch=lambda number, result: self.finished.append(number),
                on_samples=on_samples,
                checkpoints=self._checkpoint,
            )
            self.weights = job.tail.state_dict()
        return history


@pytest.fixture(scope="module")
def uninterrupted(connection, data):
    run = Run(connection, data, None)
    return run, run.go()


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param((1, BATCH_SIZE), id="first step"),
        pytest.param((0, 3 * BATCH_SIZE), id="inside"),
        pytest.param((0, NUM_SAMPLES), id="last step"),
        pytest.param((EPOCHS - 1, NUM_SAMPLES), id="very last step"),
    ],
)
def test_resumed_run_equals_an_uninterrupted_one(
    connection, data, uninterrupted, tmp_path, stop
):
    run = Run(connection, data, CheckpointPlaces(tmp_path / "run.pt"))
    with pytest.raises(KeyboardInterrupt):
        run.go(stop)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    history = run.go()

    other, expected = uninterrupted
    assert run.finished == list(range(EPOCHS))
    assert [each.num_samples for each in history.epochs] == [
        NUM_SAMPLES
    ] * EPOCHS
    assert [len(each.losses) for each in history.epochs] == [5] * EPOCHS
    assert history.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, weight in other.weights.items():
        torch.testing.assert_close(run.weights[name], weight)


@pytest.mark.parametrize("clock", ["goes on", "is set back"])
def test_every_save_has_the_results_of_its_finished_epochs(
    connection, data, tmp_path, monkeypatch, clock
):
    path, saves = tmp_path / "run.pt", []
    if clock == "goes on":
        monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    else:
        monkeypatch.setattr(time, "time", count(time.time(), -1).__next__)

    def save(manager, real=CheckpointManager.save):
        real(manager)
        manager.wait()
        saves.append(torch.load(path, weights_only=True)["state"])

    monkeypatch.setattr(CheckpointManager, "save", save)
    Run(connection, data, CheckpointPlaces(path)).go()
    assert len(saves) == EPOCHS * NUM_SAMPLES // BATCH_SIZE
    for saved in saves:
        results, position = saved["results"], saved["data"]
        assert len(results["epochs"]) == position["epoch"]
        trained = position["step"] * BATCH_SIZE
        assert results["begun"]["num_samples"] == trained
        steps = sum(len(epoch["losses"]) for epoch in results["epochs"])
        assert steps == 5 * position["epoch"]


@pytest.fixture(scope="module")
def begun(connection, data, tmp_path_factory):
    """A checkpoint after the first epoch."""
    path = tmp_path_factory.mktemp("begun") / "run.pt"
    with job_of(connection, data) as job:
        train_tail(
            job,
            epochs=1,
            recipe=Recipe(0.01),
            checkpoints=CheckpointPlaces(path),
        )
    return path


def resume(job, path, epochs=2):
    return train_tail(
        job,
        epochs=epochs,
        recipe=Recipe(0.01),
        checkpoints=CheckpointPlaces(path),
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1}, "frozen layers have different weights .* --seed"),
        ({"freeze": "drop"}, "freeze is 'body', this run's 'drop'"),
        ({"augment": Augmentation()}, "augmentation is None, this run's {"),
        (
            {"augment": Augmentation(), "augment_period_epochs": 2},
            "augmentation is None.*; its augment_epochs is None, .* 2;",
        ),
        (
            {"transform": ImageTransform(72, 64, mean=(0.0, 0.0, 0.0))},
            r"transform is .*0\.485.*, this run's ",
        ),
        ({"batch_size": 4}, "batch_size is 8, this job's is 4"),
    ],
)
def test_checkpoint_of_other_features_is_refused(
    connection, data, begun, options, words
):
    content = begun.read_bytes()
    with job_of(connection, data, **options) as job:
        before = {
            name: value.clone()
            for name, value in job.tail.state_dict().items()
        }
        with pytest.raises(ClientError, match=words) as caught:
            resume(job, begun)
        assert caught.value.code == "bad_state"
        for name, value in job.tail.state_dict().items():
            assert torch.equal(value, before[name])
    assert begun.read_bytes() == content


def test_cut_and_encoding_may_change(connection, data, begun, tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(begun.read_bytes())
    with job_of(connection, data, cut=1, encoding="float16") as job:
        history = resume(job, path)
        assert job.stats.samples == NUM_SAMPLES
    assert len(history.epochs) == 2


def test_incomplete_checkpoint_is_refused(connection, data, begun, tmp_path):
    saved = torch.load(begun, weights_only=True)
    with job_of(connection, data) as job:
        for name in saved:
            path = tmp_path / f"{name}.pt"
            torch.save({n: v for n, v in saved.items() if n != name}, path)
            with pytest.raises(ClientError, match=f"KeyError: '{name}'"):
                resume(job, path)
        path = tmp_path / "run.pt"
        state = saved["state"]
        results = {**state["results"], "epochs": []}
        other = {**saved, "state": {**state, "results": results}}
        torch.save(other, path)
        with pytest.raises(ClientError, match=r"of 0 epochs, .* in epoch 1"):
            resume(job, path)
        path.write_bytes(b"none at all")
        with pytest.raises(ClientError, match="no checkpoint can be loaded"):
            resume(job, path)
    assert path.read_bytes() == b"none at all"


def test_epoch_without_any_sample_is_an_error(connection, tmp_path):
    bad = [
        member
        for number in range(5)
        for member in ((f"{number}.jpg", b"none"), (f"{number}.cls", b"0"))
    ]
    place = Location("resumed", "undecodable")
    upload_shards(connection, place, {"a.tar": tar_of(bad)})
    path = tmp_path / "run.pt"
    with job_of(connection, str(place), on_error="skip") as job:
        with pytest.raises(ClientError, match="none of the 5 samples") as it:
            resume(job, path)
        assert it.value.code == "bad_sample"
    assert not path.exists()


@pytest.fixture
def hapi_train(hapi, data, tmp_path, monkeypatch, capsys):
    """Runs the command; returns its JSON and its output."""
    monkeypatch.setattr(
        "hapi_client.model.registry.ModelSource.build_with_transform",
        lambda _, classes, seed: (network(seed), small_transform()),
    )

    def run(*more):
        status = hapi(
            *("train", "--data", data, "--classes", "4"),
            *("--freeze", "body", "--batch-size", BATCH_SIZE),
            *("--resume", "run.pt", "--save", "model.pt"),
            *("--json", "run.json", *more),
        )
        printed = capsys.readouterr()
        assert status == 0, printed.err
        facts = json.loads((tmp_path / "run.json").read_text())
        return facts, printed.err + printed.out

    return run


def test_finished_run_continues_with_more_epochs(hapi_train, tmp_path):
    first, output = hapi_train("--epochs", "2")
    assert "trained already" not in output
    assert "resuming" not in output
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    for name in ("model.pt", "run.json"):
        (tmp_path / name).unlink()

    for epochs in ("2", "1"):
        again, output = hapi_train("--epochs", epochs)
        assert "all 2 epochs are trained already" in output
        assert f"{first['epochs'][1]['loss']:.4f}" in output
        assert "read raw" not in output
        assert "no plan" not in output
        assert again["epochs"] == first["epochs"]
        assert again["losses"] == first["losses"]
        assert again["stats"]["samples"] == 0
        model_again = torch.load(tmp_path / "model.pt", weights_only=True)
        for name, weight in model.items():
            assert torch.equal(model_again[name], weight)

    more, output = hapi_train("--epochs", "3")
    assert "resuming in epoch 2 after 0 of its samples" in output
    assert more["epochs"][:2] == first["epochs"]
    assert len(more["losses"]) == 15
    assert more["stats"]["samples"] == NUM_SAMPLES
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("model.pt", "run.json", "run.pt")
    ]


def test_space_for_the_checkpoint_is_checked_before_training(
    hapi_train, monkeypatch
):
    """It has the tail's weights, and as much for the momentum."""
    checked = []
    monkeypatch.setattr(
        "hapi_client.cli.train_run.check_writable",
        lambda *arguments: checked.append(arguments),
    )
    hapi_train("--epochs", "1")
    head = network(0).head
    num_bytes = sum(4 * each.numel() for each in head.parameters())
    assert (Path("run.pt"), 2 * num_bytes) in checked
