"""Every sample once: ranks, loader workers, start methods, resumed runs."""

import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from as_user import environment_of
from children import enable_interrupts, run_family
from hapi_client import ReadConfig
from hapi_client.data.index import load_index
from hapi_client.sampling.partition import EpochPartition
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import ClientError
from jobs import small_job, upload_shards
from photos import shard, shards_of, with_corrupt_member
from waiting import SECONDS

PLACE = Location("once", "photos")
SHARDS = (13, 9, 16, 7, 11, 12, 4, 8)
NUM_SAMPLES = sum(SHARDS)
BATCH = 8
PARTITION = EpochPartition(4, 2)
OPTIONS = ReadConfig(num_threads=2)
# Workers read by themselves.
pytestmark = pytest.mark.usefixtures("no_early_reads")
NUM_KILLS = int(os.environ.get("HAPI_KILLS", "4"))
TRAINER = Path(__file__).parent.parent / "support" / "trainer.py"


def number_of(key):
    """``s3-0007`` is sample 7 of shard 3."""
    seed, number = key.removeprefix("s").split("-")
    return sum(SHARDS[: int(seed)]) + int(number)


@pytest.fixture(scope="module")
def place(connection):
    return upload_shards(connection, PLACE, shards_of(SHARDS, size=96))


def job_of(connection, place, **options):
    return small_job(
        place,
        connection=connection,
        labels=number_of,
        **{
            "batch_size": BATCH,
            "cut": "stream",
            "read": OPTIONS,
            "partition": PARTITION,
            **options,
        },
    )


def as_rank(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def torch_loader(dataset, num_workers, method=None):
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context=method,
        timeout=300 if num_workers else 0,
    )


def error_of(batches):
    """Message of an error; the error itself would keep the workers alive."""
    try:
        list(batches)
    except ClientError as error:
        return error.with_traceback(None)
    return pytest.fail("it is no error")


def labels_by_step(batches, first=0):
    return {
        step: labels.tolist()
        for step, (_, labels) in enumerate(batches, first)
    }


class PlainReads:
    """GETs of the shards that the store has answered, from its log."""

    def __init__(self, cluster, place):
        self._log = cluster.log("swift")
        self._shards = f"/{place.container}/{place.prefix}/"
        self._before = len(self._log.read_text())

    def wait_for(self, num_bytes):
        """Bytes of each, when there are so many, and no more come."""
        deadline = time.monotonic() + SECONDS
        while sum(sizes := self._sent()) < num_bytes:
            assert time.monotonic() < deadline, sizes
            time.sleep(0.05)
        time.sleep(0.2)
        return self._sent()

    def _sent(self):
        lines = self._log.read_text()[self._before :].splitlines()
        matches = [
            re.search(
                r" GET (\S+\.tar) HTTP/1\.\d 206 \S+ \S+ \S+ \S+ (\d+) ", line
            )
            for line in lines
        ]
        return [
            int(match[2])
            for match in matches
            if match and self._shards in match[1]
        ]


@pytest.fixture(scope="module")
def alone(connection, place):
    """The steps of an epoch that nobody shares."""
    with job_of(connection, place) as job:
        return labels_by_step(job.pipeline.loader(3))


