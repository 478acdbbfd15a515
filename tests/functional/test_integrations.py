"""Lightning, accelerate and torch.compile train as torch alone does."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import lightning
import pytest
import torch
from torch import nn

from as_user import environment_of
from children import run_family
from equal_training import (
    DATA,
    EPOCHS,
    FrozenBody,
    job_of,
    local_batches,
    local_spans,
    losses_of,
    optimizer_of,
)
from hapi_client.cli.demo.run import largest_difference
from hapi_client.swift.swift_url import parse_location
from jobs import upload_shards
from photos import shards_of
from preloaded import python

COUNTS = (20, 16, 24, 12, 18, 22)
TOLERANCE = 1e-4
STEPS_PER_EPOCH = 7
SUPPORT = Path(__file__).parent.parent / "support"


@pytest.fixture(scope="module")
def local(connection, tmp_path_factory):
    """Losses on local data, with torch and nothing else but the order."""
    folder = tmp_path_factory.mktemp("shards")
    shards = shards_of(COUNTS, size=120)
    for place in DATA.values():
        upload_shards(connection, parse_location(place), shards, folder)
    spans = local_spans(sorted(folder.glob("*.tar")))
    return losses_of(FrozenBody(), partial(local_batches, spans))


class Tail(lightning.LightningModule):
    def __init__(self, tail):
        super().__init__()
        self.tail = tail
        self.losses: list[float] = []

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.set_epoch(self.current_epoch)

    def training_step(self, batch, number):
        features, labels = batch
        loss = nn.functional.cross_entropy(self.tail(features), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return optimizer_of(self.tail)


class Left(Exception):
    """Training ends here."""


class LeaveAt(lightning.Callback):
    """Writes a checkpoint behind a step, and ends."""

    def __init__(self, step, path):
        self._step = step
        self._path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)
            raise Left


class TailWithoutHook(Tail):
    """Leaves the choice of the epoch to Lightning."""

    on_train_epoch_start = lightning.LightningModule.on_train_epoch_start


class TailWithValidation(Tail):
    """Has every step, and counts the samples."""

    def __init__(self, tail):
        super().__init__(tail)
        self.num_validated = self.num_tested = 0

    def validation_step(self, batch, number):
        if not self.trainer.sanity_checking:
            self.num_validated += len(batch[1])

    def test_step(self, batch, number):
        self.num_tested += len(batch[1])

    def predict_step(self, batch, number):
        return self.tail(batch[0])


def trainer_of(folder, *callbacks, **options):
    return lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def fit(
    tail,
    loader,
    folder,
    *callbacks,
    checkpoint=None,
    validation=None,
    **options,
):
    with contextlib.suppress(Left):
        trainer_of(folder, *callbacks, **options).fit(
            tail, loader, validation, ckpt_path=checkpoint
        )
    return tail.losses


def test_lightning_trains_as_the_local_run(connection, local, tmp_path):
    with job_of(connection, "freeze") as job:
        data = job.dataset()
        losses = fit(Tail(job.tail), data, tmp_path)
        state = data.state_dict()
        assert (state["epoch"], state["step"]) == (EPOCHS, 0)
    assert len(losses) == len(local)
    assert largest_difference(local, losses) <= TOLERANCE


def test_lightning_sets_the_epoch_of_a_train_loader(
    connection, local, tmp_path
):
    with job_of(connection, "stream") as job:
        losses = fit(TailWithoutHook(job.tail), job.train_loader, tmp_path)
    assert len(losses) == len(local)
    assert largest_difference(local, losses) <= TOLERANCE


def test_lightning_validates_with_its_sanity_check(
    connection, local, tmp_path
):
    with job_of(connection, "stream") as job:
        tail = TailWithValidation(job.tail)
        losses = fit(
            tail, job.train_loader, tmp_path, validation=job.val_loader
        )
    assert tail.num_validated == EPOCHS * sum(COUNTS)
    assert largest_difference(local, losses) <= TOLERANCE


def test_loader_of_one_epoch_names_those_for_lightning(
    connection, local, tmp_path
):
    with (
        job_of(connection, "stream") as job,
        pytest.raises(RuntimeError, match=r"job\.val_loader"),
    ):
        fit(
            TailWithValidation(job.tail),
            job.train_loader,
            tmp_path,
            validation=job.pipeline.loader(split="val"),
        )


@pytest.mark.parametrize("step", [1, STEPS_PER_EPOCH + 3, 2 * STEPS_PER_EPOCH])
def test_lightning_resumes_within_an_epoch(connection, local, tmp_path, step):
    path = tmp_path / "mid.ckpt"
    with job_of(connection, "stream") as job:
        data = job.dataset()
        losses = fit(Tail(job.tail), data, tmp_path, LeaveAt(step, path))
    assert len(losses) == step
    with job_of(connection, "freeze") as job:
        data = job.dataset()
        losses += fit(Tail(job.tail), data, tmp_path, checkpoint=path)
    assert len(losses) == len(local)
    assert largest_difference(local, losses) <= TOLERANCE


@pytest.mark.parametrize("interval", [3, 0.5])
def test_lightning_validates_within_an_epoch_and_resumes(
    connection, local, tmp_path, interval
):
    path, step = tmp_path / "mid.ckpt", STEPS_PER_EPOCH + 4
    options = {"val_check_interval": interval}
    with job_of(connection, "stream") as job:
        tail = TailWithValidation(job.tail)
        validation = job.dataset("val")
        leaving = LeaveAt(step, path)
        losses = fit(
            tail,
            job.dataset(),
            tmp_path,
            leaving,
            validation=validation,
            **options,
        )
        num_validated = tail.num_validated
    with job_of(connection, "freeze") as job:
        tail = TailWithValidation(job.tail)
        losses += fit(
            tail,
            job.dataset(),
            tmp_path,
            checkpoint=path,
            validation=job.val_loader,
            **options,
        )
        num_validated += tail.num_validated
    assert largest_difference(local, losses) <= TOLERANCE
    # Twice in each epoch of seven steps.
    assert num_validated == EPOCHS * 2 * sum(COUNTS)


def test_lightning_tests_and_predicts(connection, local, tmp_path):
    with job_of(connection, "stream") as job:
        tail = TailWithValidation(job.tail)
        trainer = trainer_of(tmp_path)
        for data in (job.dataset("val"), job.val_loader):
            trainer.validate(tail, data)
            trainer.test(tail, data)
            predicted = torch.cat(trainer.predict(tail, data))
            features = torch.cat([features for features, _ in data])
            with torch.no_grad():
                expected = job.tail.eval()(features)
            torch.testing.assert_close(predicted, expected)
        assert tail.num_validated == tail.num_tested == 2 * sum(COUNTS)


def test_accelerate_trains_on_two_ranks_as_the_local_run(
    cluster, connection, local, tmp_path
):
    done = run_family(
        [
            *(python(), "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node=2"),
            *(str(SUPPORT / "accelerate_trainer.py"), str(tmp_path / "r.pt")),
        ],
        150,
        environment={
            **environment_of(cluster),
            "ACCELERATE_USE_CPU": "true",
        },
    )
    assert done.returncode == 0, done.stderr
    losses, seen = torch.load(tmp_path / "r.pt")
    assert len(losses) == len(local)
    assert largest_difference(local, losses) <= TOLERANCE

    with job_of(connection, "stream") as job:
        labels = torch.cat([labels for _, labels in job.pipeline.loader()])
    for seen_labels in seen:
        assert sorted(seen_labels) == sorted(labels.tolist())


def test_compiled_tail_trains_as_the_local_run(connection, local):
    with job_of(connection, "freeze") as job:
        # Traced as by default; the code of one layer is torch's matter.
        tail = torch.compile(job.tail, backend="aot_eager")
        losses = losses_of(tail, job.pipeline.loader)
    assert largest_difference(local, losses) <= TOLERANCE
