"""The same losses, weights and accuracy, wherever the work is done.

The tail has no batch norm, so that the bound is that of rounding.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from as_user import environment_of
from children import run_family
from equal_training import (
    BATCH,
    DATA,
    EPOCHS,
    SEED,
    FrozenBody,
    job_of,
    local_batches,
    local_spans,
    losses_of,
    num_correct,
    optimizer_of,
    steps_of,
)
from hapi_client.caching.pool import POOL
from hapi_client.cli.demo.run import largest_difference
from hapi_client.data.upload import upload
from hapi_client.progress import SilentReporter
from hapi_client.swift.swift_url import parse_location
from hapi_splitter.planner.problem import RAW_ROUTE, Route
from jobs import upload_shards
from networks import small_network
from photos import shards_of
from preloaded import python
from waiting import SECONDS

SHARDS = {"train": (20, 16, 24, 12, 18, 22), "val": (20, 20)}
NUM_SAMPLES = sum(SHARDS["train"])
TOLERANCE = 1e-4
RANKS = Path(__file__).parent.parent / "support" / "rank_trainer.py"


class Run(NamedTuple):
    """Result of a training run."""

    losses: list
    weights: dict
    num_correct: int | None = None


@pytest.fixture(scope="module")
def folder(connection, tmp_path_factory):
    """With ``train/`` and ``val/``, as they were uploaded."""
    folder = tmp_path_factory.mktemp("equal")
    for split, counts in SHARDS.items():
        (folder / split).mkdir()
        seed = 10 * (split == "val")
        shards = shards_of(counts, size=120, seed=seed)
        place = parse_location(DATA[split])
        upload_shards(connection, place, shards, folder / split)
    return folder


@pytest.fixture(scope="module")
def local(folder):
    return trained_locally(
        *(sorted((folder / split).glob("*.tar")) for split in DATA)
    )


def trained_locally(train, val, network=None):
    """On local data, with torch and nothing else but the order."""
    model = FrozenBody(network)
    losses = losses_of(model, partial(local_batches, local_spans(train)))
    images, labels = zip(
        *(s for span in local_spans(val) for s in span), strict=True
    )
    correct = num_correct(model, [(torch.stack(images), torch.tensor(labels))])
    weights = {
        name.removeprefix("network."): weight.detach()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    return Run(losses, weights, correct)


def trained(job, saved=None, most=1000):
    """Trains up to ``most`` steps; puts where it stands into ``saved``."""
    optimizer = optimizer_of(job.tail)
    if saved:
        job.tail.load_state_dict(saved["tail"])
        optimizer.load_state_dict(saved["optimizer"])
        job.load_state_dict(saved["data"])
    losses = []
    for epoch in range(job.epoch, EPOCHS):
        if len(losses) == most:
            break
        for loss, _ in itertools.islice(
            steps_of(job.tail, optimizer, job.pipeline.loader(epoch)),
            most - len(losses),
        ):
            losses.append(loss)
    if saved is not None:
        saved["tail"] = job.tail.state_dict()
        saved["optimizer"] = optimizer.state_dict()
        saved["data"] = job.state_dict()
    correct = num_correct(job.tail, job.pipeline.loader(split="val"))
    weights = dict(job.tail.named_parameters())
    return Run(losses, weights, correct)


def assert_equal(actual, local):
    assert len(actual.losses) == len(local.losses)
    assert largest_difference(local.losses, actual.losses) <= TOLERANCE
    tail = {
        name.rpartition("head.")[2]: weight
        for name, weight in actual.weights.items()
    }
    for name, weight in local.weights.items():
        torch.testing.assert_close(
            tail[name.removeprefix("head.")],
            weight,
            rtol=TOLERANCE,
            atol=TOLERANCE * weight.abs().max().item(),
        )
    assert actual.num_correct in (None, local.num_correct)


def test_local_training_learns_something(local):
    """Else all that follows would be equal for no reason."""
    assert local.num_correct > 0.6 * sum(SHARDS["val"])
    assert local.losses[-1] < 0.85 * local.losses[0]


MIX = {
    RAW_ROUTE: 0.4,
    Route(2, "float32"): 0.3,
    Route(4, "float32;zstd"): 0.3,
}


@pytest.mark.parametrize("cut", ["stream", 1, 3, "freeze", "auto", "mix"])
def test_training_equals_the_local_one_at_every_cut(
    connection, folder, local, cut
):
    with job_of(connection, "freeze" if cut == "mix" else cut) as job:
        if cut == "mix":
            job.pipeline._factory.scheduler.change(MIX)
        actual = trained(job)
        by_cut = job.stats.samples_by_cut
        assert job.stats.fallbacks == 0
        assert sum(by_cut.values()) >= EPOCHS * NUM_SAMPLES
        assert cut != "mix" or {0, 2, 4} <= set(by_cut)
    assert_equal(actual, local)


def test_kept_features_train_as_the_local_run(connection, folder, local):
    for _ in range(2):
        with job_of(connection, "freeze", store="readwrite") as job:
            actual = trained(job)
            assert_equal(actual, local)
    # All but what may not have been stored yet when it was asked for again.
    assert job.stats.cached > EPOCHS * NUM_SAMPLES / 2


def test_run_in_pieces_trains_as_the_local_run(connection, folder, local):
    """Each piece another job, its cut and its plan."""
    dice = random.Random(2)
    saved = {}
    losses = []
    while len(losses) < len(local.losses):
        cut = dice.choice(["stream", 1, 3, "freeze"])
        with job_of(connection, cut) as job:
            piece = trained(job, saved=saved, most=dice.randint(1, 6))
        losses += piece.losses
    assert_equal(Run(losses, piece.weights, piece.num_correct), local)


@pytest.mark.parametrize("place", ["memory", "directory"])
def test_features_of_this_host_train_as_the_local_run(
    connection, folder, local, tmp_path, place
):
    options = (
        {"memory_bytes": None}
        if place == "memory"
        else {"directory": tmp_path}
    )
    saved = {}
    with job_of(connection, "freeze", **options) as job:
        first = trained(job, saved=saved, most=10)
        assert job.stats.local_hits < NUM_SAMPLES
    POOL.clear()
    with job_of(connection, "stream", **options) as job:
        rest = trained(job, saved=saved)
        # With the validation data.
        assert place == "memory" or job.stats.local_hits > NUM_SAMPLES
    actual = Run(first.losses + rest.losses, rest.weights, rest.num_correct)
    assert_equal(actual, local)
    with job_of(connection, "stream", **options) as job:
        assert_equal(trained(job), local)
        total = EPOCHS * NUM_SAMPLES + sum(SHARDS["val"])
        assert job.stats.local_hits == total
    POOL.clear()


def test_ranks_train_together_as_the_local_run(
    cluster, folder, local, tmp_path
):
    hits = []
    directory = [str(tmp_path / "cache")]
    runs = ((4, []), (2, directory), (2, directory), (2, ["shared"]))
    for num_ranks, cache in runs:
        done = run_family(
            [
                *(python(), "-m", "torch.distributed.run"),
                *("--standalone", f"--nproc-per-node={num_ranks}"),
                *(str(RANKS), str(tmp_path / "result.pt"), *cache),
            ],
            SECONDS,
            environment=environment_of(cluster),
        )
        assert done.returncode == 0, done.stderr
        saved = torch.load(tmp_path / "result.pt")
        assert_equal(Run(saved["losses"], saved["weights"]), local)
        hits.append(saved["hits"])
    # Ranks find what others have computed, and the second run everything.
    assert hits[0] == 0
    assert hits[1] > NUM_SAMPLES
    assert hits[2] == EPOCHS * NUM_SAMPLES
    # In memory, too.
    assert hits[3] > NUM_SAMPLES


@pytest.fixture(scope="module")
def cifar():
    """Shards of 500 images: to pretrain, to train with, to judge by."""
    name = os.environ.get("HAPI_TEST_DATA")
    if not name:
        pytest.skip(
            "the accuracy on CIFAR-10: HAPI_TEST_DATA names no folder with "
            "cifar10-*.tar"
        )
    train = sorted(Path(name).glob("cifar10-train-*.tar"))
    val = sorted(Path(name).glob("cifar10-test-*.tar"))
    return {"pretrain": train[3:6], "train": train[:3], "val": val[:1]}


def pretrained(paths):
    network = small_network(10)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    spans = local_spans(paths)
    for epoch in range(3):
        for _ in steps_of(network, optimizer, local_batches(spans, epoch)):
            pass
    torch.manual_seed(SEED)
    network.head.reset_parameters()
    return network


def test_accuracy_on_cifar_is_that_of_the_local_run(connection, cifar):
    data = {}
    for split in DATA:
        data[split] = f"swift://equal/cifar-{split}"
        place = parse_location(data[split])
        upload(connection, place, cifar[split], SilentReporter())
    network = pretrained(cifar["pretrain"])
    local = trained_locally(
        cifar["train"], cifar["val"], copy.deepcopy(network)
    )
    for cut in ("stream", "freeze"):
        with job_of(connection, cut, copy.deepcopy(network), data=data) as job:
            actual = trained(job)
        assert len(actual.losses) == EPOCHS * math.ceil(
            job.num_samples / BATCH
        )
        assert_equal(actual, local)
    # Twice what guessing gives.
    assert local.num_correct > 2 * 50