def assert_same_steps(parts, alone):
    """Whatever the order of those who share a step."""
    together = {step: [] for step in alone}
    for step, labels in parts:
        together[step] += labels
    assert {step: sorted(each) for step, each in together.items()} == {
        step: sorted(each) for step, each in alone.items()
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_shared_steps_have_the_same_samples_and_no_byte_comes_twice(
    cluster, connection, place, alone, monkeypatch, world_size, num_workers
):
    index = load_index(connection, place)
    sample_bytes = sum(row.length for s in index.shards for row in s.rows)
    reads = PlainReads(cluster, place)
    parts = []
    for rank in range(world_size):
        as_rank(monkeypatch, rank, world_size)
        with job_of(connection, place) as job:
            dataset = job.dataset()
            dataset.set_epoch(3)
            batches = torch_loader(dataset, num_workers)
            delivered = labels_by_step(batches)
        assert list(delivered) == list(alone)
        assert all(delivered.values())
        parts += delivered.items()
    assert_same_steps(parts, alone)
    assert sum(reads.wait_for(sample_bytes)) == sample_bytes


def test_epoch_has_every_sample_once(alone):
    counts = Counter(label for labels in alone.values() for label in labels)
    assert counts == Counter(range(NUM_SAMPLES))


def test_jobs_own_loader_is_shared_by_ranks(connection, place, monkeypatch):
    together = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        with job_of(connection, place) as job:
            for loader in (job.pipeline.loader(0), job.pipeline.loader()):
                part = labels_by_step(loader).values()
                together += [label for labels in part for label in labels]
            whole = labels_by_step(
                job.pipeline.loader(0, shared=False)
            ).values()
            assert sum(map(len, whole)) == NUM_SAMPLES
    assert Counter(together) == Counter([*range(NUM_SAMPLES)] * 2)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_may_be_started_in_any_way(connection, place, alone, method):
    with job_of(connection, place, cut="freeze") as job:
        # A job that is under way has threads, locks and sockets.
        expected = dict(enumerate(job.pipeline.loader(3)))
        dataset = job.dataset()
        dataset.set_epoch(3)
        loader = torch_loader(dataset, 2, method)
        assert len(loader) == len(alone)
        steps = dict(enumerate(loader))
    assert labels_by_step(steps.values()) == alone
    for step, (features, _) in steps.items():
        assert features.device.type == "cpu"
        torch.testing.assert_close(
            features, expected[step][0], rtol=1e-4, atol=1e-5
        )


def test_workers_end_with_their_loop_and_must_be_able_to_share(
    connection, place
):
    with job_of(connection, place) as job:
        loader = iter(torch_loader(job.dataset(), 2))
        next(loader)
        started = time.monotonic()
        del loader
        assert time.monotonic() - started < 10
        loader = torch_loader(job.dataset(), 3)
        assert "3 loader workers cannot share" in str(error_of(loader))


@pytest.mark.parametrize("cut", ["stream", "freeze"])
def test_run_goes_on_after_kills_with_the_samples_that_are_left(
    connection, place, alone, monkeypatch, cut
):
    """With other numbers of ranks and workers than before."""
    dice = random.Random(5)
    for number in range(NUM_KILLS):
        ends = {0: 0, 1: len(alone)}
        first = ends.get(number, dice.randrange(1, len(alone)))
        state = state_of_killed(connection, place, cut, first, dice)
        world_size, num_workers = dice.choice([1, 2, 4]), dice.choice([0, 2])
        parts = []
        for rank in range(world_size):
            as_rank(monkeypatch, rank, world_size)
            with job_of(connection, place, cut=cut, partition=None) as job:
                dataset = job.dataset()
                dataset.load_state_dict(json.loads(json.dumps(state)))
                if dataset.epoch == 4:
                    assert first == len(alone)
                    continue
                batches = torch_loader(dataset, num_workers)
                begin = dataset.first_step
                assert begin == first
                parts += labels_by_step(batches, begin).items()
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("WORLD_SIZE")
        left = {
            step: labels for step, labels in alone.items() if step >= first
        }
        assert_same_steps(parts, left)


def state_of_killed(connection, place, cut, first, dice):
    """State of a run that ended after ``first`` steps of epoch 3."""
    with job_of(connection, place, cut=cut) as killed:
        if dice.random() < 0.5 and first:
            batches = iter(killed.pipeline.loader(3))
            for _ in range(first):
                next(batches)
            return killed.state_dict()
        num_workers = dice.choice([0, 2])
        dataset = killed.dataset()
        dataset.set_epoch(3)
        batches = iter(torch_loader(dataset, num_workers))
        for _ in range(first):
            next(batches)
        return dataset.state_dict(first)


def test_state_of_a_loop_over_workers_is_that_of_its_steps(connection, place):
    with job_of(connection, place) as job:
        dataset = job.dataset()
        states = [
            dataset.state_dict(step + 1)
            for step, _ in enumerate(torch_loader(dataset, 2))
        ]
        own = []
        for _ in job.pipeline.loader(0):
            own.append(job.state_dict())
    assert states == own
    assert (own[-1]["epoch"], own[-1]["step"]) == (1, 0)


def test_copy_of_a_data_set_knows_its_own_position(connection, place):
    """A process that loops without loader workers has such a copy."""
    with job_of(connection, place, partition=None) as job:
        dataset = job.dataset()
        copy = pickle.loads(pickle.dumps(dataset))
        batches = iter(copy)
        for _ in range(3):
            next(batches)
        del batches
        assert copy.state_dict() == dataset.state_dict(3)
        assert dataset.state_dict() == dataset.state_dict(0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_set_goes_on_with_the_epoch_that_its_job_has_begun(
    connection, place, num_workers
):
    with job_of(connection, place, partition=None) as job:
        whole = labels_by_step(job.pipeline.loader(0))
        batches = iter(job.pipeline.loader(0))
        begun = [next(batches)[1].tolist() for _ in range(4)]
        del batches
        dataset = job.dataset()
        assert dataset.first_step == 4
        rest = labels_by_step(torch_loader(dataset, num_workers), 4)
        assert {**dict(enumerate(begun)), **rest} == whole
        loader = torch_loader(job.dataset(), 2)
        assert "epoch 0 was started with other" in str(error_of(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_step_that_loses_all_its_samples_is_not_left_out_silently(
    connection, num_workers
):
    """A loop over a DataLoader counts the steps that it gets."""
    tar = with_corrupt_member(shard(9, size=96, seed=0), "s0-0004")
    holed = Location("once", "holed")
    upload_shards(connection, holed, {"a.tar": tar})
    options = {"partition": None, "on_error": "skip"}
    with job_of(connection, holed, batch_size=1, **options) as job:
        loader = torch_loader(job.dataset(), num_workers)
        error = error_of(loader)
        assert error.code == "bad_sample"
        assert "of step" in error.message
        assert len(list(job.pipeline.loader(0))) == 8
    with job_of(connection, holed, batch_size=3, **options) as job:
        loader = torch_loader(job.dataset(), num_workers)
        assert sorted(len(labels) for _, labels in loader) == [2, 3, 3]


def test_samples_by_number_are_those_of_the_index(connection, place):
    with job_of(connection, place) as job:
        expected = torch.cat(
            [features for features, _ in job.pipeline.loader()]
        )
        samples = job.dataset(shuffle=False).samples()
        assert len(samples) == NUM_SAMPLES
        features, label = samples[-1]
        assert int(label) == NUM_SAMPLES - 1
        torch.testing.assert_close(
            features, expected[-1], rtol=1e-4, atol=1e-5
        )
        assert samples.__getitems__([]) == []
        chosen = samples.__getitems__([5, 70, 6, 5])
        assert [int(number) for _, number in chosen] == [5, 70, 6, 5]
        with pytest.raises(IndexError, match=f"{NUM_SAMPLES} of"):
            samples[NUM_SAMPLES]
        samples.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_samples_go_through_torchs_samplers(connection, place, method):
    with job_of(connection, place, cut="freeze") as job:
        samples = job.dataset(shuffle=False).samples()
        samples[0]  # opens a connection, which no child may use
        loader = DataLoader(
            samples,
            batch_sampler=BatchSampler(
                SequentialSampler(samples), 20, drop_last=False
            ),
            num_workers=2,
            multiprocessing_context=method,
            timeout=300,
        )
        labels = [label for _, batch in loader for label in batch.tolist()]
        samples.close()
    assert labels == list(range(NUM_SAMPLES))


def test_data_may_be_named_shard_by_shard_and_split_by_split(
    connection, place
):
    data = {
        "train": f"{place}/{{0..4}}.tar",
        "val": [f"{place}/6.tar", f"{place}/5.tar"],
    }
    with job_of(connection, data) as job:
        assert job.num_samples == sum(SHARDS[:5])
        steps = labels_by_step(job.pipeline.loader(split="val")).values()
        first = sum(SHARDS[:6])
        assert [label for labels in steps for label in labels] == [
            *range(first, first + SHARDS[6]),
            *range(first - SHARDS[5], first),
        ]
        with pytest.raises(ClientError, match="'val' is not shuffled"):
            job.pipeline.loader(0, split="val")
        with pytest.raises(ClientError, match="no split 'test'"):
            job.pipeline.loader(split="test")


def test_killed_training_ends_with_the_weights_of_an_undisturbed_one(
    cluster, place, tmp_path
):
    """Killed by SIGKILL in each epoch, each time gone on with."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [sys.executable, str(TRAINER), str(place)]
    environment = environment_of(cluster)

    def lines_of_a_run(folder):
        done = run_family(
            [*command, str(folder)], 120, environment=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    lines = lines_of_a_run(whole)
    steps = []
    for wanted in (4, 17):
        child = subprocess.Popen(
            [*command, str(killed)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=enable_interrupts,
        )
        for line in child.stdout:
            steps.append(line.strip())
            if line.startswith(f"{wanted} "):
                break
        child.send_signal(signal.SIGKILL)
        child.wait(300)
        # It may have gone a step further meanwhile, checkpoint and all.
        steps += child.stdout.read().splitlines()
        child.stdout.close()
    steps += lines_of_a_run(killed)
    # A step that was killed before its checkpoint is taken once more.
    assert set(steps) == set(lines)
    ends = [torch.load(path / "last.pt") for path in (whole, killed)]
    for name, weight in ends[0]["model"].items():
        torch.testing.assert_close(
            ends[1]["model"][name], weight, rtol=1e-4, atol=1e-6
        )
