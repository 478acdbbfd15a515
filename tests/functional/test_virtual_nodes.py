"""One model, bit by bit, on any number of workers: real Swift, torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from as_user import environment_of
from children import run_family
from hapi_client.loading.feature_fetcher import FeatureFetcher
from hapi_client.swift.swift_url import parse_location
from hapi_protocol.errors import make_error
from hapi_training import VirtualNodes
from jobs import small_job, upload_shards
from local_ray import local_ray
from photos import shards_of
from preloaded import python
from waiting import SECONDS

# The last batch has two samples or more for each node: batch norm needs them.
SHARDS = (40, 16, 33, 23)
NUM_SAMPLES = sum(SHARDS)
EPOCHS = 3
SCRIPT = Path(__file__).parent.parent / "support" / "node_ranks.py"


@pytest.fixture(scope="module")
def train(cluster, connection, tmp_path_factory):
    """Trains on some workers, one run after another; returns the results."""
    shards = shards_of(SHARDS, size=120)
    upload_shards(connection, parse_location("swift://nodes/train"), shards)
    folder = tmp_path_factory.mktemp("nodes")

    def train(num_ranks, *runs, environment=None):
        ranks = ["-m", "torch.distributed.run", "--standalone"]
        ranks += [f"--nproc-per-node={num_ranks}"]
        command = [
            python(),
            *(ranks if num_ranks > 1 else []),
            str(SCRIPT),
            str(folder / "result.json"),
            json.dumps(runs),
        ]
        done = run_family(
            command,
            SECONDS,
            environment=environment_of(cluster) | (environment or {}),
        )
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "result.json").read_text())

    return train


RUNS = [
    {"cut": "stream"},
    {"cut": "freeze"},
    {"cut": "stream", "optimizer": "adamw", "augment": True},
    {"cut": "freeze", "optimizer": "adamw", "augment": True},
    {"cut": "freeze", "num_nodes": 6},
]


@pytest.fixture(scope="module")
def alone(train):
    """Digests of each run in one process, without caches."""
    results = train(1, *RUNS)
    assert all(not result["fallbacks"] for result in results)
    digests = [result["digest"] for result in results]
    # Another optimizer, and another number of nodes, is another model.
    assert len({*digests[::2]}) == 3
    return digests


def digests_of(results):
    return [result["digest"] for result in results]


@pytest.mark.parametrize("num_ranks", [2, 8, 3])
def test_model_has_the_same_bits_on_any_number_of_workers(
    train, alone, num_ranks
):
    # Six nodes are too few for eight workers.
    runs = RUNS if num_ranks < 6 else RUNS[:4]
    assert digests_of(train(num_ranks, *runs)) == alone[: len(runs)]


def test_model_has_the_same_bits_with_uneven_workers(train, alone):
    runs = [{**run, "counts": [5, 3]} for run in RUNS[:2]]
    assert digests_of(train(2, *runs)) == alone[:2]


def test_model_has_the_same_bits_whatever_is_cached(train, alone, tmp_path):
    """Cold, warm, too small, shared, lost, and of another number of ranks."""
    plain = RUNS[0]
    on_disk = {**plain, "directory": str(tmp_path)}
    for num_ranks in (1, 2):
        results = train(
            num_ranks,
            on_disk,
            {**plain, "memory_bytes": None},
            {**plain, "memory_bytes": 60_000},
            {**plain, "memory_bytes": None, "forget_at": 2},
        )
        assert digests_of(results) == alone[:1] * 4
        hits = [result["local_hits"] for result in results]
        # The second time the directory has everything.
        assert hits[0] == (EPOCHS if num_ranks == 2 else 2) * NUM_SAMPLES
        assert hits[1] == (EPOCHS - 1) * NUM_SAMPLES
        assert 0 < hits[2] < hits[1]
        assert hits[3] <= hits[1]


def test_model_has_the_same_bits_after_a_restart_elsewhere(train, alone):
    for restart_at in (2, 4, 9):
        (result,) = train(2, {**RUNS[1], "restart_at": restart_at})
        assert result["digest"] == alone[1]


def test_model_has_the_same_bits_in_loops_of_other_tools(train, alone):
    runs = [{**RUNS[0], "tool": tool} for tool in ("lightning", "accelerate")]
    assert digests_of(train(2, *runs)) == alone[:1] * 2


@pytest.mark.timeout(300)
def test_model_has_the_same_bits_in_ray_train(cluster, train, alone, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def loop(config):
        import torch.distributed

        import node_ranks

        assert torch.distributed.get_world_size() == 2
        results = [node_ranks.train(**run) for run in config["runs"]]
        path = tmp_path / f"rank {torch.distributed.get_rank()}"
        path.write_text(json.dumps(digests_of(results)))

    with local_ray(cluster):
        TorchTrainer(
            loop,
            train_loop_config={"runs": RUNS[:2]},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    for rank in range(2):
        digests = json.loads((tmp_path / f"rank {rank}").read_text())
        assert digests == alone[:2]


@pytest.mark.usefixtures("train")
def test_what_may_give_other_bits_is_warned_of(
    connection, caplog, monkeypatch
):
    load = FeatureFetcher.load

    def fail_once(fetcher, span, training=None):
        monkeypatch.setattr(FeatureFetcher, "load", load)
        raise make_error("too_slow", "a test")

    def train(cut):
        caplog.clear()
        options = {"connection": connection, "batch_size": 24, "cut": cut}
        with small_job("swift://nodes/train", **options) as job:
            for step in VirtualNodes(job.tail, 8).steps(job.train_loader):
                for features, labels in step:
                    loss = nn.functional.cross_entropy(
                        job.tail(features), labels
                    )
                    step.backward(loss)
        return [r.message for r in caplog.records if "bits" in r.message]

    assert train("freeze") == []
    (message,) = train("auto")
    assert "cut='auto' chooses by measurements" in message
    monkeypatch.setattr(FeatureFetcher, "load", fail_once)
    (message,) = train("freeze")
    assert "spans of epoch 0 were read raw" in message


def test_other_threads_give_other_bits(train, alone):
    """A control; those of sums and of batches are unit tests."""
    (threads,) = train(1, {**RUNS[0], "threads": 2})
    assert threads["digest"] != alone[0]
